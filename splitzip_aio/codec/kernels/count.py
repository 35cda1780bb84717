"""Triton kernels that count: exponents of segments, to choose their coding, and the bits that tiles add to the tail.

*Exponents.* Those of weights lie close together, so 32 of them, from a little above the largest of the tile's first
chunk down, are the tile's window and have counters in registers: a nibble each while a lane's eight elements are
added up, a byte while the chunks of a tile are, 16 bits while lanes are. A chunk with any other exponent counts
those by ``tl.histogram``, which is general and several times slower.

*Tails.* What the exponents of a tile take in the tail adds up, so the window's counts tell it without another look at
the elements, unless some exponent lay outside. The prefix sum over tiles is where their tails start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import layout
from splitzip_aio.codec.encode_table import ENCODE_WORDS, WINDOW_EXPONENTS
from splitzip_aio.codec.kernels.elements import assignment, exponents_of, places, read_elements, source_of

__all__ = ["count_exponents_kernel", "measure_tiles_kernel"]

CHUNK = tl.constexpr(layout.CHUNK_ELEMENTS)
LANES = tl.constexpr(layout.CHUNK_ELEMENTS // 8)
TILE_CHUNKS = tl.constexpr(layout.TILE_ELEMENTS // layout.CHUNK_ELEMENTS)
ROW = tl.constexpr(ENCODE_WORDS["row"])
ENTRIES = tl.constexpr(ENCODE_WORDS["entries"])
WINDOW = tl.constexpr(WINDOW_EXPONENTS)
HEADROOM = tl.constexpr(4)  # how far above the largest exponent of its first chunk a tile's window reaches
NIBBLES = tl.constexpr(0x0F0F0F0F0F0F0F0F)
BYTES_EVEN = tl.constexpr(0x00FF00FF00FF00FF)


@triton.jit
def count_outside(
    largest,
    source,
    chunk,
    elements,
    bottom,
    counts,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Add a chunk's exponents outside the window to ``counts``; return whether (0 or 1) there are any.

    ``largest`` is the largest place in the window, taken as unsigned, of the chunk's exponents.
    """
    others = tl.full((), 0, tl.int32)
    if largest >= WINDOW:
        others = tl.full((), 1, tl.int32)
        bins = tl.arange(0, 256)
        for part in range(CHUNK // LANES):
            place = tl.arange(0, LANES) + (chunk * CHUNK + part * LANES)
            x = tl.load(source + place, mask=place < elements, other=0).to(tl.uint32)
            exponents = exponents_of(x, EXPONENT_BITS, MANTISSA_BITS)
            outside = (exponents - bottom >= WINDOW) & (place < elements)
            found = tl.histogram(exponents.to(tl.int32), 256, mask=outside)
            tl.atomic_add(counts + bins, found, mask=found > 0, sem="relaxed")
    return others


@triton.jit
def tally(
    source,
    chunk,
    elements,
    bottom,
    counts,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Each lane's counts of the window's exponents, two words of 16 nibbles, and whether (0 or 1) there are others."""
    place = exponents_of(read_elements(source, chunk, elements, PARTIAL), EXPONENT_BITS, MANTISSA_BITS) - bottom
    exists = places(chunk, 8) < elements
    if PARTIAL:
        place = tl.where(exists, place, 0)
    largest = tl.max(tl.max(place, 1), 0)
    if PARTIAL:
        place = tl.where(exists, place, WINDOW)
    one = tl.full(place.shape, 1, tl.uint64) << ((place & 15) * 4).to(tl.uint64)
    none = tl.zeros(place.shape, tl.uint64)
    low = tl.sum(tl.where(place < 16, one, none), 1)
    high = tl.sum(tl.where((place >> 4) == 1, one, none), 1)
    others = tl.full((), 0, tl.int32)
    if EXPONENT_BITS > 5:
        others = count_outside(largest, source, chunk, elements, bottom, counts, EXPONENT_BITS, MANTISSA_BITS)
    return low, high, others


@triton.jit
def lane_totals(bytewise):
    """Sums over lanes of words of eight bytes: of the even and of the odd bytes, four fields of 16 bits each."""
    return tl.sum(bytewise & BYTES_EVEN, 0), tl.sum((bytewise >> 8) & BYTES_EVEN, 0)


@triton.jit(do_not_specialize=["descriptors", "tiles"])
def count_exponents_kernel(
    base,
    descriptors,
    tiles,
    counts,
    windows,
    bottoms,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Add the exponents of tile ``program_id(0)`` up in ``counts``, zeroed (segments, 256) i32.

    ``base`` points to the table (uint8); ``descriptors`` and ``tiles`` are byte offsets in it. The tile's row of
    ``windows``, (rows, WINDOW) i16, gets the counts of its window, and of ``bottoms``, (rows,) i32, the window's first
    exponent, or -1 when there are exponents outside.
    """
    segment, descriptor, tile, elements = assignment(base, descriptors, tiles)
    source = source_of(descriptor, BYTES)
    counts += segment * 256
    first = tile * TILE_CHUNKS
    full = tl.minimum(first + TILE_CHUNKS, elements // CHUNK)
    bottom = tl.full((), 0, tl.uint32)
    if EXPONENT_BITS > 5:
        sample = exponents_of(read_elements(source, first, elements, True), EXPONENT_BITS, MANTISSA_BITS)
        top = tl.max(tl.max(sample, 1), 0).to(tl.int32) + (HEADROOM + 1)
        bottom = tl.maximum(top - WINDOW, 0).to(tl.uint32)
    even_low = tl.zeros([LANES], tl.uint64)
    odd_low = tl.zeros([LANES], tl.uint64)
    even_high = tl.zeros([LANES], tl.uint64)
    odd_high = tl.zeros([LANES], tl.uint64)
    irregular = tl.full((), 0, tl.int32)
    for chunk in range(first, full):
        low, high, others = tally(source, chunk, elements, bottom, counts, EXPONENT_BITS, MANTISSA_BITS, False)
        irregular |= others
        even_low += low & NIBBLES
        odd_low += (low >> 4) & NIBBLES
        even_high += high & NIBBLES
        odd_high += (high >> 4) & NIBBLES
    if (full < first + TILE_CHUNKS) & (full * CHUNK < elements):
        low, high, others = tally(source, full, elements, bottom, counts, EXPONENT_BITS, MANTISSA_BITS, True)
        irregular |= others
        even_low += low & NIBBLES
        odd_low += (low >> 4) & NIBBLES
        even_high += high & NIBBLES
        odd_high += (high >> 4) & NIBBLES
    s0, s2 = lane_totals(even_low)
    s1, s3 = lane_totals(odd_low)
    s4, s6 = lane_totals(even_high)
    s5, s7 = lane_totals(odd_high)
    # Place 4 * i + j of the window's lower half is field i of s_j, of its upper half of s_(4 + j).
    place = tl.arange(0, WINDOW)
    upper = place >= 16
    even = tl.where((place & 2) == 0, tl.where(upper, s4, s0), tl.where(upper, s6, s2))
    odd = tl.where((place & 2) == 0, tl.where(upper, s5, s1), tl.where(upper, s7, s3))
    fields = tl.where((place & 1) == 0, even, odd)
    found = ((fields >> (((place >> 2) & 3) * 16).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    tl.atomic_add(counts + bottom.to(tl.int32) + place, found, mask=found > 0, sem="relaxed")
    row = tl.load(descriptor + ROW) + tile
    tl.store(windows + row * WINDOW + place, found.to(tl.int16))
    tl.store(bottoms + row, tl.where(irregular > 0, -1, bottom.to(tl.int32)))


@triton.jit
def chunk_bits(
    source,
    table,
    chunk,
    elements,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """What a chunk takes in the tail, from its elements."""
    x = read_elements(source, chunk, elements, PARTIAL)
    bits = tl.load(table + exponents_of(x, EXPONENT_BITS, MANTISSA_BITS)) >> 24
    if PARTIAL:
        bits = tl.where(places(chunk, 8) < elements, bits, 0)
    return tl.sum(tl.sum(bits, 1), 0)


@triton.jit(do_not_specialize=["descriptors", "tiles"])
def measure_tiles_kernel(
    base,
    descriptors,
    tiles,
    windows,
    bottoms,
    sizes,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Write what tile ``program_id(0)`` takes in the tail, in bits, to its row of ``sizes``, (rows,) i32.

    ``windows`` and ``bottoms`` are those of ``count_exponents_kernel``; a bottom of -1 has the elements read.
    """
    _, descriptor, tile, elements = assignment(base, descriptors, tiles)
    table = (base + tl.load(descriptor + ENTRIES)).to(tl.pointer_type(tl.uint32))
    row = tl.load(descriptor + ROW) + tile
    bottom = tl.load(bottoms + row)
    if bottom >= 0:
        place = tl.arange(0, WINDOW)
        counts = tl.load(windows + row * WINDOW + place).to(tl.uint32) & 0xFFFF
        total = tl.sum(counts * (tl.load(table + bottom + place, mask=bottom + place < 256, other=0) >> 24), 0)
    else:
        source = source_of(descriptor, BYTES)
        first = tile * TILE_CHUNKS
        full = tl.minimum(first + TILE_CHUNKS, elements // CHUNK)
        total = tl.full((), 0, tl.uint32)
        for chunk in range(first, full):
            total += chunk_bits(source, table, chunk, elements, EXPONENT_BITS, MANTISSA_BITS, False)
        if (full < first + TILE_CHUNKS) & (full * CHUNK < elements):
            total += chunk_bits(source, table, full, elements, EXPONENT_BITS, MANTISSA_BITS, True)
    tl.store(sizes + row, total.to(tl.int32))
