"""Bit planes against integers of unlimited width: element i is shifted by i * width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec.bits import pack_bits, to_bits, unpack_bits

WIDTHS = range(1, 17)


@st.composite
def planes(draw: st.DrawFn) -> tuple[int, list[int]]:
    width = draw(st.sampled_from(WIDTHS))
    return width, draw(st.lists(st.integers(0, 2**width - 1), max_size=60))


def plane_of(width: int, values: list[int]) -> bytes:
    whole = sum(value << (i * width) for i, value in enumerate(values))
    return whole.to_bytes((len(values) * width + 7) // 8, "little")


@given(planes())
def test_a_plane_is_one_little_endian_integer(case: tuple[int, list[int]]) -> None:
    width, values = case
    assert pack_bits(np.array(values, np.uint16), width).tobytes() == plane_of(width, values)


@given(planes())
def test_unpacking_inverts_packing(case: tuple[int, list[int]]) -> None:
    width, values = case
    plane = np.frombuffer(plane_of(width, values), np.uint8)
    assert unpack_bits(plane, width, len(values)).tolist() == values


@given(planes(), st.integers(0, 40), st.data())
def test_any_run_can_be_unpacked_from_any_bit(case: tuple[int, list[int]], lead: int, data: st.DataObject) -> None:
    width, values = case
    first = data.draw(st.integers(0, len(values)))
    count = data.draw(st.integers(0, len(values) - first))
    whole = sum(value << (i * width) for i, value in enumerate(values)) << lead
    plane = np.frombuffer(whole.to_bytes((lead + len(values) * width + 7) // 8, "little"), np.uint8)
    found = unpack_bits(plane, width, count, start=lead + first * width)
    assert found.tolist() == values[first : first + count]


@pytest.mark.parametrize("width", WIDTHS)
def test_bits_come_lowest_first(width: int) -> None:
    value = np.array([1 << (width - 1)], np.uint16)
    assert to_bits(value, width).tolist() == [0] * (width - 1) + [1]
