"""From exponents and residuals to elements in memory, with their checksum."""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import checksum, formats, layout
from splitzip_aio.codec.kernels.bits import choose, low_nibbles, permute, spread, window

__all__ = ["copy_chunk", "emit"]

HEADER = tl.constexpr(layout.HEADER_BYTES)
KEY_STEP = tl.constexpr(checksum.KEY_STEP)
KEY_OFFSET = tl.constexpr(checksum.KEY_OFFSET)
STEP = tl.constexpr(checksum.STEP)
BF16 = tl.constexpr(formats.BF16.code)
F16 = tl.constexpr(formats.F16.code)
F32 = tl.constexpr(formats.F32.code)
F8_E4M3 = tl.constexpr(formats.F8_E4M3.code)
F8_E5M2 = tl.constexpr(formats.F8_E5M2.code)
UNBOUNDED = tl.constexpr(0x7FFFFFFF)  # a window whose caller knows that it lies inside the segment


@triton.jit
def group_keys(group):
    """Multiplier of the first word of a 16-byte group; see ``codec/checksum.py``."""
    mixed = group * KEY_STEP + KEY_OFFSET
    return (mixed ^ (mixed >> 15)) | 1


@triton.jit
def accumulate(sums, word, key, PTX: tl.constexpr):
    """``sums + word * key`` in 64 bits, which compilers do not fuse on their own."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l", [word, key, sums], dtype=tl.uint64, is_pure=True, pack=1
        )
    return sums + word.to(tl.uint64) * key.to(tl.uint64)


@triton.jit
def clip(word, left, PTX: tl.constexpr):
    """The ``left`` lowest bytes of ``word``: all of it from 4 up, none from 0 down."""
    return word & low_nibbles(tl.minimum(tl.maximum(left, 0), 4).to(tl.uint32) * 2, PTX)


@triton.jit
def store(out, first, words, left, PARTIAL: tl.constexpr, COLUMNS: tl.constexpr):
    """Store (L, COLUMNS) words at word ``first`` (L,); where PARTIAL, only the ``left`` (L,) bytes that exist."""
    column = tl.arange(0, COLUMNS)[None, :]
    place = out + (first[:, None] + column)
    if PARTIAL:
        rest = left[:, None] - 4 * column
        tl.store(place, words, mask=rest >= 4)
        cut = (rest > 0) & (rest < 4)
        bytes_left = tl.sum(tl.sum(tl.where(cut, rest, 0), 1), 0)
        word = tl.sum(tl.sum(tl.where(cut, words, 0), 1), 0)
        at = tl.sum(tl.sum(tl.where(cut, first[:, None] + column, 0), 1), 0)
        byte = (out + at).to(tl.pointer_type(tl.uint8))
        for k in tl.static_range(3):
            tl.store(byte + k, (word >> (8 * k)).to(tl.uint8), mask=bytes_left > k)
    else:
        tl.store(place, words)


@triton.jit
def emit4(sums, out, group, w0, w1, w2, w3, size, PARTIAL: tl.constexpr, CHECK: tl.constexpr, PTX: tl.constexpr):
    """Store the lanes' words of a 16-byte ``group`` each, of a segment of ``size`` bytes, and add their checksums."""
    left = size - 16 * group
    if PARTIAL:
        w0 = clip(w0, left, PTX)
        w1 = clip(w1, left - 4, PTX)
        w2 = clip(w2, left - 8, PTX)
        w3 = clip(w3, left - 12, PTX)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [group.shape[0], 4])
    store(out, 4 * group, words, left, PARTIAL, 4)
    if CHECK:
        key = group_keys(group.to(tl.uint32))
        sums = accumulate(sums, w0, key, PTX)
        sums = accumulate(sums, w1, key + STEP, PTX)
        sums = accumulate(sums, w2, key + 2 * STEP, PTX)
        sums = accumulate(sums, w3, key + 3 * STEP, PTX)
    return sums


@triton.jit
def emit2(sums, out, half, w0, w1, size, PARTIAL: tl.constexpr, CHECK: tl.constexpr, PTX: tl.constexpr):
    """``emit4`` for lanes that have half a group each."""
    left = size - 8 * half
    if PARTIAL:
        w0 = clip(w0, left, PTX)
        w1 = clip(w1, left - 4, PTX)
    store(out, 2 * half, tl.join(w0, w1), left, PARTIAL, 2)
    if CHECK:
        key = group_keys((half >> 1).to(tl.uint32)) + (half & 1).to(tl.uint32) * (2 * STEP)
        sums = accumulate(sums, w0, key, PTX)
        sums = accumulate(sums, w1, key + STEP, PTX)
    return sums


@triton.jit
def bf16_bytes(e, s, PTX: tl.constexpr):
    """Low and high bytes of four BF16 elements: exponent bytes ``e`` and sign-mantissa bytes ``s``."""
    return choose(0x7F7F7F7F, s, e << 7, PTX), choose(0x7F7F7F7F, e >> 1, s, PTX)


@triton.jit
def nibble_bytes(nibbles):
    """Four low nibbles as four bytes."""
    x = nibbles & 0xFFFF
    x += (x & 0xFF00) * 0xFF
    return (x + (x & 0x00F000F0) * 0xF) & 0x0F0F0F0F


