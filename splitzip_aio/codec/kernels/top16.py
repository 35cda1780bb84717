"""The published layout on the GPU: codes of four bits, and a list of escapes.

No element depends on another, so of BF16 a program asks for a whole tile before it works on any of it, and waits for
memory once. What does not fill a tile goes chunk by chunk, and so do other formats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import formats, layout
from splitzip_aio.codec.kernels.bits import choose, lookup
from splitzip_aio.codec.kernels.output import emit
from splitzip_aio.codec.kernels.planes import fetch

__all__ = ["decode_listed"]

CHUNK = tl.constexpr(layout.CHUNK_ELEMENTS)
INDEXED = tl.constexpr(layout.TILE_ELEMENTS)
LANES = tl.constexpr(layout.CHUNK_ELEMENTS // 8)
BF16 = tl.constexpr(formats.BF16.code)
NOWHERE = tl.constexpr(0xFFFF)


@triton.jit
def place_of(places, escape, end):
    """The place of an escape in what its index entry covers; after all places from ``end`` on."""
    return tl.load(places + escape, mask=escape < end, other=NOWHERE).to(tl.int32)


@triton.jit
def exponents(codes, first, places, values, escape, at, end, book, PTX: tl.constexpr):
    """Exponents of a chunk, four bytes each in two words a lane, and the escape after it with its place.

    ``codes`` (LANES,) have the even element in the high nibble. The chunk starts at place ``first``, and ``at`` is that
    of ``escape``, the first that was not looked at before.
    """
    low, high = lookup(choose(0x0F0F0F0F, codes >> 4, codes << 4, PTX), book, 4, PTX)
    lane = tl.arange(0, LANES) + first // 8
    while at < first + CHUNK:
        value = tl.load(values + escape).to(tl.uint32)
        shift = ((at & 3) * 8).to(tl.uint32)
        hit = lane == (at >> 3)
        keep = (tl.full((), 0xFF, tl.uint32) << shift) ^ 0xFFFFFFFF
        low = tl.where(hit & ((at & 4) == 0), (low & keep) | (value << shift), low)
        high = tl.where(hit & ((at & 4) != 0), (high & keep) | (value << shift), high)
        escape += 1
        at = place_of(places, escape, end)
    return low, high, escape, at


@triton.jit
def decode_listed(
    segment,
    codes,
    index,
    tail,
    high,
    out,
    tile,
    elements,
    size,
    escapes,
    book,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Decode tile ``tile`` of TILE elements; returns its checksum, and whether an entry of the index is wrong."""
    lane = tl.arange(0, LANES)
    chunk = tile * (TILE // CHUNK)
    full = tl.minimum(chunk + TILE // CHUNK, elements // CHUNK)
    last_lane = (elements - 1) // 8
    places = tail.to(tl.pointer_type(tl.uint16))
    values = tail + 2 * escapes
    entry = tile // (INDEXED // TILE)
    start = tl.load(index + entry)
    stop = tl.load(index + entry + 1)
    escape = tl.minimum(start, escapes)
    end = tl.minimum(tl.minimum(stop, escapes), escape + INDEXED)
    sums = tl.zeros([LANES], tl.uint64)
    whole = full == chunk + TILE // CHUNK
    if FORMAT == BF16 and whole:
        fetched = ()
        for k in tl.static_range(TILE // CHUNK):
            fetched += (fetch(segment, codes, lane + (chunk + k) * LANES, FORMAT, 4, PTX),)
        tl.debug_barrier()  # keeps compilers from moving some of it behind the wait for the list
        at = place_of(places, escape, end)
        for k in tl.static_range(TILE // CHUNK):
            packed, s = fetched[k]
            place = (chunk + k) * CHUNK - entry * INDEXED
            e0, e1, escape, at = exponents(packed, place, places, values, escape, at, end, book, PTX)
            lanes = lane + (chunk + k) * LANES
            sums = emit(sums, e0, e1, s, lanes, segment, high, out, size, last_lane, FORMAT, False, CHECK, PTX)
    else:
        at = place_of(places, escape, end)
        for k in range(chunk, full):
            lanes = lane + k * LANES
            packed, s = fetch(segment, codes, lanes, FORMAT, 4, PTX)
            place = k * CHUNK - entry * INDEXED
            e0, e1, escape, at = exponents(packed, place, places, values, escape, at, end, book, PTX)
            sums = emit(sums, e0, e1, s, lanes, segment, high, out, size, last_lane, FORMAT, False, CHECK, PTX)
        if (full < chunk + TILE // CHUNK) & (full * CHUNK < elements):
            lanes = lane + full * LANES
            packed, s = fetch(segment, codes, tl.minimum(lanes, last_lane), FORMAT, 4, PTX)
            packed = tl.where(lanes <= last_lane, packed, 0)
            place = full * CHUNK - entry * INDEXED
            e0, e1, escape, at = exponents(packed, place, places, values, escape, at, end, book, PTX)
            sums = emit(sums, e0, e1, s, lanes, segment, high, out, size, last_lane, FORMAT, True, CHECK, PTX)
    wrong = (stop < start) | (stop > escapes) | ((entry == 0) & (start != 0))
    wrong |= ((entry + 1) * INDEXED >= elements) & (stop != escapes)
    return tl.sum(sums, 0), wrong
