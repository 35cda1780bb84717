"""Headers checked together are judged as each alone is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec.formats import BF16, F16, RAW
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.layout import HEADER_BYTES
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import STORED, TOP16, Schedule
from splitzip_aio.errors import CorruptDataError
from tests.codec.data import random_bits, weights
from tests.codec.hostile import encode, seal_header

RNG = np.random.default_rng(3)
SEGMENTS = [
    encode(weights(BF16, 900, RNG), BF16, Schedule.parse((2, 2, 3))),
    encode(weights(BF16, 70, RNG), BF16, TOP16),
    encode(weights(F16, 333, RNG), F16, Schedule.parse((3,))),
    encode(random_bits(RAW, 50, RNG), RAW, STORED),
]
SIZES = np.array([segment.size for segment in SEGMENTS])
STARTS = np.cumsum(SIZES) - SIZES


def parse(slot: np.ndarray) -> SegmentHeaders:
    return SegmentHeaders.parse(slot.data, STARTS, SIZES, where="segment {}".format)


def verdict(judge: Callable[[], object]) -> str | None:
    """What was said against the header, if anything."""
    try:
        judge()
    except CorruptDataError as error:
        return str(error)
    return None


def test_columns_are_what_each_header_says() -> None:
    headers = parse(np.concatenate(SEGMENTS))
    assert len(headers) == len(SEGMENTS)
    for place, segment in enumerate(SEGMENTS):
        alone = parse_header(segment.data, where="segment")
        row = headers.fields[place]
        assert row["elements"] == alone.elements
        assert row["decoded_bytes"] == alone.decoded_bytes
        assert row["checksum"] == alone.checksum
        assert row["tail"] == alone.layout.tail
        (coding,) = [coding for coding, members in headers.groups.items() if place in members]
        assert (coding.fmt, coding.schedule) == (alone.fmt, alone.schedule)


@given(
    place=st.integers(0, len(SEGMENTS) - 1),
    changes=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 9), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_a_forged_header_is_refused_here_exactly_if_it_is_refused_alone(
    place: int, changes: list[tuple[int, int]]
) -> None:
    slot = np.concatenate(SEGMENTS)
    forged = slot[STARTS[place] :][: SIZES[place]]
    for offset, value in changes:
        forged[offset] = value
    seal_header(forged)
    assert verdict(lambda: parse(slot)) == verdict(lambda: parse_header(forged.data, where=f"segment {place}"))


@pytest.mark.parametrize(("starts", "sizes"), [([-32], [200]), ([0], [1 << 40]), ([1 << 20], [200]), ([], [])])
def test_segments_outside_the_memory_are_refused(starts: list[int], sizes: list[int]) -> None:
    with pytest.raises(CorruptDataError):
        SegmentHeaders.parse(np.concatenate(SEGMENTS).data, starts, sizes, where=str)
