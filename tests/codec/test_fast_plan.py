"""The compiled survey of counts finds what numpy finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitzip_aio.codec import schedule
from splitzip_aio.codec.formats import BF16, RAW
from splitzip_aio.codec.schedule import STORED, CountSurvey, candidates, exponent_order, survey_counts
from splitzip_aio.codec.segments import plan_segments

pytest.importorskip("numba")


def counts_of(seed: int, segments: int, most: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, most, (segments, 256)) * (rng.random((segments, 256)) < rng.random())


def both(counts: NDArray[np.integer], ranking: NDArray[np.int64] | None) -> tuple[CountSurvey, CountSurvey]:
    schedules = candidates(BF16)
    assert schedule._compiled() is not None
    found = survey_counts(schedules, counts, ranking)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "_compiled", lambda: None)
        return found, survey_counts(schedules, counts, ranking)


@given(
    seed=st.integers(0, 1 << 32),
    segments=st.integers(0, 5),
    most=st.sampled_from((1, 2, 1000, 1 << 22, 1 << 40)),
    foreign=st.booleans(),
)
def test_as_numpy_does_it(seed: int, segments: int, most: int, foreign: bool) -> None:
    counts = counts_of(seed, segments, most)
    ranking = counts_of(seed + 1, 1, 3)[0] if foreign else None
    found, expected = both(counts, ranking)
    for name in ("total", "order", "tail_bits", "escapes", "elements"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert np.array_equal(found.order, exponent_order(found.total if ranking is None else ranking))
    assert np.array_equal(found.elements, counts.sum(axis=1))


def test_counts_from_a_device() -> None:
    """32 bits, whose sums need more."""
    counts = np.full((600, 256), (1 << 22) // 256, np.int32)
    counts[:, 3] += 1
    narrow, wide = plan_segments(BF16, counts), plan_segments(BF16, counts.astype(np.int64))
    assert narrow == wide
    assert narrow.counts.sum() == 600 * ((1 << 22) + 1)


def test_segments_of_many_sizes() -> None:
    counts = np.zeros((4, 256), np.int64)
    counts[:, 0] = (9, 70_000, 9, 31)
    expected = [STORED.layout(RAW, size, 0).segment_bytes for size in (9, 70_000, 9, 31)]
    assert list(plan_segments(RAW, counts).segments) == expected
