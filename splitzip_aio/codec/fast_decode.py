"""Decoding in machine code: sixteen elements at a time.

A block of chunks is decoded in three passes over scratch memory that stays in the first-level cache.

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
    address,
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

__all__ = ["SCRATCH_BYTES", "DecodePlan", "decode_tiers", "decode_top16"]

_BLOCK = 4096  # elements, a tile's worth at most: what their scratch memory takes leaves room in a cache of 32 KiB
_SLACK = 32  # bytes behind scratch data that a load may reach
_SELECTORS = _BLOCK + _SLACK  # exponents come first; selectors are nibbles
_PLACES = _SELECTORS + _BLOCK // 2 + _SLACK
_VALUES = _PLACES + 2 * _BLOCK
_CODES = _VALUES + _BLOCK
SCRATCH_BYTES = _CODES + CHUNK_ELEMENTS // 2 + _SLACK

_STEP_BITS = 48  # divisible by every width, and still whole in a 64-bit word after a shift by 7
_NIBBLES = np.uint64(0x1111111111111111)
_ONE = np.uint64(1)
_LANES = np.array([0] + [sum(1 << bit for bit in range(0, _STEP_BITS, width)) for width in range(1, 5)], np.uint64)


class DecodePlan(NamedTuple):
    """What the kernels need of a header: byte offsets in the segment, counts, and layouts in bits.

    ``starts`` is the offset of the index. ``width0`` to ``width4`` are the tiers' bits, then 8 for the escapes, then 0;
    ``depth`` counts the tiers, ``entries`` the exponents of all codebooks.
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
def _copy_codes(source: Any, codes: Any, bits: Any) -> None:
    """Copy ``bits`` bits and put zeros behind them: a code that is not there must not look like a sentinel."""
    whole = bits >> 3
    for byte in range(whole):
        store8(codes, byte, load8(source, byte))
    store64(codes, whole, np.uint64(0))
    if bits & 7:
        store8(codes, whole, load8(source, whole) & ((_ONE << np.uint64(bits & 7)) - _ONE))


