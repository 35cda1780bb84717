"""Triton kernels that write segments.

An element's exponent is looked up in a table whose entries (``encode_table.py``) hold its codes in all tiers. The
codes of a lane's eight elements in one tier become the nibbles of a word; where a nibble is the sentinel, the element
reaches the next tier, whose word is compressed to those elements. It then belongs in the tail at the bit given by the
prefix sum of the lanes' counts.

Lanes share words of memory there, and to join them costs no search: if ``S`` is the prefix sum of the lanes' words,
each shifted to its place in a word of memory, then the word that lanes ``i..j`` share is ``S[j] - S[i - 1]``, because
bits that do not overlap add like numbers. So the last lane of each word adds its ``S`` to it and takes it from the
next. Escapes, which are few, are added one by one.

What is written where follows from counts made earlier. Should someone write to the tensor meanwhile, they contradict
the elements; places are clamped to the segment, and the host learns of it from the bits of the tail.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import layout
from splitzip_aio.codec.encode_table import ENCODE_WORDS
from splitzip_aio.codec.kernels.bits import permute, sentinels
from splitzip_aio.codec.kernels.elements import (
    assignment,
    elements_of,
    exponents_of,
    places,
    read_words,
    residuals_of,
    source_of,
    split_bf16,
    unpack,
    words_of,
)
from splitzip_aio.codec.kernels.output import STEP, group_keys
from splitzip_aio.codec.kernels.pack import compress, ones, squeeze

__all__ = ["copy_segments_kernel", "encode_segments_kernel"]

CHUNK = tl.constexpr(layout.CHUNK_ELEMENTS)
LANES = tl.constexpr(layout.CHUNK_ELEMENTS // 8)
TILE_CHUNKS = tl.constexpr(layout.TILE_ELEMENTS // layout.CHUNK_ELEMENTS)
HEADER = tl.constexpr(layout.HEADER_BYTES)
LISTED_BITS = tl.constexpr(24)  # an escape of top16: place and exponent
DESTINATION = tl.constexpr(ENCODE_WORDS["destination"])
ROW = tl.constexpr(ENCODE_WORDS["row"])
ENTRIES = tl.constexpr(ENCODE_WORDS["entries"])
HIGH = tl.constexpr(ENCODE_WORDS["high"])
CODES = tl.constexpr(ENCODE_WORDS["codes"])
INDEX = tl.constexpr(ENCODE_WORDS["index"])
TAIL = tl.constexpr(ENCODE_WORDS["tail"])
TAIL_BITS = tl.constexpr(ENCODE_WORDS["tail_bits"])
ESCAPES = tl.constexpr(ENCODE_WORDS["escapes"])


@triton.jit
def checksum_of(words, step, WORDS: tl.constexpr):
    """(LANES,) sums of the terms of WORDS words a lane; see ``codec/checksum.py``."""
    place = places(step, WORDS)
    keys = group_keys((place >> 2).to(tl.uint32)) + (place & 3).to(tl.uint32) * STEP
    return tl.sum(words.to(tl.uint64) * keys.to(tl.uint64), 1)


@triton.jit
def nibbles_of(entries, TIER: tl.constexpr):
    """Each lane's codes in tier TIER as nibbles, from (LANES, 8) entries."""
    column = (tl.arange(0, 8) * 4)[None, :].to(tl.uint32)
    return tl.sum(((entries >> (4 * TIER)) & 15) << column, 1)


@triton.jit
def store_packed(plane, packed, chunk, elements, WIDTH: tl.constexpr, PARTIAL: tl.constexpr):
    """Store each lane's WIDTH bytes (1 to 4): eight values of WIDTH bits."""
    lane = tl.arange(0, LANES) + chunk * LANES
    if PARTIAL:
        size = (elements * WIDTH + 7) // 8
        for k in tl.static_range(WIDTH):
            byte = lane * WIDTH + k
            tl.store(plane + byte, (packed >> (8 * k)).to(tl.uint8), mask=byte < size)
    elif WIDTH == 1:
        tl.store(plane + lane, packed.to(tl.uint8))
    elif WIDTH == 2:
        tl.store(plane.to(tl.pointer_type(tl.uint16)) + lane, packed.to(tl.uint16))
    elif WIDTH == 3:
        for k in tl.static_range(3):
            tl.store(plane + lane * 3 + k, (packed >> (8 * k)).to(tl.uint8))
    else:
        tl.store(plane.to(tl.pointer_type(tl.uint32)) + lane, packed)


