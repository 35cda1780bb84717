"""Triton kernels that decode every segment of a slot in one launch.

A program is one warp and decodes one tile. One of tiers (``top16.py`` has the other coding) goes chunk by chunk of 1024
elements: it fetches the next chunk before it works on this one, and carries the bit position in the tail along, so it
needs no barrier and one index entry. A lane owns eight consecutive elements, so its codes of one tier are eight nibbles
of a 32-bit word, and all work is done on eight nibbles or four bytes at once:

* *Spread* turns eight packed codes into eight nibbles; where a nibble is the sentinel, ``t`` has a 1.
* ``t * 0x11111111`` is the inclusive prefix sum over nibbles. Its top nibble is the lane's count, and the prefix sum of
  the counts over lanes is the place of the lane's first code in the next tier.
* *Lookup* is a byte permute (PRMT) whose selector is the nibbles themselves and whose pool is the codebook.
* *Expand* moves the bytes decoded from the next tier, which are compact, to the places of the sentinels: a byte
  permute again, whose selector is the exclusive prefix sum.

So a tier costs a fixed handful of instructions for eight elements, whatever the data; escapes cost one tier more, in
chunks that have any. Every word that is read from the tail is clamped to it, so no input, however wrong, is followed
out of its segment; the decoded bytes then fail their checksum, which is computed here as they are stored. An index that
does not fit what was decoded spoils the checksum on purpose.

``PTX`` selects inline PTX for three instructions that Triton has no name for; without it the same arithmetic runs
in the interpreter and on other GPUs. The slot's table is described in ``slot_table.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import checksum, formats, layout
from splitzip_aio.codec.kernels.bits import (
    expand,
    lane_sentinels,
    load_book,
    lookup,
    rank_sentinels,
    sentinels,
    spread,
    window,
)
from splitzip_aio.codec.kernels.output import copy_chunk, emit
from splitzip_aio.codec.kernels.planes import fetch
from splitzip_aio.codec.kernels.top16 import decode_listed
from splitzip_aio.codec.slot_table import DESCRIPTOR_WORDS

__all__ = ["decode_slot_kernel"]

CHUNK = tl.constexpr(layout.CHUNK_ELEMENTS)
LANES = tl.constexpr(layout.CHUNK_ELEMENTS // 8)
GROUP = tl.constexpr(checksum.GROUP - 2**64)
F32 = tl.constexpr(formats.F32.code)
DESCRIPTOR = tl.constexpr(DESCRIPTOR_WORDS["words"])
ELEMENTS = tl.constexpr(DESCRIPTOR_WORDS["elements"])
CODING = tl.constexpr(DESCRIPTOR_WORDS["coding"])
FIRST_TILE = tl.constexpr(DESCRIPTOR_WORDS["first_tile"])
DECODED_BYTES = tl.constexpr(DESCRIPTOR_WORDS["decoded_bytes"])
HIGH = tl.constexpr(DESCRIPTOR_WORDS["high"])
CODES = tl.constexpr(DESCRIPTOR_WORDS["codes"])
INDEX = tl.constexpr(DESCRIPTOR_WORDS["index"])
TAIL = tl.constexpr(DESCRIPTOR_WORDS["tail"])
LAST_WORD = tl.constexpr(DESCRIPTOR_WORDS["last_word"])
ESCAPES = tl.constexpr(DESCRIPTOR_WORDS["escapes"])
BOOKS = tl.constexpr(DESCRIPTOR_WORDS["codebooks"])


@triton.jit
def exponents(
    codes,
    tail,
    last_word,
    start,
    books,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    PTX: tl.constexpr,
):
    """Exponents of each lane's eight elements, four bytes each in two words, and the bit after the chunk's tail.

    ``codes`` (L,) are the lanes' codes of the first tier, zero where there are no elements, ``start`` the chunk's first
    bit in ``tail``. A width of 0 ends the schedule.
    """
    n0 = spread(codes, W0)
    low, high = lookup(n0, books[0], W0, PTX)
    t0 = sentinels(n0, W0)
    if W1 > 0:
        r0, c0, first, total = rank_sentinels(t0)
        n1 = spread(window(tail, start + first * W1, last_word, PTX), W1)
        low1, high1 = lookup(n1, books[1], W1, PTX)
        t1 = lane_sentinels(n1, c0, W1, PTX)
        start += total * W1
        if W2 > 0:
            r1, c1, first, total = rank_sentinels(t1)
            n2 = spread(window(tail, start + first * W2, last_word, PTX), W2)
            low2, high2 = lookup(n2, books[2], W2, PTX)
            t2 = lane_sentinels(n2, c1, W2, PTX)
            start += total * W2
            if W3 > 0:
                r2, c2, first, total = rank_sentinels(t2)
                n3 = spread(window(tail, start + first * W3, last_word, PTX), W3)
                low3, high3 = lookup(n3, books[3], W3, PTX)
                t3 = lane_sentinels(n3, c2, W3, PTX)
                start += total * W3
                low3, high3, start = escapes(low3, high3, t3, tail, start, last_word, PTX)
                low2, high2 = expand(low2, high2, t2, r2, low3, high3, PTX)
            else:
                low2, high2, start = escapes(low2, high2, t2, tail, start, last_word, PTX)
            low1, high1 = expand(low1, high1, t1, r1, low2, high2, PTX)
        else:
            low1, high1, start = escapes(low1, high1, t1, tail, start, last_word, PTX)
        low, high = expand(low, high, t0, r0, low1, high1, PTX)
    else:
        low, high, start = escapes(low, high, t0, tail, start, last_word, PTX)
    return low, high, start


@triton.jit
def escapes(low, high, t, tail, start, last_word, PTX: tl.constexpr):
    """``low:high`` with the raw bytes of the escapes marked in ``t`` in their places, and the bit after them."""
    if tl.max(t.to(tl.int32), 0) != 0:
        ranks, _, first, total = rank_sentinels(t)
        bit = start + first * 8
        raw_low = window(tail, bit, last_word, PTX)
        raw_high = window(tail, bit + 32, last_word, PTX)
        low, high = expand(low, high, t, ranks, raw_low, raw_high, PTX)
        start += total * 8
    return low, high, start


@triton.jit
def decode_tiers(
    segment,
    codes,
    index,
    tail,
    last_word,
    high,
    out,
    tile,
    elements,
    size,
    books,
    FORMAT: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decode tile ``tile``, all elements of an index entry; returns its checksum, and whether the index is wrong."""
    lane = tl.arange(0, LANES)
    chunk = tile * (TILE // CHUNK)
    chunks = tl.cdiv(elements, CHUNK)
    full = tl.minimum(chunk + TILE // CHUNK, elements // CHUNK)
    last_lane = (elements - 1) // 8
    packed, s = fetch(segment, codes, tl.minimum(lane + chunk * LANES, last_lane), FORMAT, W0, PTX)
    sums = tl.zeros([LANES], tl.uint64)
    start = tl.load(index + tile)
    end = tl.load(index + tile + 1)
    wrong = (tile == 0) & (start != 0)
    for k in range(chunk, full):
        ahead = tl.minimum(k + 1, full - 1)
        packed_ahead, s_ahead = fetch(segment, codes, lane + ahead * LANES, FORMAT, W0, PTX)
        e0, e1, start = exponents(packed, tail, last_word, start, books, W0, W1, W2, W3, PTX)
        sums = emit(sums, e0, e1, s, lane + k * LANES, segment, high, out, size, last_lane, FORMAT, False, CHECK, PTX)
        packed = packed_ahead
        s = s_ahead
    if (full < chunk + TILE // CHUNK) & (full < chunks):
        at = lane + full * LANES
        packed, s = fetch(segment, codes, tl.minimum(at, last_lane), FORMAT, W0, PTX)
        packed = tl.where(at <= last_lane, packed, 0)
        e0, e1, start = exponents(packed, tail, last_word, start, books, W0, W1, W2, W3, PTX)
        sums = emit(sums, e0, e1, s, at, segment, high, out, size, last_lane, FORMAT, True, CHECK, PTX)
    return tl.sum(sums, 0), wrong | (start != end)


@triton.jit
def coded(
    segment,
    descriptor,
    out,
    tile,
    elements,
    size,
    FORMAT: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decode one tile of a coded segment; widths of 0 mean top16.

    Returns its checksum, and whether an entry of the index contradicts what was decoded.
    """
    codes = segment + tl.load(descriptor + CODES)
    index = (segment + tl.load(descriptor + INDEX)).to(tl.pointer_type(tl.uint32))
    tail = segment + tl.load(descriptor + TAIL)
    high = (segment + tl.load(descriptor + HIGH)).to(tl.pointer_type(tl.uint32))
    if W0 == 0:
        book = load_book(descriptor + BOOKS, 4)
        escapes = tl.load(descriptor + ESCAPES)
        total, wrong = decode_listed(
            segment, codes, index, tail, high, out, tile, elements, size, escapes, book, FORMAT, TILE, CHECK, PTX
        )
    else:
        books = (
            load_book(descriptor + BOOKS, W0),
            load_book(descriptor + BOOKS + 4, W1),
            load_book(descriptor + BOOKS + 8, W2),
            load_book(descriptor + BOOKS + 12, W3),
        )
        last_word = tl.load(descriptor + LAST_WORD)
        total, wrong = decode_tiers(
            segment, codes, index, tail.to(tl.pointer_type(tl.uint32)), last_word, high, out, tile, elements, size,
            books, FORMAT, W0, W1, W2, W3, TILE, CHECK, PTX,
        )  # fmt: skip
    return total, wrong


@triton.jit
def copied(segment, out, tile, size, TILE_BYTES: tl.constexpr, CHECK: tl.constexpr):
    """Copy one tile of a stored segment. Returns its checksum."""
    lane = tl.arange(0, LANES)
    steps: tl.constexpr = TILE_BYTES // (16 * LANES)
    sums = tl.zeros([LANES], tl.uint64)
    full = tl.minimum((tile + 1) * steps, size // (16 * LANES))
    for k in range(tile * steps, full):
        sums += copy_chunk(segment, out, lane + k * LANES, size, False, CHECK)
    if (full < (tile + 1) * steps) & (full * (16 * LANES) < size):
        sums += copy_chunk(segment, out, lane + full * LANES, size, True, CHECK)
    return tl.sum(sums, 0)


@triton.jit
def tile_groups(tile, size, TILE_BYTES: tl.constexpr):
    """16-byte groups of a tile."""
    return (tl.minimum(size - tile * TILE_BYTES, TILE_BYTES) + 15) // 16


@triton.jit(do_not_specialize=["descriptors", "results", "tiles"])
def decode_slot_kernel(
    base,
    descriptors,
    results,
    tiles,
    MIXED: tl.constexpr,
    FORMAT: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    TILE: tl.constexpr,
    TOP16_TILE: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decode tile ``program_id(0)`` of a slot.

    ``base`` points to the landing buffer (uint8); ``descriptors``, ``results`` and ``tiles`` are the byte offsets of
    the parts of its table. Coded segments have elements of FORMAT. MIXED looks at each segment's own coding (top16 or a
    standard schedule); otherwise all have the widths ``W0..W3`` (``W0`` 0: top16). Either copies stored segments.
    """
    segment_id = tl.load((base + tiles).to(tl.pointer_type(tl.int32)) + tl.program_id(0))
    descriptor = (base + descriptors).to(tl.pointer_type(tl.uint32)) + segment_id * DESCRIPTOR
    segment = tl.multiple_of(base + tl.load(descriptor.to(tl.pointer_type(tl.int64))), 8)
    out = tl.load(descriptor.to(tl.pointer_type(tl.int64)) + 1).to(tl.pointer_type(tl.uint32))
    out = tl.multiple_of(out, 16)
    elements = tl.load(descriptor + ELEMENTS).to(tl.int32)
    coding = tl.load(descriptor + CODING).to(tl.int32)
    tile = tl.program_id(0) - tl.load(descriptor + FIRST_TILE).to(tl.int32)
    size = tl.load(descriptor + DECODED_BYTES).to(tl.int32)
    ELEMENT_BYTES: tl.constexpr = 4 if FORMAT == F32 else 1 if FORMAT > F32 else 2
    groups = tile_groups(tile, size, TILE * ELEMENT_BYTES)
    wrong = tile < 0
    if coding == 0:
        total = copied(segment, out, tile, size, 2 * TILE, CHECK)
        groups = tile_groups(tile, size, 2 * TILE)
    elif MIXED:
        if coding == 1:
            total, wrong = coded(
                segment, descriptor, out, tile, elements, size, FORMAT, 0, 0, 0, 0, TOP16_TILE, CHECK, PTX
            )
            groups = tile_groups(tile, size, TOP16_TILE * ELEMENT_BYTES)
        elif coding == 2:
            total, wrong = coded(segment, descriptor, out, tile, elements, size, FORMAT, 4, 0, 0, 0, TILE, CHECK, PTX)
        elif coding == 3:
            total, wrong = coded(segment, descriptor, out, tile, elements, size, FORMAT, 3, 0, 0, 0, TILE, CHECK, PTX)
        elif coding == 4:
            total, wrong = coded(segment, descriptor, out, tile, elements, size, FORMAT, 2, 3, 0, 0, TILE, CHECK, PTX)
        else:
            total, wrong = coded(segment, descriptor, out, tile, elements, size, FORMAT, 2, 2, 3, 0, TILE, CHECK, PTX)
    elif W0 == 0:
        total, wrong = coded(segment, descriptor, out, tile, elements, size, FORMAT, 0, 0, 0, 0, TOP16_TILE, CHECK, PTX)
        groups = tile_groups(tile, size, TOP16_TILE * ELEMENT_BYTES)
    else:
        total, wrong = coded(segment, descriptor, out, tile, elements, size, FORMAT, W0, W1, W2, W3, TILE, CHECK, PTX)
    if CHECK:
        total = total.to(tl.int64) + groups.to(tl.int64) * GROUP + wrong.to(tl.int64)
        tl.atomic_add((base + results).to(tl.pointer_type(tl.int64)) + segment_id, total, sem="relaxed")
