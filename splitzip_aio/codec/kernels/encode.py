"""Triton kernels that encode segments: count exponents, measure chunks, write segments.

A program is one warp and takes one tile, chunk after chunk. A lane owns eight consecutive elements of a chunk, which
are a row of a (lanes, 8) tensor, so all that concerns one lane stays in its registers.

*Count.* Exponents of weights lie close together, so 32 of them, from a little above the largest of the tile's first
chunk down, have counters in registers: a nibble each while a chunk's eight elements are added up, a byte while a
tile is, 16 bits while lanes are. Chunks with any other exponent count those by ``tl.histogram``, which is general
and several times slower.

*Measure.* A table has an entry of 32 bits for each exponent (``encode_table.py``): its codes, which tiers it reaches,
and its bits in the tail. The latter add up to the size of each chunk's tail, and their prefix sum says where it starts.

*Encode.* The entry's codes are cut into planes. In the tail, a lane's codes of a tier are packed into one word, which
belongs at the bit given by the prefix sum of the lanes' bits. Lanes share words of memory there, and to join them
costs no search: if ``S`` is the prefix sum of the lanes' words, each shifted to its place in a word of memory, then the
word that lanes ``i..j`` share is ``S[j] - S[i - 1]``, because bits that do not overlap add like numbers. So the last
lane of each word adds its ``S`` to it and takes it from the next.

No address depends on the data: starts that contradict the table's counts, as when someone writes to the tensor
meanwhile, are clamped to the segment, and the host is told.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import layout
from splitzip_aio.codec.encode_table import ENCODE_WORDS
from splitzip_aio.codec.kernels.output import STEP, group_keys, term

__all__ = ["copy_segments_kernel", "count_exponents_kernel", "encode_segments_kernel", "measure_chunks_kernel"]

CHUNK = tl.constexpr(layout.CHUNK_ELEMENTS)
LANES = tl.constexpr(layout.CHUNK_ELEMENTS // 8)
TILE_CHUNKS = tl.constexpr(layout.TILE_ELEMENTS // layout.CHUNK_ELEMENTS)
HEADER = tl.constexpr(layout.HEADER_BYTES)
WINDOW = tl.constexpr(32)
HEADROOM = tl.constexpr(4)  # how far above the largest exponent of its first chunk a tile's window reaches
ESCAPE_BITS_TOP16 = tl.constexpr(24)

DESCRIPTOR = tl.constexpr(ENCODE_WORDS["words"])
DESTINATION = tl.constexpr(ENCODE_WORDS["destination"])
ELEMENTS = tl.constexpr(ENCODE_WORDS["elements"])
FIRST_TILE = tl.constexpr(ENCODE_WORDS["first_tile"])
FIRST_CHUNK = tl.constexpr(ENCODE_WORDS["first_chunk"])
TABLE = tl.constexpr(ENCODE_WORDS["table"])
HIGH = tl.constexpr(ENCODE_WORDS["high"])
CODES = tl.constexpr(ENCODE_WORDS["codes"])
INDEX = tl.constexpr(ENCODE_WORDS["index"])
TAIL = tl.constexpr(ENCODE_WORDS["tail"])
TAIL_BITS = tl.constexpr(ENCODE_WORDS["tail_bits"])
ESCAPES = tl.constexpr(ENCODE_WORDS["escapes"])


@triton.jit
def assignment(base, descriptors, tiles):
    """This program's segment and its descriptor (words), its tile in the segment, and how many elements there are."""
    segment = tl.load((base + tiles).to(tl.pointer_type(tl.int32)) + tl.program_id(0))
    descriptor = (base + descriptors).to(tl.pointer_type(tl.int32)) + segment * DESCRIPTOR
    tile = tl.program_id(0) - tl.load(descriptor + FIRST_TILE)
    return segment, descriptor, tile, tl.load(descriptor + ELEMENTS)


@triton.jit
def source_of(descriptor, BYTES: tl.constexpr):
    """Pointer to a segment's elements of BYTES bytes."""
    address = tl.load(descriptor.to(tl.pointer_type(tl.int64)))
    if BYTES == 1:
        source = address.to(tl.pointer_type(tl.uint8))
    elif BYTES == 2:
        source = address.to(tl.pointer_type(tl.uint16))
    else:
        source = address.to(tl.pointer_type(tl.uint32))
    return tl.multiple_of(source, 16)