@triton.jit
def emit_16bit(
    sums, out, lane, low0, high0, low1, high1, size, PARTIAL: tl.constexpr, CHECK: tl.constexpr, PTX: tl.constexpr
):
    """Eight 16-bit elements a lane from their low and high bytes."""
    w0 = permute(low0, high0, 0x5140, PTX)
    w1 = permute(low0, high0, 0x7362, PTX)
    w2 = permute(low1, high1, 0x5140, PTX)
    w3 = permute(low1, high1, 0x7362, PTX)
    return emit4(sums, out, lane, w0, w1, w2, w3, size, PARTIAL, CHECK, PTX)


@triton.jit
def emit_f32(
    sums,
    out,
    lane,
    last_lane,
    e0,
    e1,
    s0,
    s1,
    residual,
    size,
    PARTIAL: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Eight F32 elements a lane: ``residual`` points to sign and upper mantissa, 16 bits an element."""
    for half in tl.static_range(2):
        e = e0 if half == 0 else e1
        s = s0 if half == 0 else s1
        pair0 = tl.load(residual + tl.minimum(lane, last_lane) * 4 + half * 2)
        pair1 = tl.load(residual + tl.minimum(lane, last_lane) * 4 + half * 2 + 1)
        w0 = f32_words(e & 0xFF, s & 0xFF, pair0 & 0xFFFF)
        w1 = f32_words((e >> 8) & 0xFF, (s >> 8) & 0xFF, pair0 >> 16)
        w2 = f32_words((e >> 16) & 0xFF, (s >> 16) & 0xFF, pair1 & 0xFFFF)
        w3 = f32_words(e >> 24, s >> 24, pair1 >> 16)
        sums = emit4(sums, out, lane * 2 + half, w0, w1, w2, w3, size, PARTIAL, CHECK, PTX)
    return sums


@triton.jit
def f32_words(e, low, high):
    return low | ((high & 0x7FFF) << 8) | (e << 23) | ((high & 0x8000) << 16)


@triton.jit
def emit(
    sums,
    e0,
    e1,
    s,
    lane,
    segment,
    high,
    out,
    size,
    last_lane,
    FORMAT: tl.constexpr,
    PARTIAL: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Join exponents and residuals, store the elements and return ``sums`` with the lanes' checksums."""
    low = (segment + HEADER).to(tl.pointer_type(tl.uint32))
    s0 = s.to(tl.uint32)
    s1 = (s >> 32).to(tl.uint32)
    if FORMAT == BF16:
        low0, high0 = bf16_bytes(e0, s0, PTX)
        low1, high1 = bf16_bytes(e1, s1, PTX)
        sums = emit_16bit(sums, out, lane, low0, high0, low1, high1, size, PARTIAL, CHECK, PTX)
    if FORMAT == F16:
        h = spread(window(high, tl.minimum(lane, last_lane).to(tl.uint32) * 24, UNBOUNDED, PTX), 3)
        h0 = nibble_bytes(h)
        h1 = nibble_bytes(h >> 16)
        high0 = ((h0 & 0x04040404) << 5) | (e0 << 2) | (h0 & 0x03030303)
        high1 = ((h1 & 0x04040404) << 5) | (e1 << 2) | (h1 & 0x03030303)
        sums = emit_16bit(sums, out, lane, s0, high0, s1, high1, size, PARTIAL, CHECK, PTX)
    if FORMAT == F32:
        sums = emit_f32(sums, out, lane, last_lane, e0, e1, s0, s1, high, size, PARTIAL, CHECK, PTX)
    if FORMAT == F8_E4M3:
        r = tl.load(low + tl.minimum(lane, last_lane))
        r0 = nibble_bytes(r)
        r1 = nibble_bytes(r >> 16)
        w0 = ((r0 & 0x08080808) << 4) | (e0 << 3) | (r0 & 0x07070707)
        w1 = ((r1 & 0x08080808) << 4) | (e1 << 3) | (r1 & 0x07070707)
        sums = emit2(sums, out, lane, w0, w1, size, PARTIAL, CHECK, PTX)
    if FORMAT == F8_E5M2:
        r = spread(window(low, tl.minimum(lane, last_lane).to(tl.uint32) * 24, UNBOUNDED, PTX), 3)
        r0 = nibble_bytes(r)
        r1 = nibble_bytes(r >> 16)
        w0 = ((r0 & 0x04040404) << 5) | (e0 << 2) | (r0 & 0x03030303)
        w1 = ((r1 & 0x04040404) << 5) | (e1 << 2) | (r1 & 0x03030303)
        sums = emit2(sums, out, lane, w0, w1, size, PARTIAL, CHECK, PTX)
    return sums


@triton.jit
def copy_chunk(segment, out, group, size, PARTIAL: tl.constexpr, CHECK: tl.constexpr):
    """Copy sixteen bytes a lane."""
    first = group * 4
    left = size - 4 * first
    column = tl.arange(0, 4)[None, :]
    place = (segment + HEADER).to(tl.pointer_type(tl.uint32)) + (first[:, None] + column)
    if PARTIAL:
        words = tl.load(place, mask=left[:, None] - 4 * column > 0, other=0)
        words = clip(words, left[:, None] - 4 * column, False)
    else:
        words = tl.load(place)
    store(out, first, words, left, PARTIAL, 4)
    if not CHECK:
        return tl.zeros(first.shape, tl.uint64)
    keys = group_keys(group.to(tl.uint32))[:, None] + column.to(tl.uint32) * STEP
    return tl.sum(words.to(tl.uint64) * keys.to(tl.uint64), 1)
