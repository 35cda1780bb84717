"""Decoding in machine code: sixteen elements at a time, chunk by chunk.

A chunk is decoded in three passes over scratch memory that stays in the first-level cache.

*Select.* Every element gets a selector: its place in the codebooks laid end to end. With sentinels ``2**w - 1`` and
codebooks of ``2**w - 1`` entries, that is simply the sum of the element's codes over the tiers. Sixteen first-tier
codes are spread to the nibbles of a word by one bit deposit (PDEP). Adding 1 to each nibble carries into bit ``w`` just
where the sentinel is, which gives a word ``deeper`` with 1 in the nibbles that go on in the next tier; depositing the
next tier's bits under ``deeper * (2**w - 1)`` puts each of its codes on the nibble it belongs to, and
``w * popcount(deeper)`` moves that tier's cursor on. There is no loop over elements and no branch on data but for
escapes, which are rare: their places are listed. It takes selectors below 16, so codebooks of fewer than 16 entries
together; other schedules, and other machines, go one element at a time. The tiers of a chunk lie one after another,
so their lengths are counted first, 48 bits at a time.

*Translate.* Selectors become exponents, 32 at once (PSHUFB); then the listed escapes are written over them.

*Join.* Exponents and residuals become elements, in loops that LLVM vectorises; their share of the checksum is added.

Nothing in a segment is trusted: a tier is read only after its end has been compared with the end of the tail. A 64-bit
load that starts inside the tail or the codes ends inside the segment, because ``TAIL_SLACK`` bytes follow the one and
the index follows the other. A kernel only says that a segment is wrong; the reference words the error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from splitzip_aio.codec.checksum import GROUP_BYTES
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.simd import (
    compiled,
    deposit,
    entry,
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
    translate_nibbles,
)

__all__ = ["DecodePlan", "decode_tiers", "decode_top16"]

_SLACK = 32  # bytes behind scratch data that a load may reach
_STEP_BITS = 48  # divisible by every width, and still whole in a 64-bit word after a shift by 7
_NIBBLES = np.uint64(0x1111111111111111)
_ONE = np.uint64(1)
_LANES = np.array([0] + [sum(1 << bit for bit in range(0, _STEP_BITS, width)) for width in range(1, 5)], np.uint64)


class DecodePlan(NamedTuple):
    """What the kernels need of a header: byte offsets in the segment, counts, and the element's layout in bits.

    ``starts`` is the offset of the index. ``entries`` counts the exponents of all codebooks, ``depth`` the tiers.
    """

    low: int
    high: int
    codes: int
    starts: int
    tail: int
    tail_bits: int
    elements: int
    escapes: int
    depth: int
    entries: int
    element_bytes: int
    exponent_bits: int
    mantissa_bits: int
    low_bits: int
    high_bits: int


@compiled
def _copy_codes(segment: Any, start: Any, codes: Any, bits: Any) -> None:
    """Copy ``bits`` bits and put zeros behind them: a code that is not there must not look like a sentinel."""
    size = (bits + 7) >> 3
    for byte in range(size):
        codes[byte] = load8(segment, start + byte)
    if bits & 7:
        codes[bits >> 3] &= (1 << (bits & 7)) - 1
    store64(codes, size, np.uint64(0))


@compiled
def _count_sentinels(bits: Any, start: Any, position: Any, width: Any, count: Any) -> Any:
    """How many of ``count`` codes of ``width`` bits, from bit ``position`` behind byte ``start`` on, are all ones."""
    place, shift = start + (position >> 3), np.uint64(position & 7)
    first, second, third = np.uint64(min(1, width - 1)), np.uint64(min(2, width - 1)), np.uint64(width - 1)
    lanes, per_step, found = _LANES[width], _STEP_BITS // width, 0
    for step in range(count // per_step):
        word = load64(bits, place + 6 * step) >> shift
        found += popcount(word & (word >> first) & (word >> second) & (word >> third) & lanes)
    left = count % per_step
    word = load64(bits, place + 6 * (count // per_step)) >> shift
    word &= (_ONE << np.uint64(left * width)) - _ONE
    return found + popcount(word & (word >> first) & (word >> second) & (word >> third) & lanes)


@compiled
def _find_tiers(codes: Any, segment: Any, plan: Any, widths: Any, count: Any, cursors: Any) -> Any:
    """Set ``cursors[1:]``, from ``cursors[0]`` on, to the first bit of each deeper tier and of the escapes.

    ``cursors[5]`` becomes the first bit after them. Returns the number of escapes, or -1 when they go past the tail.
    """
    reached, position = _count_sentinels(codes, 0, 0, widths[0], count), cursors[0]
    for tier in range(1, plan.depth + 1):
        cursors[tier] = position
        position += reached * widths[tier]
        if position > plan.tail_bits:
            return -1
        if tier < plan.depth:
            reached = _count_sentinels(segment, plan.tail, cursors[tier], widths[tier], reached)
    cursors[5] = position
    return reached


@inlined
def _sentinels(codes: Any, width: Any) -> Any:
    """1 in each nibble of ``codes`` that holds ``2**width - 1``."""
    if width == 4:
        codes &= codes >> np.uint64(2)
        return codes & (codes >> _ONE) & _NIBBLES
    return ((codes + _NIBBLES) >> np.uint64(width)) & _NIBBLES


@inlined
def _spread(segment: Any, tail: Any, cursor: Any, deeper: Any, width: Any) -> Any:
    """The next tier's codes, from bit ``cursor`` on, on the nibbles where ``deeper`` is 1."""
    window = load64(segment, tail + (cursor >> 3)) >> np.uint64(cursor & 7)
    return deposit(window, (deeper << np.uint64(width)) - deeper)