@triton.jit
def store_plane(plane, values, chunk, elements, WIDTH: tl.constexpr, PARTIAL: tl.constexpr):
    """Store (LANES, 8) values of WIDTH bits one after another."""
    place = places(chunk, 8)
    if WIDTH == 8:
        tl.store(plane + place, values.to(tl.uint8), mask=place < elements if PARTIAL else None)
    elif WIDTH == 16:
        halves = plane.to(tl.pointer_type(tl.uint16))
        tl.store(halves + place, values.to(tl.uint16), mask=place < elements if PARTIAL else None)
    else:
        column = (tl.arange(0, 8) * WIDTH)[None, :].to(tl.uint32)
        store_packed(plane, tl.sum(values << column, 1), chunk, elements, WIDTH, PARTIAL)


@triton.jit
def split(
    segment,
    descriptor,
    words,
    chunk,
    elements,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Store a chunk's residuals; return its exponents, (LANES, 2) words of four."""
    RESIDUAL_BITS: tl.constexpr = 1 + MANTISSA_BITS
    plane = segment + HEADER
    if BYTES == 2 and MANTISSA_BITS == 7:
        packed, residuals = split_bf16(words, PTX)
        if PARTIAL:
            store_plane(plane, unpack(residuals, 4, 8), chunk, elements, 8, True)
        else:
            tl.store(plane.to(tl.pointer_type(tl.uint32)) + places(chunk, 2), residuals)
    else:
        x = elements_of(words, BYTES)
        values = residuals_of(x, EXPONENT_BITS, MANTISSA_BITS)
        if RESIDUAL_BITS > 8:
            high = tl.multiple_of(segment + tl.load(descriptor + HIGH), 16)
            store_plane(plane, values & 0xFF, chunk, elements, 8, PARTIAL)
            store_plane(high, values >> 8, chunk, elements, RESIDUAL_BITS - 8, PARTIAL)
        else:
            store_plane(plane, values, chunk, elements, RESIDUAL_BITS, PARTIAL)
        exponents = exponents_of(x, EXPONENT_BITS, MANTISSA_BITS)
        column = (tl.arange(0, 4) * 8)[None, None, :].to(tl.uint32)
        packed = tl.sum(tl.reshape(exponents, [LANES, 2, 4]) << column, 2)
    return packed


@triton.jit
def append_codes(tail, tail_bits, start, nibbles, reached, before, WIDTH: tl.constexpr):
    """Write a tier's codes, those of the lanes' nibbles that are ``reached``, from bit ``start`` on.

    ``tail`` is zeroed; ``before`` (LANES,) counts the codes of the lanes before.
    """
    bits = squeeze(compress(nibbles, reached), WIDTH)
    first = start + before * WIDTH
    last = first + ones(reached).to(tl.int32) * WIDTH
    word = first >> 5
    next_word = last >> 5
    shift = (first & 31).to(tl.uint32)
    spilled = tl.where(shift > 0, bits >> ((32 - shift) & 31), 0)
    sums = tl.cumsum(bits << shift, 0)
    is_last = tl.arange(0, LANES) == LANES - 1
    crosses = next_word != word
    words = tail.to(tl.pointer_type(tl.int32))
    here = sums.to(tl.int32, bitcast=True)
    there = (spilled - tl.where(is_last, 0, sums)).to(tl.int32, bitcast=True)
    limit = tail_bits >> 5
    tl.atomic_add(words + word, here, mask=(crosses | is_last) & (word <= limit), sem="relaxed")
    tl.atomic_add(words + next_word, there, mask=crosses & (next_word <= limit), sem="relaxed")


@triton.jit
def next_escape(escaped, packed, PTX: tl.constexpr):
    """Each lane's first element that is ``escaped``, its exponent, and what is left of ``escaped``."""
    low, high = tl.split(packed)
    rest = escaped & (escaped - 1)
    element = ones(((escaped ^ rest) - 1) & 0x11111111)
    return element, permute(low, high, element, PTX) & 0xFF, rest


@triton.jit
def append_escapes(tail, tail_bits, start, packed, escaped, before, PTX: tl.constexpr):
    """Write the exponents, of (LANES, 2) ``packed``, that are ``escaped``, as bytes from bit ``start`` on.

    They are so few that each is added to its word, or two, of the zeroed ``tail`` by itself.
    """
    words = tail.to(tl.pointer_type(tl.int32))
    count = ones(escaped).to(tl.int32)
    first = start + before * 8
    for k in range(tl.max(count, 0)):
        _, exponent, escaped = next_escape(escaped, packed, PTX)
        word = first >> 5
        shift = (first & 31).to(tl.uint32)
        here = (exponent << shift).to(tl.int32, bitcast=True)
        there = (exponent >> (32 - tl.maximum(shift, 24))).to(tl.int32, bitcast=True)
        keep = (k < count) & (first < tail_bits)
        tl.atomic_add(words + word, here, mask=keep, sem="relaxed")
        tl.atomic_add(words + word + 1, there, mask=keep & (shift > 24), sem="relaxed")
        first += 8


@triton.jit
def list_escapes(tail, start, escapes, chunk, packed, escaped, PTX: tl.constexpr):
    """Write a chunk's escapes as top16 has them: places in the tile, then, behind all places, exponents.

    Returns the number of escapes up to the chunk's end, of which there are ``start`` before it.
    """
    count = ones(escaped).to(tl.int32)
    ends = tl.cumsum(count, 0)
    rank = start + ends - count
    lane = (tl.arange(0, LANES) + chunk * LANES) & (LANES * TILE_CHUNKS - 1)
    for k in range(tl.max(count, 0)):
        element, exponent, escaped = next_escape(escaped, packed, PTX)
        keep = (k < count) & (rank < escapes)
        place = (lane * 8 + element.to(tl.int32)).to(tl.uint16)
        tl.store(tail.to(tl.pointer_type(tl.uint16)) + rank, place, mask=keep)
        tl.store(tail + 2 * escapes + rank, exponent.to(tl.uint8), mask=keep)
        rank += 1
    return start + tl.max(ends, 0)


@triton.jit
def prefix_counts(r1, r2, r3):
    """Of three words a lane of nibbles 0 or 1: the ones in the lanes before.

    One prefix sum serves all three. The last field has 10 bits, enough for all but a chunk's total, which is cut off.
    """
    counts = ones(r1) | (ones(r2) << 11) | (ones(r3) << 22)
    before = tl.cumsum(counts, 0) - counts
    return (before & 0x7FF).to(tl.int32), ((before >> 11) & 0x7FF).to(tl.int32), (before >> 22).to(tl.int32)


@triton.jit
def total_count(before, r):
    """The ones in all lanes."""
    return tl.max(before + ones(r).to(tl.int32), 0)


@triton.jit
def append_tail(
    tail,
    tail_bits,
    start,
    entries,
    packed,
    n0,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    PTX: tl.constexpr,
):
    """Write the tail of a chunk whose first tier has the codes ``n0``, from bit ``start``; return the bit after it."""
    none = n0 & 0
    n1 = nibbles_of(entries, 1) if W1 > 0 else none
    n2 = nibbles_of(entries, 2) if W2 > 0 else none
    n3 = nibbles_of(entries, 3) if W3 > 0 else none
    r1 = sentinels(n0, W0)
    r2 = sentinels(n1, W1)
    r3 = sentinels(n2, W2)
    r4 = sentinels(n3, W3)
    b1, b2, b3 = prefix_counts(r1, r2, r3)
    escaped = r1
    before = b1
    if W1 > 0:
        append_codes(tail, tail_bits, start, n1, r1, b1, W1)
        start += total_count(b1, r1) * W1
        escaped = r2
        before = b2
    if W2 > 0:
        append_codes(tail, tail_bits, start, n2, r2, b2, W2)
        start += total_count(b2, r2) * W2
        escaped = r3
        before = b3
    if W3 > 0:
        append_codes(tail, tail_bits, start, n3, r3, b3, W3)
        start += total_count(b3, r3) * W3
        escaped = r4
        before = prefix_counts(r4, none, none)[0]
    append_escapes(tail, tail_bits, start, packed, escaped, before, PTX)
    return start + total_count(before, escaped) * 8


@triton.jit
def encode_chunk(
    base,
    descriptor,
    source,
    segment,
    chunk,
    start,
    elements,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    PARTIAL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Encode a chunk whose tail starts at ``start``: a bit, or with widths of 0, top16, a number of escapes.

    Returns the lanes' checksums and where the next chunk's tail starts.
    """
    table = (base + tl.load(descriptor + ENTRIES)).to(tl.pointer_type(tl.uint32))
    tail = segment + tl.load(descriptor + TAIL)
    codes = tl.multiple_of(segment + tl.load(descriptor + CODES), 16)
    words = read_words(source, chunk, elements, BYTES, PARTIAL)
    packed = split(segment, descriptor, words, chunk, elements, BYTES, EXPONENT_BITS, MANTISSA_BITS, PARTIAL, PTX)
    entries = tl.load(table + unpack(packed, 4, 8))
    if PARTIAL:
        entries = tl.where(places(chunk, 8) < elements, entries, 0)
    n0 = nibbles_of(entries, 0)
    if W0 == 0:
        swapped = ((n0 >> 4) & 0x0F0F0F0F) | ((n0 & 0x0F0F0F0F) << 4)  # the even element's code is the high nibble
        store_packed(codes, swapped, chunk, elements, 4, PARTIAL)
        end = list_escapes(tail, start, tl.load(descriptor + ESCAPES), chunk, packed, nibbles_of(entries, 1), PTX)
    else:
        store_packed(codes, squeeze(n0, W0), chunk, elements, W0, PARTIAL)
        end = append_tail(tail, tl.load(descriptor + TAIL_BITS), start, entries, packed, n0, W0, W1, W2, W3, PTX)
    return checksum_of(words, chunk, 2 * BYTES), end


@triton.jit(do_not_specialize=["descriptors", "tiles", "segments"])
def encode_segments_kernel(
    base,
    descriptors,
    tiles,
    starts,
    out,
    found,
    segments,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    PTX: tl.constexpr,
):
    """Encode tile ``program_id(0)`` by a schedule of widths ``W0..W3`` (``W0`` 0: top16).

    ``starts`` (rows + 1,) i64 are where the tails of tiles start, in bits and counted through all segments; ``out``
    (bytes,) uint8 is zeroed. ``found`` (2, segments) i64 gets each segment's checksum, but for the constant of each
    group, and, once the last tile is done, the bits of its tail.
    """
    segment_id, descriptor, tile, elements = assignment(base, descriptors, tiles)
    source = source_of(descriptor, BYTES)
    segment = tl.multiple_of(out + tl.load((descriptor + DESTINATION).to(tl.pointer_type(tl.int64))), 32)
    index = (segment + tl.load(descriptor + INDEX)).to(tl.pointer_type(tl.int32))
    starts += tl.load(descriptor + ROW)
    chunks = tl.cdiv(elements, CHUNK)
    first = tile * TILE_CHUNKS
    full = tl.minimum(first + TILE_CHUNKS, elements // CHUNK)
    SHARE: tl.constexpr = LISTED_BITS if W0 == 0 else 1
    start = ((tl.load(starts + tile) - tl.load(starts)) // SHARE).to(tl.int32)
    tl.store(index + tile, start)
    sums = tl.zeros([LANES], tl.uint64)
    for chunk in range(first, full):
        terms, start = encode_chunk(
            base, descriptor, source, segment, chunk, start, elements,
            BYTES, EXPONENT_BITS, MANTISSA_BITS, W0, W1, W2, W3, False, PTX,
        )  # fmt: skip
        sums += terms
    if (full < first + TILE_CHUNKS) & (full < chunks):
        terms, start = encode_chunk(
            base, descriptor, source, segment, full, start, elements,
            BYTES, EXPONENT_BITS, MANTISSA_BITS, W0, W1, W2, W3, True, PTX,
        )  # fmt: skip
        sums += terms
    if first + TILE_CHUNKS >= chunks:
        tl.store(index + tile + 1, start)
        tl.store(found + segments + segment_id, start.to(tl.int64) * SHARE)
    tl.atomic_add(found + segment_id, tl.sum(sums, 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["descriptors", "tiles"])
def copy_segments_kernel(base, descriptors, tiles, out, found):
    """Store tile ``program_id(0)`` as it is; its elements are bytes, twice as many as another tile has elements."""
    segment_id, descriptor, tile, elements = assignment(base, descriptors, tiles)
    source = source_of(descriptor, 1)
    segment = tl.multiple_of(out + tl.load((descriptor + DESTINATION).to(tl.pointer_type(tl.int64))), 32)
    target = segment + HEADER
    sums = tl.zeros([LANES], tl.uint64)
    first = tile * TILE_CHUNKS  # steps of 16 bytes a lane
    full = tl.minimum(first + TILE_CHUNKS, elements // (2 * CHUNK))
    for step in range(first, full):
        words = tl.load(source.to(tl.pointer_type(tl.uint32)) + places(step, 4))
        tl.store(target.to(tl.pointer_type(tl.uint32)) + places(step, 4), words)
        sums += checksum_of(words, step, 4)
    if (full < first + TILE_CHUNKS) & (full * (2 * CHUNK) < elements):
        place = places(full, 16)
        x = tl.load(source + place, mask=place < elements, other=0)
        tl.store(target + place, x, mask=place < elements)
        sums += checksum_of(words_of(x.to(tl.uint32), 1, 16), full, 4)
    tl.atomic_add(found + segment_id, tl.sum(sums, 0).to(tl.int64), sem="relaxed")
