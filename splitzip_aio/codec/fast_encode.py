"""Encoding in machine code: the reverse of :mod:`~splitzip_aio.codec.fast_decode`, sixteen elements at a time.

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
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.simd import (
    compiled,
    count_equal,
    entry,
    extract,
    inlined,
    load8,
    load16,
    load32,
    load64,
    lowest_bit,
    popcount,
    store8,
    store16,
    store32,
    store64,
    sum_words,
    translate_to_nibbles,
    translate_window,
)

__all__ = ["SLACK", "EncodePlan", "count_exponents", "count_frequent", "encode_tiers", "encode_top16"]

SLACK = 32  # bytes behind an output that a store may reach
_BLOCK = 512  # elements counted by comparison before their counts are known to be complete
_NIBBLES = np.uint64(0x1111111111111111)
_ONE = np.uint64(1)
_TOP16_ESCAPES = np.uint64(0x1010101010101010)


class EncodePlan(NamedTuple):
    """Where the kernels put things, byte offsets in the segment, and the element's layout in bits.

    ``starts`` is the offset of the index. ``entries`` counts the exponents of all codebooks, ``depth`` the tiers.
    """

    low: int
    high: int
    codes: int
    starts: int
    tail: int
    elements: int
    depth: int
    entries: int
    element_bytes: int
    exponent_bits: int
    mantissa_bits: int
    low_bits: int
    high_bits: int


@inlined
def _element(data: Any, element: Any, element_bytes: Any) -> Any:
    if element_bytes == 2:
        return load16(data, 2 * element)
    if element_bytes == 4:
        return load32(data, 4 * element)
    return load8(data, element)


@entry
def count_exponents(
    data: Any, start: Any, stop: Any, element_bytes: Any, exponent_bits: Any, mantissa_bits: Any, counts: Any
) -> None:
    """Add the exponents of elements ``start`` to ``stop`` up in ``counts``, (4, 256) int64.

    Four tables, so that an increment seldom waits for the one before, which frequent values make to the same place.
    """
    shift, mask = np.uint64(mantissa_bits), (_ONE << np.uint64(exponent_bits)) - _ONE
    for element in range(start, stop):
        counts[element & 3, np.int64(_element(data, element, element_bytes) >> shift & mask)] += 1


@entry
def count_frequent(data: Any, start: Any, exponent_bits: Any, mantissa_bits: Any, frequent: Any, counts: Any) -> None:
    """The same from ``start`` on for elements of 16 bits, most of which have an exponent in ``frequent``, (16,).

    A block is compared with each of the 16 in turn, 32 elements at once; where they do not account for all of it, it is
    counted again one by one.
    """
    size = data.size >> 1
    shift, mask = np.uint64(mantissa_bits), (_ONE << np.uint64(exponent_bits)) - _ONE
    exponents, found = np.empty(_BLOCK, np.uint8), np.empty(16, np.int64)
    for first in range(start, size - _BLOCK + 1, _BLOCK):
        for element in range(_BLOCK):
            exponents[element] = load16(data, 2 * (first + element)) >> shift & mask
        left = _BLOCK
        for rank in range(16):
            found[rank] = count_equal(exponents, 0, _BLOCK // 32, frequent[rank])
            left -= found[rank]
        if left:
            count_exponents(data, first, first + _BLOCK, 2, exponent_bits, mantissa_bits, counts)
        else:
            for rank in range(16):
                counts[0, frequent[rank]] += found[rank]
    whole = start + (size - start) // _BLOCK * _BLOCK
    count_exponents(data, whole, size, 2, exponent_bits, mantissa_bits, counts)


@compiled
def _split(data: Any, segment: Any, plan: Any, first: Any, count: Any, exponents: Any, values: Any) -> None:
    """Write a chunk's exponents to scratch and its residuals to their planes."""
    if plan.element_bytes == 2 and plan.mantissa_bits == 7:
        for element in range(count):
            word = load16(data, 2 * (first + element))
            exponents[element] = word >> np.uint64(7)
            store8(
                segment, plan.low + first + element, (word & np.uint64(0x7F)) | (word >> np.uint64(8) & np.uint64(0x80))
            )
        return
    mantissa_bits, sign_bit = np.uint64(plan.mantissa_bits), np.uint64(plan.mantissa_bits + plan.exponent_bits)
    mantissa, exponent = np.uint64((1 << plan.mantissa_bits) - 1), np.uint64((1 << plan.exponent_bits) - 1)
    low_bits, low = np.uint64(plan.low_bits), np.uint64((1 << plan.low_bits) - 1)
    for plane in range(2):
        for element in range(count):
            word = _element(data, first + element, plan.element_bytes)
            exponents[element] = word >> mantissa_bits & exponent
            residual = (word & mantissa) | word >> sign_bit << mantissa_bits
            values[element] = residual >> low_bits if plane else residual & low
        width = plan.high_bits if plane else plan.low_bits
        _pack(values, count, width, segment, (plan.high if plane else plan.low) + first * width // 8)


@compiled
def _pack(values: Any, count: Any, width: Any, target: Any, start: Any) -> None:
    """Write ``count`` values of ``width`` bits, 16 at most, from byte ``start`` on, and no byte more."""
    word, filled = np.uint64(0), 0
    for value in range(count):
        word |= np.uint64(values[value]) << np.uint64(filled)
        filled += width
        if filled >= 32:
            store32(target, start, word)
            word >>= np.uint64(32)
            filled -= 32
            start += 4
    while filled > 0:
        store8(target, start, word)
        word >>= np.uint64(8)
        filled -= 8
        start += 1


@compiled
def _look_up(windows: Any, firsts: Any, rest: Any, source: Any, target: Any, count: Any) -> None:
    """Translate exponents: in a window by its 16 entries, relative (XOR) to ``rest``; all others to ``rest``."""
    for place in range((count + 15) & -16):
        target[place] = rest
    for window in range(firsts.size):
        for place in range(0, count, 16):
            translate_window(windows, firsts, window, source, target, place)


@compiled
def _look_up_portable(table: Any, source: Any, target: Any, count: Any) -> None:
    for place in range(count):
        target[place] = table[source[place]]


@compiled
def _to_nibbles(tables: Any, row: Any, selectors: Any, groups: Any, nibbles: Any) -> None:
    for pair in range((groups + 1) >> 1):
        translate_to_nibbles(tables, row, selectors, pair << 5, nibbles, pair << 4)


@compiled
def _pack_codes(codes: Any, width: Any, groups: Any, packed: Any) -> None:
    mask = _NIBBLES * np.uint64((1 << width) - 1)
    for group in range(groups):
        store64(packed, 2 * width * group, extract(load64(codes, group << 3), mask))


@compiled
def _append_codes(codes: Any, masks: Any, groups: Any, segment: Any, tail: Any, position: Any) -> Any:
    """Put the code bits that ``masks`` selects behind bit ``position`` of the tail; return the position after them."""
    word = load8(segment, tail + (position >> 3)) & ((_ONE << np.uint64(position & 7)) - _ONE)
    for group in range(groups):
        mask = load64(masks, group << 3)
        word |= extract(load64(codes, group << 3), mask) << np.uint64(position & 7)
        store64(segment, tail + (position >> 3), word)
        more = popcount(mask)
        word >>= np.uint64(((position & 7) + more) & 56)
        position += more
    return position


@compiled
def _append(values: Any, count: Any, width: Any, segment: Any, tail: Any, position: Any) -> Any:
    """Put ``count`` values of ``width`` bits, 8 at most, behind bit ``position`` of the tail; return its end."""
    for value in range(count):
        place, filled = tail + (position >> 3), np.uint64(position & 7)
        word = load8(segment, place) & ((_ONE << filled) - _ONE)
        store16(segment, place, word | np.uint64(values[value]) << filled)
        position += width
    return position


@compiled
def _find_escapes(marks: Any, groups: Any, exponents: Any, escapes: Any) -> Any:
    """Gather the exponents that ``marks`` has ones for in its nibbles; return how many."""
    found = 0
    for group in range(groups):
        mark = load64(marks, group << 3)
        while mark:
            escapes[found] = exponents[(group << 4) + (lowest_bit(mark) >> 2)]
            found += 1
            mark &= mark - _ONE
    return found


@compiled
def _append_tiers(
    tables: Any,
    plan: Any,
    selectors: Any,
    count: Any,
    exponents: Any,
    codes: Any,
    masks: Any,
    values: Any,
    segment: Any,
    position: Any,
) -> Any:
    """Put a chunk's deeper tiers and escapes behind the tail; return the new position and the number of escapes."""
    groups = (count + 15) >> 4
    for tier in range(1, plan.depth):
        _to_nibbles(tables, 2 * tier, selectors, groups, codes)
        _to_nibbles(tables, 2 * tier + 1, selectors, groups, masks)
        position = _append_codes(codes, masks, groups, segment, plan.tail, position)
    _to_nibbles(tables, 1, selectors, groups, masks)
    missing = _find_escapes(masks, groups, exponents, values)
    return _append(values, missing, 8, segment, plan.tail, position), missing


@compiled
def _append_tiers_portable(
    widths: Any, plan: Any, selectors: Any, count: Any, exponents: Any, values: Any, segment: Any, position: Any
) -> Any:
    """:func:`_append_tiers` with one element at a time."""
    base = (1 << widths[0]) - 1
    for tier in range(1, plan.depth):
        found, sentinel = 0, (1 << widths[tier]) - 1
        for element in range(count):
            if selectors[element] >= base:
                values[found] = min(selectors[element] - base, sentinel)
                found += 1
        position = _append(values, found, widths[tier], segment, plan.tail, position)
        base += sentinel
    missing = 0
    for element in range(count):
        if selectors[element] == base:
            values[missing] = exponents[element]
            missing += 1
    return _append(values, missing, 8, segment, plan.tail, position), missing


@entry
def encode_tiers(
    data: Any, segment: Any, plan: Any, widths: Any, table: Any, windows: Any, firsts: Any, tables: Any, portable: Any
) -> Any:
    """Encode (elements * element_bytes,) bytes; return escapes, bits of the tail, and the checksum's sum of words.

    ``segment`` has room for the longest tail and ``SLACK`` bytes; header and padding are left to the caller. ``table``
    (256,) gives an exponent's selector, ``windows`` and ``firsts`` the same (see :func:`_look_up`). Row ``2 * k`` of
    ``tables``, (8, 16) laid flat, gives a selector's code in tier ``k``, the row after it the mask of its bits there,
    but row 1 marks escapes. ``portable`` as in :func:`~splitzip_aio.codec.fast_decode.decode_tiers`.
    """
    codes = np.empty(CHUNK_ELEMENTS // 2 + SLACK, np.uint8)
    masks = np.empty(CHUNK_ELEMENTS // 2 + SLACK, np.uint8)
    exponents = np.empty(CHUNK_ELEMENTS + SLACK, np.uint8)
    selectors = np.empty(CHUNK_ELEMENTS + SLACK, np.uint8)
    values = np.empty(CHUNK_ELEMENTS + SLACK, np.uint16)
    position, escapes, total = 0, 0, np.uint64(0)
    for first in range(0, plan.elements, CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, plan.elements - first)
        if first % TILE_ELEMENTS == 0:
            store32(segment, plan.starts + first // TILE_ELEMENTS * 4, np.uint64(position))
        _split(data, segment, plan, first, count, exponents, values)
        plane = plan.codes + first * widths[0] // 8
        slow = True
        if portable is None:
            slow = plan.entries >= 16
            if not slow:
                _look_up(windows, firsts, plan.entries, exponents, selectors, count)
                selectors[count : count + SLACK] = 0
                _to_nibbles(tables, 0, selectors, (count + 15) >> 4, codes)
                _pack_codes(codes, widths[0], (count + 15) >> 4, masks)
                for byte in range((count * widths[0] + 7) >> 3):
                    store8(segment, plane + byte, np.uint64(masks[byte]))
                position, missing = _append_tiers(
                    tables, plan, selectors, count, exponents, codes, masks, values, segment, position
                )
                escapes += missing
        if slow:
            _look_up_portable(table, exponents, selectors, count)
            for element in range(count):
                values[element] = min(selectors[element], (1 << widths[0]) - 1)
            _pack(values, count, widths[0], segment, plane)
            position, missing = _append_tiers_portable(
                widths, plan, selectors, count, exponents, values, segment, position
            )
            escapes += missing
        start = first * plan.element_bytes
        total += sum_words(data, start, count * plan.element_bytes, start // GROUP_BYTES)
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    store32(segment, plan.starts + 4 * tiles, np.uint64(position))
    return escapes, position, total


@entry
def encode_top16(
    data: Any, segment: Any, plan: Any, table: Any, windows: Any, firsts: Any, escaped: Any, portable: Any
) -> Any:
    """:func:`encode_tiers` for the published layout; returns escapes and the checksum's sum of words.

    Selectors are codes, and 16 for an escape. Places go to the tail, the exponents of escapes to ``escaped``,
    (elements,), whence the caller puts them behind.
    """
    exponents = np.empty(CHUNK_ELEMENTS + SLACK, np.uint8)
    selectors = np.empty(CHUNK_ELEMENTS + SLACK, np.uint8)
    values = np.empty(CHUNK_ELEMENTS, np.uint16)
    escapes, total = 0, np.uint64(0)
    for first in range(0, plan.elements, CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, plan.elements - first)
        store32(segment, plan.starts + first // CHUNK_ELEMENTS * 4, np.uint64(escapes))
        _split(data, segment, plan, first, count, exponents, values)
        if portable is None:
            _look_up(windows, firsts, 16, exponents, selectors, count)
        else:
            _look_up_portable(table, exponents, selectors, count)
        selectors[count : count + SLACK] = 0
        plane = plan.codes + (first >> 1)
        for pair in range((count + 1) >> 1):
            even, odd = np.uint64(selectors[2 * pair]), np.uint64(selectors[2 * pair + 1])
            store8(segment, plane + pair, even << np.uint64(4) | odd & np.uint64(15))
        for group in range((count + 7) >> 3):
            mark = load64(selectors, group << 3) & _TOP16_ESCAPES
            while mark:
                place = (group << 3) + (lowest_bit(mark) >> 3)
                store16(segment, plan.tail + 2 * escapes, np.uint64(place))
                escaped[escapes] = exponents[place]
                escapes += 1
                mark &= mark - _ONE
        start = first * plan.element_bytes
        total += sum_words(data, start, count * plan.element_bytes, start // GROUP_BYTES)
    chunks = (plan.elements + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS
    store32(segment, plan.starts + 4 * chunks, np.uint64(escapes))
    return escapes, total
