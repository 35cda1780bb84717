"""Eight codes at a time: what the decoder does to nibbles and bytes in a lane's registers."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "choose",
    "expand",
    "funnel",
    "lane_sentinels",
    "load_book",
    "lookup",
    "low_nibbles",
    "permute",
    "rank_sentinels",
    "sentinels",
    "spread",
    "window",
]


@triton.jit
def permute(low, high, selector, PTX: tl.constexpr):
    """Bytes of ``high:low`` picked by the four low nibbles of ``selector``, each 0 to 7."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.uint32, is_pure=True, pack=1
        )
    pool = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    result = pool & 0
    for j in tl.static_range(4):
        result |= ((pool >> (((selector >> (4 * j)) & 7) * 8)) & 0xFF) << (8 * j)
    return result.to(tl.uint32)


@triton.jit
def funnel(low, high, shift, PTX: tl.constexpr):
    """32 bits of ``high:low`` from bit ``shift % 32``."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], dtype=tl.uint32, is_pure=True, pack=1
        )
    pool = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    return (pool >> (shift & 31).to(tl.uint64)).to(tl.uint32)


@triton.jit
def choose(mask, ones, zeros, PTX: tl.constexpr):
    """Bits of ``ones`` where ``mask`` has a 1, else of ``zeros``, in one instruction."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r", [mask, ones, zeros], dtype=tl.uint32, is_pure=True, pack=1
        )
    return (ones & mask) | (zeros & (mask ^ 0xFFFFFFFF))


@triton.jit
def low_nibbles(count, PTX: tl.constexpr):
    """A mask of the ``count`` (0 to 8) lowest nibbles."""
    if PTX:
        return tl.inline_asm_elementwise(
            "bmsk.clamp.b32 $0, 0, $1;", "=r,r", [count * 4], dtype=tl.uint32, is_pure=True, pack=1
        )
    return ((tl.full(count.shape, 1, tl.uint64) << (count * 4).to(tl.uint64)) - 1).to(tl.uint32)


@triton.jit
def window(words, bit, last_word, PTX: tl.constexpr):
    """32 bits from bit ``bit`` of ``words``; garbage from past ``last_word``, after which one more may be read."""
    word = tl.minimum(bit >> 5, last_word)
    return funnel(tl.load(words + word), tl.load(words + word + 1), bit, PTX)


@triton.jit
def spread(x, WIDTH: tl.constexpr):
    """Eight codes of WIDTH bits, packed, as eight nibbles; higher bits of ``x`` are dropped."""
    if WIDTH == 1:
        x = x & 0xFF
        x += (x & 0xF0) * 0xFFF
        x += (x & 0x000C000C) * 0x3F
        x += (x & 0x02020202) * 0x7
    if WIDTH == 2:
        x = x & 0xFFFF
        x += (x & 0xFF00) * 0xFF
        x += (x & 0x00F000F0) * 0xF
        x += (x & 0x0C0C0C0C) * 0x3
    if WIDTH == 3:
        x = x & 0xFFFFFF
        x += (x & 0xFFF000) * 0xF
        x += (x & 0x0FC00FC0) * 0x3
        x += x & 0x38383838
    return x


@triton.jit
def sentinels(nibbles, WIDTH: tl.constexpr):
    """1 in every nibble whose code is the all-ones sentinel of WIDTH bits."""
    t = nibbles
    if WIDTH == 2:
        t = nibbles & (nibbles >> 1)
    if WIDTH == 3:
        t = nibbles & (nibbles >> 1) & (nibbles >> 2)
    if WIDTH == 4:
        t = nibbles & (nibbles >> 1)
        t = t & (t >> 2)
    return t & 0x11111111


@triton.jit
def load_book(books, WIDTH: tl.constexpr):
    """A codebook's entries as four words, those that WIDTH needs."""
    b0 = tl.load(books)
    b1 = tl.load(books + 1) if WIDTH >= 3 else b0
    b2 = tl.load(books + 2) if WIDTH == 4 else b0
    b3 = tl.load(books + 3) if WIDTH == 4 else b0
    return b0, b1, b2, b3


@triton.jit
def lookup(nibbles, book, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Codebook entries of eight codes: four bytes each in two words."""
    b0, b1, b2, b3 = book
    if WIDTH <= 3:
        return permute(b0, b1, nibbles, PTX), permute(b0, b1, nibbles >> 16, PTX)
    index = nibbles & 0x77777777
    pick = ((nibbles >> 1) & 0x44444444) | 0x32103210
    low = permute(permute(b0, b1, index, PTX), permute(b2, b3, index, PTX), pick, PTX)
    index = index >> 16
    return low, permute(permute(b0, b1, index, PTX), permute(b2, b3, index, PTX), pick >> 16, PTX)


@triton.jit
def expand(low, high, t, ranks, next_low, next_high, PTX: tl.constexpr):
    """``low:high`` with the compact bytes ``next_low:next_high`` put where ``t`` has a 1."""
    mask = t * 15
    first = permute(next_low, low, (ranks & mask) | (0x76547654 & (mask ^ 0xFFFFFFFF)), PTX)
    moved = permute(next_low, next_high, ranks >> 16, PTX)
    return first, permute(moved, high, 0x7654 ^ ((t >> 16) << 2), PTX)


@triton.jit
def rank_sentinels(t):
    """Exclusive prefix sum over a lane's nibbles, its count, the lane's first rank in the chunk, and the chunk's total.

    A thread holds one lane of each quarter of a chunk. The quarters' counts are scanned together, as the bytes of one
    word: before a lane there are at most 31 others of its quarter with at most 8 sentinels each.
    """
    inclusive = t * 0x11111111
    count = inclusive >> 28
    quarter = tl.arange(0, 4)[:, None].to(tl.uint32)
    packed = tl.sum(tl.reshape(count, [4, 32]) << (8 * quarter), 0)
    before = tl.cumsum(packed, 0) - packed
    even = tl.sum(packed & 0x00FF00FF, 0)
    odd = tl.sum((packed >> 8) & 0x00FF00FF, 0)
    first = (even & 0xFFFF) + (odd & 0xFFFF)
    second = first + (even >> 16)
    base = tl.where(quarter == 0, 0, tl.where(quarter == 1, even & 0xFFFF, tl.where(quarter == 2, first, second)))
    ranks = ((before[None, :] >> (8 * quarter)) & 0xFF) + base
    return inclusive - t, count, tl.reshape(ranks, [128]), second + (odd >> 16)


@triton.jit
def lane_sentinels(nibbles, count, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """Sentinels among a lane's first ``count`` codes."""
    return sentinels(nibbles, WIDTH) & low_nibbles(count, PTX)
