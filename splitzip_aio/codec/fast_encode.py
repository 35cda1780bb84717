"""Encoding in machine code: the reverse of ``splitzip_aio.codec.fast_decode``, sixteen elements at a time.

A chunk goes through these passes over scratch memory that stays in the first-level cache.

*Split.* Exponents go to scratch memory, residuals to their planes.

*Look up.* Each exponent becomes its selector: its place in the codebooks laid end to end, or their length for an
escape. A table of 256 bytes is looked up 16 bytes at once by windows: PSHUFB translates the values in
``first .. first + 15``, and as frequent exponents are neighbours, one or two windows hold all that are in a codebook.

*Pack.* For each tier, two more lookups turn selectors into that tier's codes and into masks of the elements that reach
it, both in nibbles; one bit extraction (PEXT) then packs the codes under the masks of sixteen elements, and the bits
are put behind the tail, which goes on from tier to tier and from chunk to chunk without a gap.

As in decoding, this takes codebooks of fewer than 16 entries together; other schedules, and other machines, go one
element at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from splitzip_aio.codec.checksum import GROUP_BYTES
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, SEGMENT_ALIGN, TAIL_SLACK, TILE_ELEMENTS
from splitzip_aio.codec.simd import (
    address,
    compiled,
    entry,
    extract,
    inlined,
    load8,
    load16,
    load32,
    load64,
    lowest_bit,
    popcount,
    prefetch_written,
    store8,
    store16,
    store32,
    store64,
    sum_words,
    translate_to_nibbles,
    translate_window,
)

__all__ = ["SCRATCH_BYTES", "SLACK", "EncodePlan", "encode_tiers", "encode_top16"]

SLACK = 32  # bytes behind an output that a store may reach
_BLOCK = CHUNK_ELEMENTS  # elements; with what is read and written, their scratch memory takes half of a cache of 32 KiB
_AHEAD = 8192  # bytes; what is read and written next is fetched meanwhile
_LINE_BYTES = 64
_NIBBLE_BYTES = _BLOCK // 2 + SLACK
_SELECTORS = _BLOCK + SLACK  # exponents come first
_CODES = _SELECTORS + _BLOCK + SLACK  # nibbles: of each tier the codes and the masks, as the rows of the tables are
_VALUES = _CODES + 8 * _NIBBLE_BYTES  # 16 bits an element
SCRATCH_BYTES = _VALUES + 2 * _BLOCK + SLACK

_NIBBLES = np.uint64(0x1111111111111111)
_ONE = np.uint64(1)
_WORD_BITS = 56  # of a word that starts within a byte, those that are free for certain
_LISTED_BITS = 24  # of an escape of top16: place and exponent
_TOP16_ESCAPES = np.uint64(0x1010101010101010)


class EncodePlan(NamedTuple):
    """Where the kernels put things, byte offsets in the segment, and layouts in bits.

    ``starts`` is the offset of the index, ``windows`` the number of windows of the lookup. ``width0`` to ``width4``
    are the tiers' bits, then 8 for the escapes, then 0; ``depth`` counts the tiers, ``entries`` the exponents of all
    codebooks.
    """

    low: int
    high: int
    codes: int
    starts: int
    tail: int
    elements: int
    windows: int
    depth: int
    entries: int
    width0: int
    width1: int
    width2: int
    width3: int
    width4: int
    element_bytes: int
    exponent_bits: int
    mantissa_bits: int
    low_bits: int
    high_bits: int


@compiled
def _split_bf16(data: Any, low: Any, exponents: Any, count: Any) -> None:
    for element in range(count):
        word = load16(data, 2 * element)
        store8(exponents, element, word >> np.uint64(7))
        store8(low, element, word & np.uint64(0x7F) | word >> np.uint64(8) & np.uint64(0x80))


@compiled
def _split(data: Any, segment: Any, plan: Any, first: Any, count: Any, exponents: Any, values: Any) -> None:
    """Write a chunk's exponents to scratch memory and its residuals to their planes."""
    if plan.element_bytes == 2 and plan.mantissa_bits == 7:
        _split_bf16(data + 2 * first, segment + plan.low + first, exponents, count)
        for byte in range(0, count, _LINE_BYTES):
            prefetch_written(segment, plan.low + first + _AHEAD // 2 + byte)
        return
    mantissa_bits, sign_bit = np.uint64(plan.mantissa_bits), np.uint64(plan.mantissa_bits + plan.exponent_bits)
    mantissa, low_bits = (_ONE << mantissa_bits) - _ONE, np.uint64(plan.low_bits)
    for plane in range(2):
        for element in range(count):
            if plan.element_bytes == 2:
                word = load16(data, 2 * (first + element))
            elif plan.element_bytes == 4:
                word = load32(data, 4 * (first + element))
            else:
                word = load8(data, first + element)
            store8(exponents, element, word >> mantissa_bits & ((_ONE << np.uint64(plan.exponent_bits)) - _ONE))
            residual = (word & mantissa) | word >> sign_bit << mantissa_bits
            store16(values, 2 * element, residual >> low_bits if plane else residual & ((_ONE << low_bits) - _ONE))
        width = plan.high_bits if plane else plan.low_bits
        _pack(values, count, width, segment + (plan.high if plane else plan.low) + first * width // 8)


@compiled
def _pack(values: Any, count: Any, width: Any, target: Any) -> None:
    """Write ``count`` values of ``width`` bits, 16 at most, one after another, and no byte more."""
    word, filled, place = np.uint64(0), 0, 0
    for value in range(count):
        word |= load16(values, 2 * value) << np.uint64(filled)
        filled += width
        if filled >= 32:
            store32(target, place, word)
            word >>= np.uint64(32)
            filled -= 32
            place += 4
    while filled > 0:
        store8(target, place, word)
        word >>= np.uint64(8)
        filled -= 8
        place += 1


@compiled
def _look_up(lookup: Any, plan: Any, exponents: Any, selectors: Any, count: Any) -> None:
    """Translate exponents: in a window by its 16 entries, relative (XOR) to ``plan.entries``; all others to that.

    ``lookup`` holds 256 selectors, then the first exponents of 16 windows, then their entries.
    """
    for place in range((count + 15) & -16):
        store8(selectors, place, np.uint64(plan.entries))
    for window in range(plan.windows):
        for place in range(0, count, 16):
            translate_window(lookup + 272, lookup + 256, window, exponents, selectors, place)


@compiled
def _look_up_portable(lookup: Any, exponents: Any, selectors: Any, count: Any) -> None:
    for place in range(count):
        store8(selectors, place, load8(lookup, np.int64(load8(exponents, place))))


@compiled
def _to_nibbles(tables: Any, row: Any, selectors: Any, count: Any, nibbles: Any) -> None:
    for place in range(0, count, 64):
        translate_to_nibbles(tables, row, selectors, place, nibbles, row * _NIBBLE_BYTES + (place >> 1))


@inlined
def _pack_nibbles_as(width: Any, codes: Any, groups: Any, target: Any) -> None:
    for group in range(groups):
        packed = extract(load64(codes, group << 3), _NIBBLES * np.uint64((1 << width) - 1))
        if width == 4:
            store64(target, 8 * group, packed)
        elif width >= 2:
            store32(target, 2 * width * group, packed)
            if width == 3:
                store16(target, 6 * group + 4, packed >> np.uint64(32))
        else:
            store16(target, 2 * group, packed)


@compiled
def _pack_nibbles(width: Any, codes: Any, count: Any, target: Any, scratch: Any) -> None:
    """Pack the first tier's codes, to the byte: what is not a whole group of 16 goes through scratch memory."""
    groups = count >> 4
    if width == 2:
        _pack_nibbles_as(2, codes, groups, target)
    else:
        _pack_nibbles_as(width, codes, groups, target)
    if count & 15:
        _pack_nibbles_as(width, codes + (groups << 3), 1, scratch)
        for byte in range(((count & 15) * width + 7) >> 3):
            store8(target, 2 * width * groups + byte, load8(scratch, byte))


@compiled
def _append_codes(codes: Any, masks: Any, groups: Any, tail: Any, position: Any) -> Any:
    """Put the bits of codes that ``masks`` selects behind bit ``position`` of the tail; return its end.

    What limits this is that each step waits for the one before, so it takes an even number of groups, two at a time.
    """
    word = load8(tail, position >> 3) & ((_ONE << np.uint64(position & 7)) - _ONE)
    for pair in range(groups >> 1):
        mask, next_mask = load64(masks, pair << 4), load64(masks, (pair << 4) + 8)
        bits, more = extract(load64(codes, pair << 4), mask), popcount(mask)
        next_bits, together = extract(load64(codes, (pair << 4) + 8), next_mask), more + popcount(next_mask)
        if together <= _WORD_BITS:
            bits |= next_bits << np.uint64(more)
        else:
            store64(tail, position >> 3, word | bits << np.uint64(position & 7))
            word = (word | bits << np.uint64(position & 7)) >> np.uint64(((position & 7) + more) & 56)
            position += more
            bits, together = next_bits, together - more
        word |= bits << np.uint64(position & 7)
        store64(tail, position >> 3, word)
        word >>= np.uint64(((position & 7) + together) & 56)
        position += together
    return position


@compiled
def _append(value: Any, width: Any, tail: Any, position: Any) -> Any:
    """Put ``width`` bits, 8 at most, behind bit ``position`` of the tail; return its end."""
    filled = np.uint64(position & 7)
    word = load8(tail, position >> 3) & ((_ONE << filled) - _ONE)
    store16(tail, position >> 3, word | value << filled)
    return position + width


@compiled
def _append_tiers(plan: Any, nibbles: Any, exponents: Any, count: Any, tail: Any, position: Any) -> Any:
    """Put the deeper tiers and the escapes of a chunk behind the tail.

    Returns the end of the tail and the number of escapes.
    """
    groups, escapes = (count + 31) >> 5 << 1, 0
    for tier in range(1, plan.depth):
        codes = nibbles + 2 * tier * _NIBBLE_BYTES
        position = _append_codes(codes, codes + _NIBBLE_BYTES, groups, tail, position)
    marks = nibbles + _NIBBLE_BYTES
    for pair in range(groups >> 1):
        if load64(marks, pair << 4) | load64(marks, (pair << 4) + 8):
            for group in range(2 * pair, 2 * pair + 2):
                mark = load64(marks, group << 3)
                while mark:
                    place = (group << 4) + (lowest_bit(mark) >> 2)
                    position = _append(load8(exponents, place), 8, tail, position)
                    escapes += 1
                    mark &= mark - _ONE
    return position, escapes


@compiled
def _append_tiers_portable(plan: Any, selectors: Any, exponents: Any, count: Any, tail: Any, position: Any) -> Any:
    """``_append_tiers`` with one element at a time."""
    widths, base = (plan.width1, plan.width2, plan.width3), (_ONE << np.uint64(plan.width0)) - _ONE
    for tier in range(plan.depth - 1):
        sentinel = (_ONE << np.uint64(widths[tier])) - _ONE
        for place in range(count):
            selector = load8(selectors, place)
            if selector >= base:
                position = _append(min(selector - base, sentinel), widths[tier], tail, position)
        base += sentinel
    escapes = 0
    for place in range(count):
        if load8(selectors, place) == base:
            position = _append(load8(exponents, place), 8, tail, position)
            escapes += 1
    return position, escapes


@compiled
def _pack_portable(plan: Any, selectors: Any, count: Any, values: Any, target: Any) -> None:
    sentinel = (_ONE << np.uint64(plan.width0)) - _ONE
    for place in range(count):
        store16(values, 2 * place, min(load8(selectors, place), sentinel))
    _pack(values, count, plan.width0, target)


@inlined
def _zero(base: Any, start: Any, stop: Any) -> None:
    for place in range(start, stop):
        store8(base, place, np.uint64(0))


@compiled
def _pad(base: Any, plan: Any, code_bits: Any, tail_bits: Any) -> None:
    """Zero what lies between the parts of a segment, and behind its tail."""
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    _zero(base, plan.low + ((plan.elements * plan.low_bits + 7) >> 3), plan.high)
    _zero(base, plan.high + ((plan.elements * plan.high_bits + 7) >> 3), plan.codes)
    _zero(base, plan.codes + ((plan.elements * code_bits + 7) >> 3), plan.starts)
    _zero(base, plan.starts + 4 * (tiles + 1), plan.tail)
    end = plan.tail + (tail_bits + 31) // 32 * 4 + TAIL_SLACK
    _zero(base, plan.tail + ((tail_bits + 7) >> 3), (end + SEGMENT_ALIGN - 1) & -SEGMENT_ALIGN)


@entry
def encode_tiers(data: Any, segment: Any, scratch: Any, lookup: Any, tables: Any, plan: Any, portable: Any) -> Any:
    """Encode (elements * element_bytes,) bytes; return escapes, bits of the tail, the checksum's sum of words.

    ``segment`` has room for the longest tail and ``SLACK`` bytes; the header is left to the caller.
    ``scratch`` is (SCRATCH_BYTES,), ``lookup`` (528,) gives exponents their selectors (see ``_look_up``). Row
    ``2 * k`` of ``tables``, (8, 16), gives a selector's code in tier ``k``, the row after it the mask of its bits
    there; row 1, a mask that nobody needs, marks escapes. ``portable`` as in
    ``splitzip_aio.codec.fast_decode.decode_tiers``.
    """
    source, base, exponents = address(data), address(segment), address(scratch)
    selectors, nibbles, values = exponents + _SELECTORS, exponents + _CODES, exponents + _VALUES
    tail, position, escapes, total = base + plan.tail, 0, 0, np.uint64(0)
    for block in range(0, plan.elements, _BLOCK):
        size, plane = min(_BLOCK, plan.elements - block), base + plan.codes + block * plan.width0 // 8
        _split(source, base, plan, block, size, exponents, values)
        if portable is None:
            _look_up(address(lookup), plan, exponents, selectors, size)
            for place in range(size, (size + 63) & -64):
                store8(selectors, place, np.uint64(0))
            for row in range(2 * plan.depth):
                _to_nibbles(address(tables), row, selectors, size, nibbles)
            _pack_nibbles(plan.width0, nibbles, size, plane, values)
        else:
            _look_up_portable(address(lookup), exponents, selectors, size)
            _pack_portable(plan, selectors, size, values, plane)
        tile, within = divmod(block, TILE_ELEMENTS)
        if within == 0:
            store32(base, plan.starts + 4 * tile, np.uint64(position))
        if portable is None:
            position, missing = _append_tiers(plan, nibbles, exponents, size, tail, position)
        else:
            position, missing = _append_tiers_portable(plan, selectors, exponents, size, tail, position)
        escapes += missing
        start, length = block * plan.element_bytes, size * plan.element_bytes
        total += sum_words(source, start, length, start // GROUP_BYTES, _AHEAD, False)
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    store32(base, plan.starts + 4 * tiles, np.uint64(position))
    _pad(base, plan, plan.width0, position)
    return escapes, position, total


@entry
def encode_top16(data: Any, segment: Any, scratch: Any, lookup: Any, escaped: Any, plan: Any, portable: Any) -> Any:
    """``encode_tiers`` for the published layout; returns the number of escapes and the checksum's sum of words.

    Selectors are codes, and 16 for an escape. Places go to the tail, the exponents of escapes to ``escaped``, of
    elements or more bytes, and from there behind the places.
    """
    source, base, exponents = address(data), address(segment), address(scratch)
    selectors, values, listed = exponents + _SELECTORS, exponents + _VALUES, address(escaped)
    escapes, total = 0, np.uint64(0)
    for block in range(0, plan.elements, _BLOCK):
        size, plane = min(_BLOCK, plan.elements - block), base + plan.codes + (block >> 1)
        _split(source, base, plan, block, size, exponents, values)
        if portable is None:
            _look_up(address(lookup), plan, exponents, selectors, size)
        else:
            _look_up_portable(address(lookup), exponents, selectors, size)
        store64(selectors, size, np.uint64(0))
        for pair in range((size + 1) >> 1):
            codes = load16(selectors, 2 * pair)
            store8(plane, pair, codes << np.uint64(4) | codes >> np.uint64(8) & np.uint64(15))
        if block % TILE_ELEMENTS == 0:
            store32(base, plan.starts + block // TILE_ELEMENTS * 4, np.uint64(escapes))
        for group in range((size + 7) >> 3):
            mark = load64(selectors, group << 3) & _TOP16_ESCAPES
            while mark:
                place = (group << 3) + (lowest_bit(mark) >> 3)
                store16(base, plan.tail + 2 * escapes, np.uint64((block + place) % TILE_ELEMENTS))
                store8(listed, escapes, load8(exponents, place))
                escapes += 1
                mark &= mark - _ONE
        start, length = block * plan.element_bytes, size * plan.element_bytes
        total += sum_words(source, start, length, start // GROUP_BYTES, _AHEAD, False)
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    store32(base, plan.starts + 4 * tiles, np.uint64(escapes))
    for place in range(escapes):  # upwards: they may lie where they are to go
        store8(base, plan.tail + 2 * escapes + place, load8(listed, place))
    _pad(base, plan, 4, _LISTED_BITS * escapes)
    return escapes, total