@compiled
def _list_escapes(deeper: Any, first: Any, escapes: Any, found: Any) -> Any:
    """Append the places of the ones in ``deeper`` to ``escapes``; return how many it holds."""
    while deeper:
        escapes[found] = first + (lowest_bit(deeper) >> 2)
        found += 1
        deeper &= deeper - _ONE
    return found


@inlined
def _select_as(
    widths: Any, codes: Any, segment: Any, tail: Any, count: Any, cursors: Any, selectors: Any, escapes: Any
) -> None:
    """Write a chunk's selectors, in nibbles, and the places of those that are escapes.

    Inlined, so that ``widths`` given as constants become operands; a width of 0 is a tier that is not there.
    """
    width0, width1, width2, width3 = widths
    largest = _NIBBLES * np.uint64((1 << width0) - 1)
    cursor1, cursor2, cursor3, found = cursors[1], cursors[2], cursors[3], 0
    for word in range((count + 15) >> 4):
        selector = code = deposit(load64(codes, word * 2 * width0), largest)
        deeper = _sentinels(code, width0)
        if width1:
            code = _spread(segment, tail, cursor1, deeper, width1)
            cursor1 += popcount(deeper) * width1
            selector += code
            deeper = _sentinels(code, width1)
        if width2:
            code = _spread(segment, tail, cursor2, deeper, width2)
            cursor2 += popcount(deeper) * width2
            selector += code
            deeper = _sentinels(code, width2)
        if width3:
            code = _spread(segment, tail, cursor3, deeper, width3)
            cursor3 += popcount(deeper) * width3
            selector += code
            deeper = _sentinels(code, width3)
        store64(selectors, word << 3, selector)
        if deeper:
            found = _list_escapes(deeper, word << 4, escapes, found)


@compiled
def _select(
    widths: Any, depth: Any, codes: Any, segment: Any, tail: Any, count: Any, cursors: Any, selectors: Any, escapes: Any
) -> None:
    """:func:`_select_as` for the schedule, its widths constants where it is the one that most tensors get."""
    width1 = widths[1] if depth > 1 else 0
    width2 = widths[2] if depth > 2 else 0
    width3 = widths[3] if depth > 3 else 0
    if widths[0] == 2 and width1 == 2 and width2 == 3 and width3 == 0:
        _select_as((2, 2, 3, 0), codes, segment, tail, count, cursors, selectors, escapes)
    else:
        _select_as((widths[0], width1, width2, width3), codes, segment, tail, count, cursors, selectors, escapes)