@triton.jit
def places(step, COLUMNS: tl.constexpr):
    """(LANES, COLUMNS) numbers of the items of step ``step``, consecutive in a lane."""
    return (step * LANES + tl.arange(0, LANES))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def read_chunk(source, chunk, elements, PARTIAL: tl.constexpr):
    """(LANES, 8) elements as u32; zero where there is none."""
    place = places(chunk, 8)
    if PARTIAL:
        return tl.load(source + place, mask=place < elements, other=0).to(tl.uint32)
    return tl.load(source + place).to(tl.uint32)


@triton.jit
def exponents_of(x, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    return (x >> MANTISSA_BITS) & ((1 << EXPONENT_BITS) - 1)


@triton.jit
def tally(exponents, bottom, chunk, elements, counts, WIDE: tl.constexpr, PARTIAL: tl.constexpr):
    """Counts of the exponents from ``bottom`` on, per lane: two words of 16 nibbles. Others are added to ``counts``."""
    place = exponents - bottom
    exists = places(chunk, 8) < elements
    if PARTIAL:
        place = tl.where(exists, place, WINDOW)
    one = tl.full(place.shape, 1, tl.uint64) << ((place & 15) * 4).to(tl.uint64)
    none = tl.zeros(place.shape, tl.uint64)
    low = tl.sum(tl.where(place < 16, one, none), 1)
    high = tl.sum(tl.where((place >> 4) == 1, one, none), 1)
    if WIDE:
        outside = place >= WINDOW
        if PARTIAL:
            outside = outside & exists
        if tl.max(tl.max(outside.to(tl.int32), 1), 0) > 0:
            values = tl.reshape(exponents.to(tl.int32), [CHUNK])
            found = tl.histogram(values, 256, mask=tl.reshape(outside, [CHUNK]))
            tl.atomic_add(counts + tl.arange(0, 256), found, mask=found > 0, sem="relaxed")
    return low, high


@triton.jit
def lane_totals(bytewise):
    """Sums over lanes of words of eight bytes: of the even and of the odd bytes, four fields of 16 bits each."""
    even = bytewise & 0x00FF00FF00FF00FF
    odd = (bytewise >> 8) & 0x00FF00FF00FF00FF
    return tl.sum(even, 0), tl.sum(odd, 0)


@triton.jit(do_not_specialize=["descriptors", "tiles"])
def count_exponents_kernel(
    base,
    descriptors,
    tiles,
    counts,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Add the exponents of tile ``program_id(0)`` up in ``counts``, zeroed (segments, 256) i32.

    ``base`` points to the table (uint8); ``descriptors`` and ``tiles`` are byte offsets in it.
    """
    WIDE: tl.constexpr = EXPONENT_BITS > 5
    segment, descriptor, tile, elements = assignment(base, descriptors, tiles)
    source = source_of(descriptor, BYTES)
    counts += segment * 256
    first = tile * TILE_CHUNKS
    full = tl.minimum(first + TILE_CHUNKS, elements // CHUNK)
    bottom = tl.full((), 0, tl.uint32)
    if WIDE:
        sample = exponents_of(read_chunk(source, first, elements, True), EXPONENT_BITS, MANTISSA_BITS)
        top = tl.max(tl.max(sample, 1), 0).to(tl.int32) + (HEADROOM + 1)
        bottom = tl.maximum(top - WINDOW, 0).to(tl.uint32)
    even_low = tl.zeros([LANES], tl.uint64)
    odd_low = tl.zeros([LANES], tl.uint64)
    even_high = tl.zeros([LANES], tl.uint64)
    odd_high = tl.zeros([LANES], tl.uint64)
    for chunk in range(first, full):
        exponents = exponents_of(read_chunk(source, chunk, elements, False), EXPONENT_BITS, MANTISSA_BITS)
        low, high = tally(exponents, bottom, chunk, elements, counts, WIDE, False)
        even_low += low & 0x0F0F0F0F0F0F0F0F
        odd_low += (low >> 4) & 0x0F0F0F0F0F0F0F0F
        even_high += high & 0x0F0F0F0F0F0F0F0F
        odd_high += (high >> 4) & 0x0F0F0F0F0F0F0F0F
    if (full < first + TILE_CHUNKS) & (full * CHUNK < elements):
        exponents = exponents_of(read_chunk(source, full, elements, True), EXPONENT_BITS, MANTISSA_BITS)
        low, high = tally(exponents, bottom, full, elements, counts, WIDE, True)
        even_low += low & 0x0F0F0F0F0F0F0F0F
        odd_low += (low >> 4) & 0x0F0F0F0F0F0F0F0F
        even_high += high & 0x0F0F0F0F0F0F0F0F
        odd_high += (high >> 4) & 0x0F0F0F0F0F0F0F0F
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


@triton.jit
def entries_of(base, descriptor, exponents, chunk, elements, PARTIAL: tl.constexpr):
    """The elements' entries in the segment's table; zero where there is no element."""
    table = (base + tl.load(descriptor + TABLE)).to(tl.pointer_type(tl.uint32))
    entries = tl.load(table + exponents)
    if PARTIAL:
        entries = tl.where(places(chunk, 8) < elements, entries, 0)
    return entries


@triton.jit(do_not_specialize=["descriptors", "tiles"])
def measure_chunks_kernel(
    base,
    descriptors,
    tiles,
    sizes,
    BYTES: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    """Write the bits in the tail of each chunk of tile ``program_id(0)`` to ``sizes``, (chunks,) i32."""
    _, descriptor, tile, elements = assignment(base, descriptors, tiles)
    source = source_of(descriptor, BYTES)
    sizes += tl.load(descriptor + FIRST_CHUNK)
    first = tile * TILE_CHUNKS
    full = tl.minimum(first + TILE_CHUNKS, elements // CHUNK)
    for chunk in range(first, full):
        exponents = exponents_of(read_chunk(source, chunk, elements, False), EXPONENT_BITS, MANTISSA_BITS)
        entries = entries_of(base, descriptor, exponents, chunk, elements, False)
        tl.store(sizes + chunk, tl.sum(tl.sum(entries >> 24, 1), 0).to(tl.int32))
    if (full < first + TILE_CHUNKS) & (full * CHUNK < elements):
        exponents = exponents_of(read_chunk(source, full, elements, True), EXPONENT_BITS, MANTISSA_BITS)
        entries = entries_of(base, descriptor, exponents, full, elements, True)
        tl.store(sizes + full, tl.sum(tl.sum(entries >> 24, 1), 0).to(tl.int32))


@triton.jit
def words_of(x, BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of COLUMNS elements, or bytes, as rows of little-endian 32-bit words."""
    if BYTES == 1:
        a, b = tl.split(tl.reshape(x, [LANES, COLUMNS // 2, 2]))
        c, d = tl.split(tl.reshape(a | (b << 8), [LANES, COLUMNS // 4, 2]))
        words = c | (d << 16)
    elif BYTES == 2:
        a, b = tl.split(tl.reshape(x, [LANES, COLUMNS // 2, 2]))
        words = a | (b << 16)
    else:
        words = x
    return words


@triton.jit
def checksum_of(words, step, WORDS: tl.constexpr):
    """(LANES,) sums of the terms of WORDS words a lane; see ``codec/checksum.py``."""
    place = places(step, WORDS)
    keys = group_keys((place >> 2).to(tl.uint32)) + (place & 3).to(tl.uint32) * STEP
    return tl.sum(term(words, keys), 1)


@triton.jit
def store_plane(plane, values, chunk, elements, WIDTH: tl.constexpr, SWAP: tl.constexpr, PARTIAL: tl.constexpr):
    """Store values of WIDTH bits one after another; SWAP puts the even ones of 4 bits into the high nibbles."""
    place = places(chunk, 8)
    if WIDTH == 8:
        if PARTIAL:
            tl.store(plane + place, values.to(tl.uint8), mask=place < elements)
        else:
            tl.store(plane + place, values.to(tl.uint8))
    elif WIDTH == 16:
        halves = plane.to(tl.pointer_type(tl.uint16))
        if PARTIAL:
            tl.store(halves + place, values.to(tl.uint16), mask=place < elements)
        else:
            tl.store(halves + place, values.to(tl.uint16))
    else:
        lane = chunk * LANES + tl.arange(0, LANES)
        column = tl.arange(0, 8)[None, :]
        if SWAP:
            column = column ^ 1
        packed = tl.sum(values << (column * WIDTH).to(tl.uint32), 1)
        if PARTIAL or WIDTH == 3:
            size = (elements * WIDTH + 7) // 8
            for k in tl.static_range(WIDTH):
                byte = lane * WIDTH + k
                tl.store(plane + byte, (packed >> (8 * k)).to(tl.uint8), mask=byte < size)
        elif WIDTH == 1:
            tl.store(plane + lane, packed.to(tl.uint8))
        elif WIDTH == 2:
            tl.store(plane.to(tl.pointer_type(tl.uint16)) + lane, packed.to(tl.uint16))
        else:
            tl.store(plane.to(tl.pointer_type(tl.uint32)) + lane, packed)


@triton.jit
def append(tail, position, tail_bits, bits, sizes, WORD_LOG2: tl.constexpr):
    """Write each lane's ``bits``, of ``sizes`` bits, one after another from bit ``position``; return the bit after them.

    ``tail`` is zeroed; a word of memory has ``2**WORD_LOG2`` bits, and no lane more than that.
    """
    WORD: tl.constexpr = 1 << WORD_LOG2
    words = tail.to(tl.pointer_type(tl.int64 if WORD_LOG2 == 6 else tl.int32))
    lane = tl.arange(0, LANES)
    ends = tl.cumsum(sizes, 0)
    last = position + ends
    first = last - sizes
    word = first >> WORD_LOG2
    next_word = last >> WORD_LOG2
    shift = (first & (WORD - 1)).to(bits.dtype)
    spilled = tl.where(shift > 0, bits >> ((WORD - shift) & (WORD - 1)), 0)
    sums = tl.cumsum(bits << shift, 0)
    is_last = lane == LANES - 1
    crosses = next_word != word
    limit = tail_bits >> WORD_LOG2
    here = sums.to(words.dtype.element_ty, bitcast=True)
    there = (spilled - tl.where(is_last, 0, sums)).to(words.dtype.element_ty, bitcast=True)
    tl.atomic_add(words + word, here, mask=(crosses | is_last) & (here != 0) & (word <= limit), sem="relaxed")
    tl.atomic_add(words + next_word, there, mask=crosses & (there != 0) & (next_word <= limit), sem="relaxed")
    return position + tl.max(ends, 0)


@triton.jit
def append_tier(tail, position, tail_bits, entries, TIER: tl.constexpr, WIDTH: tl.constexpr):
    """Append the codes of tier TIER (1 to 3) of a chunk."""
    reached = (entries >> (15 + TIER)) & 1
    before = tl.cumsum(reached, 1) - reached
    codes = (entries >> (4 * TIER)) & 15  # zero unless the tier is reached
    bits = tl.sum(codes << (before * WIDTH), 1)
    sizes = tl.sum(reached, 1).to(tl.int32) * WIDTH
    return append(tail, position, tail_bits, bits, sizes, 5)


@triton.jit
def append_escapes(tail, position, tail_bits, entries, exponents, DEPTH: tl.constexpr):
    """Append the exponents that no codebook holds, as bytes."""
    reached = (entries >> (15 + DEPTH)) & 1
    sizes = tl.sum(reached, 1).to(tl.int32) * 8
    if tl.max(sizes, 0) > 0:
        before = tl.cumsum(reached, 1) - reached
        bits = tl.sum((exponents * reached).to(tl.uint64) << (before * 8).to(tl.uint64), 1)
        append(tail, position, tail_bits, bits, sizes, 6)


@triton.jit
def list_escapes(tail, start, escapes, entries, exponents):
    """Write a chunk's escapes as top16 has them: places in the chunk, then, behind all places, exponents."""
    escaped = (entries >> 16) & 1
    found = tl.sum(escaped, 1).to(tl.int32)
    if tl.max(found, 0) > 0:
        before = (tl.cumsum(found, 0) - found)[:, None] + (tl.cumsum(escaped, 1) - escaped).to(tl.int32)
        rank = start + before
        keep = (escaped == 1) & (rank < escapes)
        tl.store(tail.to(tl.pointer_type(tl.uint16)) + rank, places(0, 8).to(tl.uint16), mask=keep)
        tl.store(tail + 2 * escapes + rank, exponents.to(tl.uint8), mask=keep)


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
):
    """Encode a chunk whose tail starts at bit ``start``; widths of 0 mean top16. Returns the lanes' checksums."""
    RESIDUAL_BITS: tl.constexpr = 1 + MANTISSA_BITS
    tail = segment + tl.load(descriptor + TAIL)
    tail_bits = tl.load(descriptor + TAIL_BITS)
    codes = tl.multiple_of(segment + tl.load(descriptor + CODES), 16)
    x = read_chunk(source, chunk, elements, PARTIAL)
    exponents = exponents_of(x, EXPONENT_BITS, MANTISSA_BITS)
    entries = entries_of(base, descriptor, exponents, chunk, elements, PARTIAL)
    residuals = (x & ((1 << MANTISSA_BITS) - 1)) | ((x >> (MANTISSA_BITS + EXPONENT_BITS)) << MANTISSA_BITS)
    LOW: tl.constexpr = RESIDUAL_BITS if RESIDUAL_BITS < 8 else 8
    store_plane(segment + HEADER, residuals & ((1 << LOW) - 1), chunk, elements, LOW, False, PARTIAL)
    if RESIDUAL_BITS > 8:
        high = tl.multiple_of(segment + tl.load(descriptor + HIGH), 16)
        store_plane(high, residuals >> 8, chunk, elements, RESIDUAL_BITS - 8, False, PARTIAL)
    if W0 == 0:
        store_plane(codes, entries & 15, chunk, elements, 4, True, PARTIAL)
        escapes = tl.load(descriptor + ESCAPES)
        list_escapes(tail, start // ESCAPE_BITS_TOP16, escapes, entries, exponents)
    else:
        store_plane(codes, entries & ((1 << W0) - 1), chunk, elements, W0, False, PARTIAL)
        if W1 > 0:
            start = append_tier(tail, start, tail_bits, entries, 1, W1)
        if W2 > 0:
            start = append_tier(tail, start, tail_bits, entries, 2, W2)
        if W3 > 0:
            start = append_tier(tail, start, tail_bits, entries, 3, W3)
        DEPTH: tl.constexpr = 4 if W3 > 0 else 3 if W2 > 0 else 2 if W1 > 0 else 1
        append_escapes(tail, start, tail_bits, entries, exponents, DEPTH)
    return checksum_of(words_of(x, BYTES, 8), chunk, 2 * BYTES)


@triton.jit
def write_index(index, starts, tile, chunks, TOP16: tl.constexpr):
    """Write a tile's entries of the index and, after the last tile, the one for the end."""
    first = tile * TILE_CHUNKS
    begin = tl.load(starts)
    if TOP16:
        chunk = first + tl.arange(0, TILE_CHUNKS)
        here = (tl.load(starts + chunk, mask=chunk < chunks, other=0) - begin) // ESCAPE_BITS_TOP16
        tl.store(index + chunk, here.to(tl.int32), mask=chunk < chunks)
        if first + TILE_CHUNKS >= chunks:
            tl.store(index + chunks, ((tl.load(starts + chunks) - begin) // ESCAPE_BITS_TOP16).to(tl.int32))
    else:
        tl.store(index + tile, (tl.load(starts + first) - begin).to(tl.int32))
        if first + TILE_CHUNKS >= chunks:
            tl.store(index + tile + 1, (tl.load(starts + chunks) - begin).to(tl.int32))


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
):
    """Encode tile ``program_id(0)`` by a schedule of widths ``W0..W3`` (``W0`` 0: top16).

    ``starts`` (chunks + 1,) i64 are where chunks' tails start, in bits and counted through all segments; ``out`` (bytes,)
    uint8 is zeroed. ``found`` (2, segments) i64 gets each segment's checksum, but for the constant of each group, and
    the bits of its tail.
    """
    segment_id, descriptor, tile, elements = assignment(base, descriptors, tiles)
    source = source_of(descriptor, BYTES)
    segment = tl.multiple_of(out + tl.load((descriptor + DESTINATION).to(tl.pointer_type(tl.int64))), 32)
    starts += tl.load(descriptor + FIRST_CHUNK)
    begin = tl.load(starts)
    chunks = tl.cdiv(elements, CHUNK)
    first = tile * TILE_CHUNKS
    full = tl.minimum(first + TILE_CHUNKS, elements // CHUNK)
    index = (segment + tl.load(descriptor + INDEX)).to(tl.pointer_type(tl.int32))
    write_index(index, starts, tile, chunks, W0 == 0)
    if tile == 0:
        tl.store(found + segments + segment_id, tl.load(starts + chunks) - begin)
    sums = tl.zeros([LANES], tl.uint64)
    for chunk in range(first, full):
        start = (tl.load(starts + chunk) - begin).to(tl.int32)
        sums += encode_chunk(
            base, descriptor, source, segment, chunk, start, elements,
            BYTES, EXPONENT_BITS, MANTISSA_BITS, W0, W1, W2, W3, False,
        )  # fmt: skip
    if (full < first + TILE_CHUNKS) & (full < chunks):
        start = (tl.load(starts + full) - begin).to(tl.int32)
        sums += encode_chunk(
            base, descriptor, source, segment, full, start, elements,
            BYTES, EXPONENT_BITS, MANTISSA_BITS, W0, W1, W2, W3, True,
        )  # fmt: skip
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