@compiled
def _count_sentinels(base: Any, position: Any, width: Any, count: Any) -> Any:
    """How many of ``count`` codes of ``width`` bits, from bit ``position`` on, are all ones."""
    place, shift = position >> 3, np.uint64(position & 7)
    first, second, third = np.uint64(min(1, width - 1)), np.uint64(min(2, width - 1)), np.uint64(width - 1)
    lanes, per_step, found = _LANES[width], _STEP_BITS // width, 0
    for step in range(count // per_step):
        word = load64(base, place + 6 * step) >> shift
        found += popcount(word & (word >> first) & (word >> second) & (word >> third) & lanes)
    word = load64(base, place + 6 * (count // per_step)) >> shift
    word &= (_ONE << np.uint64(count % per_step * width)) - _ONE
    return found + popcount(word & (word >> first) & (word >> second) & (word >> third) & lanes)


@compiled
def _find_tiers(codes: Any, tail: Any, plan: Any, count: Any, start: Any) -> Any:
    """First bits of a chunk's second to fourth tier, of its escapes, of what follows, and the number of escapes.

    The chunk's tail starts at bit ``start``. When it goes past the tail of the segment, the last is -1.
    """
    reached = _count_sentinels(codes, 0, plan.width0, count)
    second = third = fourth = escapes = start
    end = start + reached * plan.width1
    if plan.depth > 1 and end <= plan.tail_bits:
        reached = _count_sentinels(tail, second, plan.width1, reached)
        third = escapes = end
        end += reached * plan.width2
    if plan.depth > 2 and end <= plan.tail_bits:
        reached = _count_sentinels(tail, third, plan.width2, reached)
        fourth = escapes = end
        end += reached * plan.width3
    if plan.depth > 3 and end <= plan.tail_bits:
        reached = _count_sentinels(tail, fourth, plan.width3, reached)
        escapes = end
        end += reached * plan.width4
    return second, third, fourth, escapes, end, reached if end <= plan.tail_bits else -1


@inlined
def _sentinels(codes: Any, width: Any) -> Any:
    """1 in each nibble of ``codes`` that holds ``2**width - 1``."""
    if width == 4:
        codes &= codes >> np.uint64(2)
        return codes & (codes >> _ONE) & _NIBBLES
    return ((codes + _NIBBLES) >> np.uint64(width)) & _NIBBLES


@inlined
def _spread(tail: Any, cursor: Any, deeper: Any, width: Any) -> Any:
    """The next tier's codes, from bit ``cursor`` on, on the nibbles where ``deeper`` is 1."""
    window = load64(tail, cursor >> 3) >> np.uint64(cursor & 7)
    return deposit(window, (deeper << np.uint64(width)) - deeper)


@compiled
def _list_escapes(deeper: Any, first: Any, places: Any, found: Any) -> Any:
    """Append the places of the ones in ``deeper``; return how many are listed."""
    while deeper:
        store16(places, 2 * found, np.uint64(first + (lowest_bit(deeper) >> 2)))
        found += 1
        deeper &= deeper - _ONE
    return found


@inlined
def _select_as(
    widths: Any, codes: Any, tail: Any, cursors: Any, first: Any, count: Any, selectors: Any, places: Any, found: Any
) -> Any:
    """Write a chunk's selectors and list the places of its escapes behind the ``found`` that are listed.

    ``first`` is the chunk's place in the block. Inlined, so that ``widths`` given as constants become operands; a width
    of 0 is a tier that is not there.
    """
    width0, width1, width2, width3 = widths
    cursor1, cursor2, cursor3 = cursors
    largest = _NIBBLES * np.uint64((1 << width0) - 1)
    for word in range((count + 15) >> 4):
        selector = code = deposit(load64(codes, word * 2 * width0), largest)
        deeper = _sentinels(code, width0)
        if width1:
            code = _spread(tail, cursor1, deeper, width1)
            cursor1 += popcount(deeper) * width1
            selector += code
            deeper = _sentinels(code, width1)
        if width2:
            code = _spread(tail, cursor2, deeper, width2)
            cursor2 += popcount(deeper) * width2
            selector += code
            deeper = _sentinels(code, width2)
        if width3:
            code = _spread(tail, cursor3, deeper, width3)
            cursor3 += popcount(deeper) * width3
            selector += code
            deeper = _sentinels(code, width3)
        store64(selectors, (first >> 1) + (word << 3), selector)
        if deeper:
            found = _list_escapes(deeper, first + (word << 4), places, found)
    return found


@compiled
def _select(
    plan: Any, codes: Any, tail: Any, cursors: Any, first: Any, count: Any, selectors: Any, places: Any, found: Any
) -> Any:
    """``_select_as`` for the schedule, its widths constants where it is the one that most tensors get."""
    width1 = plan.width1 if plan.depth > 1 else 0
    width2 = plan.width2 if plan.depth > 2 else 0
    width3 = plan.width3 if plan.depth > 3 else 0
    if plan.width0 == 2 and width1 == 2 and width2 == 3 and width3 == 0:
        return _select_as((2, 2, 3, 0), codes, tail, cursors, first, count, selectors, places, found)
    widths = (plan.width0, width1, width2, width3)
    return _select_as(widths, codes, tail, cursors, first, count, selectors, places, found)


@inlined
def _code(base: Any, position: Any, width: Any) -> Any:
    """The ``width`` bits, 8 at most, at bit ``position``."""
    return load16(base, position >> 3) >> np.uint64(position & 7) & ((_ONE << np.uint64(width)) - _ONE)


@compiled
def _select_portable(
    plan: Any, codes: Any, tail: Any, cursors: Any, first: Any, count: Any, selectors: Any, places: Any, found: Any
) -> Any:
    """``_select`` with one element at a time, and selectors in bytes."""
    for element in range(count):
        store8(selectors, first + element, _code(codes, element * plan.width0, plan.width0))
    widths = (plan.width1, plan.width2, plan.width3)
    sentinel = (_ONE << np.uint64(plan.width0)) - _ONE
    for tier in range(plan.depth - 1):
        cursor, width = cursors[tier], widths[tier]
        for element in range(first, first + count):
            selector = load8(selectors, element)
            if selector == sentinel:
                store8(selectors, element, selector + _code(tail, cursor, width))
                cursor += width
        sentinel += (_ONE << np.uint64(width)) - _ONE
    for element in range(first, first + count):
        if load8(selectors, element) == sentinel:
            store16(places, 2 * found, np.uint64(element))
            found += 1
    return found


@compiled
def _translate(book: Any, selectors: Any, exponents: Any, count: Any) -> None:
    for element in range(0, count, 32):
        translate_nibbles(book, selectors, element >> 1, exponents, element)


@compiled
def _translate_portable(book: Any, exponents: Any, count: Any) -> None:
    for element in range(count):
        store8(exponents, element, load8(book, np.int64(load8(exponents, element))))


@compiled
def _join_bf16(exponents: Any, low: Any, out: Any, count: Any) -> None:
    for element in range(count):
        residual = load8(low, element)
        word = load8(exponents, element) << np.uint64(7)
        word |= (residual & np.uint64(0x7F)) | (residual & np.uint64(0x80)) << np.uint64(8)
        store16(out, 2 * element, word)


@compiled
def _join(exponents: Any, segment: Any, plan: Any, first: Any, out: Any, count: Any) -> None:
    mantissa_bits, low_bits = np.uint64(plan.mantissa_bits), np.uint64(plan.low_bits)
    sign_bit = np.uint64(plan.mantissa_bits + plan.exponent_bits)
    mantissa, low_mask = (_ONE << mantissa_bits) - _ONE, (_ONE << low_bits) - _ONE
    high_mask = (_ONE << np.uint64(plan.high_bits)) - _ONE
    for element in range(count):
        low, high = (first + element) * plan.low_bits, (first + element) * plan.high_bits
        residual = load16(segment, plan.low + (low >> 3)) >> np.uint64(low & 7) & low_mask
        residual |= (load32(segment, plan.high + (high >> 3)) >> np.uint64(high & 7) & high_mask) << low_bits
        word = (residual & mantissa) | load8(exponents, element) << mantissa_bits
        word |= residual >> mantissa_bits << sign_bit
        if plan.element_bytes == 1:
            store8(out, element, word)
        elif plan.element_bytes == 2:
            store16(out, 2 * element, word)
        else:
            store32(out, 4 * element, word)


@compiled
def _join_and_sum(exponents: Any, segment: Any, plan: Any, first: Any, out: Any, count: Any) -> Any:
    """Write a block's elements; return their share of the checksum."""
    start = first * plan.element_bytes
    if plan.element_bytes == 2 and plan.mantissa_bits == 7:
        _join_bf16(exponents, segment + plan.low + first, out + start, count)
    else:
        _join(exponents, segment, plan, first, out + start, count)
    size = count * plan.element_bytes
    return sum_words(out, start, size, start // GROUP_BYTES, size, True)


@entry
def decode_tiers(segment: Any, out: Any, scratch: Any, book: Any, plan: Any, portable: Any) -> Any:
    """Decode (segment_bytes,) into (decoded_bytes,); return whether all counts agree, and the checksum's sum of words.

    ``scratch`` is (SCRATCH_BYTES,), ``book`` (64,) the codebooks end to end. ``portable`` is None to use BMI2 and
    SSSE3, for codebooks of fewer than 16 entries together; True keeps every mention of them out of the compiled code.
    """
    base, target, exponents = address(segment), address(out), address(scratch)
    selectors, places, values = exponents + _SELECTORS, exponents + _PLACES, exponents + _VALUES
    tail, escapes, position, total = base + plan.tail, 0, 0, np.uint64(0)
    for block in range(0, plan.elements, _BLOCK):
        size, found = min(_BLOCK, plan.elements - block), 0
        for first in range(0, size, CHUNK_ELEMENTS):
            tile, within = divmod(block + first, TILE_ELEMENTS)
            if within == 0 and position != np.int64(load32(base, plan.starts + 4 * tile)):
                return False, total
            count, codes = min(CHUNK_ELEMENTS, size - first), base + plan.codes + (block + first) * plan.width0 // 8
            if count & 15:
                _copy_codes(codes, exponents + _CODES, count * plan.width0)
                codes = exponents + _CODES
            second, third, fourth, raw, position, missing = _find_tiers(codes, tail, plan, count, position)
            if missing < 0:
                return False, total
            for escape in range(missing):
                store8(values, found + escape, _code(tail, raw + 8 * escape, 8))
            cursors = (second, third, fourth)
            if portable is None:
                found = _select(plan, codes, tail, cursors, first, count, selectors, places, found)
            else:
                found = _select_portable(plan, codes, tail, cursors, first, count, exponents, places, found)
        if portable is None:
            _translate(address(book), selectors, exponents, size)
        else:
            _translate_portable(address(book), exponents, size)
        for escape in range(found):
            store8(exponents, np.int64(load16(places, 2 * escape)), load8(values, escape))
        total += _join_and_sum(exponents, base, plan, block, target, size)
        escapes += found
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    whole = position == plan.tail_bits and position == np.int64(load32(base, plan.starts + 4 * tiles))
    return whole and escapes == plan.escapes, total


@compiled
def _write_escapes(segment: Any, plan: Any, block: Any, count: Any, exponents: Any) -> Any:
    """Write the top16 escapes of a block over its exponents; return whether its tile's list is in order."""
    tile = block // TILE_ELEMENTS
    first = block - tile * TILE_ELEMENTS
    bound = min(TILE_ELEMENTS, plan.elements - tile * TILE_ELEMENTS)
    entry_at = plan.starts + 4 * tile
    start, end = np.int64(load32(segment, entry_at)), np.int64(load32(segment, entry_at + 4))
    if not start <= end <= plan.escapes:
        return False
    for escape in range(start, end):
        place = np.int64(load16(segment, plan.tail + 2 * escape))
        if place >= bound:
            return False
        if first <= place < first + count:
            store8(exponents, place - first, load8(segment, plan.tail + 2 * plan.escapes + escape))
    return True


@entry
def decode_top16(segment: Any, out: Any, scratch: Any, book: Any, plan: Any, portable: Any) -> Any:
    """``decode_tiers`` for the published layout: 16 codes of 4 bits, and a list of places and exponents."""
    base, target, exponents = address(segment), address(out), address(scratch)
    selectors, total = exponents + _SELECTORS, np.uint64(0)
    tiles = (plan.elements + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    listed = np.int64(load32(base, plan.starts + 4 * tiles))
    whole = load32(base, plan.starts) == 0 and listed == plan.escapes
    for block in range(0, plan.elements, _BLOCK):
        size, plane = min(_BLOCK, plan.elements - block), base + plan.codes + (block >> 1)
        if portable is None:
            for pair in range((size + 1) >> 1):
                codes = load8(plane, pair)
                store8(selectors, pair, codes >> np.uint64(4) | codes << np.uint64(4))
            _translate(address(book), selectors, exponents, size)
        else:
            for pair in range((size + 1) >> 1):
                codes = load8(plane, pair)
                store16(exponents, 2 * pair, codes >> np.uint64(4) | (codes & np.uint64(15)) << np.uint64(8))
            _translate_portable(address(book), exponents, size)
        whole = whole and _write_escapes(base, plan, block, size, exponents)
        total += _join_and_sum(exponents, base, plan, block, target, size)
    return whole, total
