"""Where tensors are cut, and plans that come true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16, RAW, ElementFormat
from splitzip_aio.codec.layout import MAX_SEGMENT_ELEMENTS, SEGMENT_ELEMENTS
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import STORED, TOP16, Schedule, choose_schedule
from splitzip_aio.codec.segments import plan_segments, segment_spans
from splitzip_aio.errors import InvalidArgumentError
from tests.codec.data import FORMATS, Bytes, elements, random_bits, schedules, weights

ANY_PARTS = st.sampled_from(FORMATS).flatmap(
    lambda fmt: st.tuples(st.just(fmt), st.lists(elements(fmt), min_size=1, max_size=3))
)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("whole", [0, 1, 2, 5])
def test_spans_cover_a_tensor_once(fmt: ElementFormat, whole: int, extra: int) -> None:
    nbytes = max(0, (whole * SEGMENT_ELEMENTS + extra) * fmt.element_bytes)
    spans = list(segment_spans(nbytes, fmt))
    starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
    assert [*starts, nbytes] == [0, *stops]
    limit = (4 if fmt == RAW else 1) * MAX_SEGMENT_ELEMENTS
    for start, stop in spans:
        assert 0 < stop - start <= limit * fmt.element_bytes
        assert start % (SEGMENT_ELEMENTS * fmt.element_bytes) == 0
        assert (stop - start) % fmt.element_bytes == 0


def test_a_tensor_of_terabytes_is_cut_lazily() -> None:
    first = next(segment_spans(1 << 50, BF16))
    assert first == (0, 2 * SEGMENT_ELEMENTS)


@given(ANY_PARTS)
def test_a_plan_comes_true(case: tuple[ElementFormat, list[Bytes]]) -> None:
    fmt, parts = case
    histograms = [cpu.histogram(part, fmt) for part in parts]
    plan = plan_segments(fmt, histograms)
    assert plan.schedule == choose_schedule(fmt, histograms)
    assert plan.codebooks == plan.schedule.codebooks(np.sum(histograms, axis=0), fmt)
    sizes = [cpu.encode_segment(part, fmt, plan.schedule, plan.codebooks).size for part in parts]
    assert list(plan.segments) == sizes


@given(ANY_PARTS, st.data())
def test_a_forced_plan_comes_true(case: tuple[ElementFormat, list[Bytes]], draw: st.DataObject) -> None:
    fmt, parts = case
    schedule, ranking = draw.draw(schedules(fmt)), cpu.histogram(draw.draw(elements(fmt)), fmt)
    plan = plan_segments(fmt, [cpu.histogram(part, fmt) for part in parts], schedule=schedule, ranking=ranking)
    assert plan.schedule == schedule
    assert plan.codebooks == schedule.codebooks(ranking, fmt)
    segments = [cpu.encode_segment(part, fmt, schedule, plan.codebooks) for part in parts]
    headers = [parse_header(segment.data, where="segment") for segment in segments]
    assert list(plan.segments) == [segment.size for segment in segments]
    assert [*zip(plan.tail_bits, plan.escapes, strict=True)] == [(each.tail_bits, each.escapes) for each in headers]


def test_plans_are_compared_by_all_they_say() -> None:
    histograms = [cpu.histogram(weights(BF16, count, np.random.default_rng(4)), BF16) for count in (5000, 70)]
    plan = plan_segments(BF16, histograms)
    assert plan == plan_segments(BF16, np.array(histograms, np.int32))
    assert plan != plan_segments(BF16, histograms[:1])
    assert plan != plan_segments(BF16, histograms, schedule=TOP16)
    assert plan.part(1, 2).segments == plan.segments[1:]
    assert plan.nbytes == sum(plan.segments)
    assert np.array_equal(plan.counts, sum(histograms))
    assert plan != plan.segments


def test_a_poor_ranking_changes_the_choice() -> None:
    """With codebooks that miss everything, storing is cheapest."""
    data = np.tile(np.array([0x80, 0x3F], np.uint8), 5000)
    histogram = cpu.histogram(data, BF16)
    foreign = np.zeros(256, np.int64)
    foreign[:127] = 1
    assert plan_segments(BF16, [histogram]).schedule != STORED
    assert plan_segments(BF16, [histogram], ranking=foreign).schedule == STORED


def test_nothing_is_planned_for_an_empty_tensor() -> None:
    plan = plan_segments(BF16, [])
    assert (plan.schedule, plan.segments) == (STORED, ())
    assert plan_segments(BF16, [], schedule=TOP16).segments == ()


@pytest.mark.parametrize("text", ["top16", "2,2,3"])
def test_a_schedule_that_cannot_code_is_refused(text: str) -> None:
    histogram = cpu.histogram(random_bits(RAW, 9, np.random.default_rng(1)), RAW)
    with pytest.raises(InvalidArgumentError, match=f"{text} cannot code RAW"):
        plan_segments(RAW, [histogram], schedule=Schedule.parse(text))