@compiled
def _select_portable(
    widths: Any, depth: Any, codes: Any, segment: Any, tail: Any, count: Any, cursors: Any, selectors: Any, escapes: Any
) -> None:
    """:func:`_select`, selectors in bytes, with one element at a time."""
    for element in range(count):
        selectors[element] = _code(codes, 0, element * widths[0], widths[0])
    sentinel = (1 << widths[0]) - 1
    for tier in range(1, depth):
        cursor, width = cursors[tier], widths[tier]
        for element in range(count):
            if selectors[element] == sentinel:
                selectors[element] += _code(segment, tail, cursor, width)
                cursor += width
        sentinel += (1 << width) - 1
    found = 0
    for element in range(count):
        if selectors[element] == sentinel:
            escapes[found] = element
            found += 1


@inlined
def _code(bits: Any, start: Any, position: Any, width: Any) -> Any:
    """The ``width`` bits, 8 at most, at bit ``position`` behind byte ``start``."""
    word = load16(bits, start + (position >> 3)) >> np.uint64(position & 7)
    return np.int64(word & np.uint64((1 << width) - 1))


@compiled
def _translate(book: Any, selectors: Any, exponents: Any, count: Any) -> None:
    for element in range(0, count, 32):
        translate_nibbles(book, selectors, element >> 1, exponents, element)


@compiled
def _translate_portable(book: Any, exponents: Any, count: Any) -> None:
    for element in range(count):
        exponents[element] = book[exponents[element]]


@compiled
def _join_bf16(segment: Any, low: Any, exponents: Any, out: Any, start: Any, count: Any) -> None:
    for element in range(count):
        residual = load8(segment, low + element)
        word = np.uint64(exponents[element]) << np.uint64(7)
        word |= (residual & np.uint64(0x7F)) | (residual & np.uint64(0x80)) << np.uint64(8)
        store16(out, start + 2 * element, word)


@compiled
def _join(segment: Any, plan: Any, first: Any, exponents: Any, out: Any, start: Any, count: Any) -> None:
    mantissa_bits, low_bits = np.uint64(plan.mantissa_bits), np.uint64(plan.low_bits)
    sign_bit = np.uint64(plan.mantissa_bits + plan.exponent_bits)
    mantissa, low_mask = (_ONE << mantissa_bits) - _ONE, (_ONE << low_bits) - _ONE
    high_mask = (_ONE << np.uint64(plan.high_bits)) - _ONE
    for element in range(count):
        low, high = (first + element) * plan.low_bits, (first + element) * plan.high_bits
        residual = load16(segment, plan.low + (low >> 3)) >> np.uint64(low & 7) & low_mask
        residual |= (load32(segment, plan.high + (high >> 3)) >> np.uint64(high & 7) & high_mask) << low_bits
        word = (residual & mantissa) | np.uint64(exponents[element]) << mantissa_bits
        word |= residual >> mantissa_bits << sign_bit
        if plan.element_bytes == 1:
            store8(out, start + element, word)
        elif plan.element_bytes == 2:
            store16(out, start + 2 * element, word)
        else:
            store32(out, start + 4 * element, word)


