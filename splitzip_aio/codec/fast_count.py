"""Counting exponents in machine code."""

from __future__ import annotations

from typing import Any

import numpy as np

from splitzip_aio.codec.simd import (
    address,
    compiled,
    entry,
    extract,
    inlined,
    load16,
    load32,
    load64,
    prefetch,
    store32,
)

__all__ = ["PAIRS", "count_exponents"]

PAIRS = 1 << 16
"""Pairs of exponents that there can be."""
_ONE = np.uint64(1)
_LINE_QUADS = 8  # of 8 bytes, in a cache line
_AHEAD = 2048


@inlined
def _pair(base: Any, pair: Any, element_bytes: Any) -> Any:
    if element_bytes == 2:
        return load32(base, 4 * pair)
    if element_bytes == 4:
        return load64(base, 8 * pair)
    return load16(base, 2 * pair)


@compiled
def _count_pairs(
    base: Any, pairs: Any, element_bytes: Any, exponent_bits: Any, mantissa_bits: Any, counts: Any
) -> None:
    first, second = np.uint64(mantissa_bits), np.uint64(mantissa_bits + 8 * (element_bytes - 1))
    mask = (_ONE << np.uint64(exponent_bits)) - _ONE
    for pair in range(pairs):
        word = _pair(base, pair, element_bytes)
        place = np.int64(word >> first & mask | word >> second & mask << np.uint64(8)) << 2
        store32(counts, place, load32(counts, place) + _ONE)


@inlined
def _count_quads(base: Any, first_quad: Any, stop: Any, counts: Any) -> None:
    """``_count_pairs`` with two pairs at a time: one bit extraction takes the exponents of four elements."""
    exponents, low = np.uint64(0x7F80_7F80_7F80_7F80), np.uint64(0xFFFF)
    for quad in range(first_quad, stop):
        both = extract(load64(base, 8 * quad), exponents)
        first, second = np.int64(both & low) << 2, np.int64(both >> np.uint64(16)) << 2
        store32(counts, first, load32(counts, first) + _ONE)
        store32(counts, second, load32(counts, second) + _ONE)


@compiled
def _count_bf16(base: Any, pairs: Any, counts: Any) -> None:
    """Cache line by cache line, each asked for well ahead: the processor by itself stops at the ends of pages."""
    lines = pairs // (2 * _LINE_QUADS)
    for line in range(lines):
        prefetch(base, 8 * _LINE_QUADS * line + _AHEAD)
        _count_quads(base, _LINE_QUADS * line, _LINE_QUADS * (line + 1), counts)
    _count_quads(base, _LINE_QUADS * lines, pairs >> 1, counts)
    if pairs & 1:
        _count_pairs(base + 4 * (pairs - 1), 1, 2, 8, 7, counts)


@entry
def count_exponents(
    data: Any, element_bytes: Any, exponent_bits: Any, mantissa_bits: Any, pairs: Any, totals: Any, portable: Any
) -> None:
    """Add the exponents of an even number of elements to ``totals``, (256,) int64.

    ``pairs`` is (PAIRS,) uint32 of zeros, which it is again afterwards.

    Pairs of exponents are counted first: half the increments, and ones that seldom wait for the increment before,
    because neighbouring elements are equal more often than neighbouring pairs. ``portable`` None is for BF16 only.
    """
    base, number = address(data), data.size // (2 * element_bytes)
    if portable is None:
        _count_bf16(base, number, address(pairs))
    else:
        _count_pairs(base, number, element_bytes, exponent_bits, mantissa_bits, address(pairs))
    for second in range(0, 256 << exponent_bits, 256):
        any_count = np.uint32(0)
        for place in range(second, second + 256):
            any_count |= pairs[place]
        if any_count:  # most rows are empty
            row = np.int64(0)
            for first in range(256):
                row += np.int64(pairs[second + first])
                totals[first] += np.int64(pairs[second + first])
            totals[second >> 8] += row
            pairs[second : second + 256] = 0