@compiled
def _join_and_sum(segment: Any, plan: Any, first: Any, exponents: Any, out: Any, count: Any) -> Any:
    """Write a chunk's elements; return their share of the checksum."""
    start = first * plan.element_bytes
    if plan.element_bytes == 2 and plan.mantissa_bits == 7:
        _join_bf16(segment, plan.low + first, exponents, out, start, count)
    else:
        _join(segment, plan, first, exponents, out, start, count)
    return sum_words(out, start, count * plan.element_bytes, start // GROUP_BYTES)


@entry
def decode_tiers(segment: Any, out: Any, plan: Any, widths: Any, book: Any, portable: Any) -> Any:
    """Decode (segment_bytes,) into (decoded_bytes,); return whether all counts agree, and the checksum's sum of words.

    ``widths`` (5,) int64 are the tiers' bits with 8 after the last, ``book`` (64,) the codebooks end to end.
    ``portable`` is None to use BMI2 and SSSE3; anything else keeps every mention of them out of the compiled code.
    """
    codes = np.empty(CHUNK_ELEMENTS // 2 + _SLACK, np.uint8)
    selectors = np.empty(CHUNK_ELEMENTS // 2 + _SLACK, np.uint8)
    exponents = np.empty(CHUNK_ELEMENTS + _SLACK, np.uint8)
    escapes = np.empty(CHUNK_ELEMENTS, np.int64)
    cursors = np.zeros(6, np.int64)
    found, total = 0, np.uint64(0)
    for first in range(0, plan.elements, CHUNK_ELEMENTS):
        if first % TILE_ELEMENTS == 0 and cursors[0] != load32(segment, plan.starts + first // TILE_ELEMENTS * 4):
            return False, total
        count = min(CHUNK_ELEMENTS, plan.elements - first)
        _copy_codes(segment, plan.codes + first * widths[0] // 8, codes, count * widths[0])
        missing = _find_tiers(codes, segment, plan, widths, count, cursors)
        if missing < 0:
            return False, total
        slow = True
        if portable is None:
            slow = plan.entries >= 16
            if not slow:
                _select(widths, plan.depth, codes, segment, plan.tail, count, cursors, selectors, escapes)
                _translate(book, selectors, exponents, count)
        if slow:
            _select_portable(widths, plan.depth, codes, segment, plan.tail, count, cursors, exponents, escapes)
            _translate_portable(book, exponents, count)
        for escape in range(missing):
            exponents[escapes[escape]] = _code(segment, plan.tail, cursors[plan.depth] + 8 * escape, 8)
        total += _join_and_sum(segment, plan, first, exponents, out, count)
        found += missing
        cursors[0] = cursors[5]
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    whole = cursors[0] == plan.tail_bits and cursors[0] == load32(segment, plan.starts + 4 * tiles)
    return whole and found == plan.escapes, total


@compiled
def _write_chunk_escapes(segment: Any, plan: Any, chunk: Any, count: Any, exponents: Any) -> Any:
    """Write a top16 chunk's escapes over its exponents; return whether all are inside the list and the chunk."""
    entry = plan.starts + 4 * chunk
    start, end = np.int64(load32(segment, entry)), np.int64(load32(segment, entry + 4))
    if not start <= end <= plan.escapes:
        return False
    for escape in range(start, end):
        place = np.int64(load16(segment, plan.tail + 2 * escape))
        if place >= count:
            return False
        exponents[place] = load8(segment, plan.tail + 2 * plan.escapes + escape)
    return True


@entry
def decode_top16(segment: Any, out: Any, plan: Any, book: Any, portable: Any) -> Any:
    """:func:`decode_tiers` for the published layout: 16 codes of 4 bits, and a list of places and exponents."""
    selectors = np.empty(CHUNK_ELEMENTS // 2 + _SLACK, np.uint8)
    exponents = np.empty(CHUNK_ELEMENTS + _SLACK, np.uint8)
    total = np.uint64(0)
    chunks = (plan.elements + CHUNK_ELEMENTS - 1) // CHUNK_ELEMENTS
    whole = load32(segment, plan.starts) == 0 and load32(segment, plan.starts + 4 * chunks) == plan.escapes
    for first in range(0, plan.elements, CHUNK_ELEMENTS):
        count = min(CHUNK_ELEMENTS, plan.elements - first)
        for pair in range((count + 1) >> 1):
            codes = load8(segment, plan.codes + (first >> 1) + pair)
            if portable is None:
                selectors[pair] = codes >> np.uint64(4) | codes << np.uint64(4)
            else:
                exponents[2 * pair] = codes >> np.uint64(4)
                exponents[2 * pair + 1] = codes & np.uint64(15)
        if portable is None:
            _translate(book, selectors, exponents, count)
        else:
            _translate_portable(book, exponents, count)
        if not (whole and _write_chunk_escapes(segment, plan, first // CHUNK_ELEMENTS, count, exponents)):
            return False, total
        total += _join_and_sum(segment, plan, first, exponents, out, count)
    return True, total
