"""Schedules: what they are called, what they cost, and that the choice is the cheapest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16, F8_E4M3, RAW, ElementFormat
from splitzip_aio.codec.schedule import (
    CANDIDATES,
    STORED,
    TOP16,
    Method,
    Schedule,
    choose_schedule,
    encoded_bytes,
)
from splitzip_aio.errors import InvalidArgumentError
from tests.codec.data import ALL_TIERS, CODED, FORMATS, Bytes, cases, elements, schedules, weights, words


@pytest.mark.parametrize("schedule", [STORED, TOP16, *ALL_TIERS], ids=str)
def test_text_and_schedule_lead_to_each_other(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(schedule) is schedule
    if schedule.widths:
        assert Schedule.parse(schedule.widths) == schedule
        assert Schedule.parse(f"({', '.join(map(str, schedule.widths))})") == schedule


@pytest.mark.parametrize("text", ["TOP16", " top16 ", "Stored", "(4,)", "4", "4,", "[2, 3]"])
def test_spellings(text: str) -> None:
    if text.startswith("["):
        with pytest.raises(InvalidArgumentError, match=r"2, 3"):
            Schedule.parse(text)
    else:
        assert str(Schedule.parse(text)) in {"top16", "stored", "4"}


@pytest.mark.parametrize(
    "value", ["", "()", "zip", "0", "5", "2,5", "-1", "2,,x", "2 3", "1,1,1,1,1", (), (0,), (5,), (2,) * 5]
)
def test_what_names_no_schedule_is_refused(value: str | Sequence[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        Schedule.parse(value)


def test_only_tiers_have_widths() -> None:
    for method in (Method.STORED, Method.TOP16):
        with pytest.raises(InvalidArgumentError):
            Schedule(method, (4,))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_what_applies_to_which_format(fmt: ElementFormat) -> None:
    assert STORED.applies_to(fmt)
    assert TOP16.applies_to(fmt) == (fmt == BF16)
    assert all(schedule.applies_to(fmt) == (fmt != RAW) for schedule in ALL_TIERS)


@given(cases())
def test_size_is_known_from_the_histogram(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    counts = cpu.histogram(data, fmt)
    codebooks = schedule.codebooks(counts, fmt)
    assert cpu.encode_segment(data, fmt, schedule, codebooks).size == encoded_bytes(schedule, fmt, counts, codebooks)


@given(cases(), st.data())
def test_size_is_known_with_any_codebook(case: tuple[ElementFormat, Schedule, Bytes], data: st.DataObject) -> None:
    fmt, schedule, content = case
    foreign = cpu.histogram(data.draw(elements(fmt)), fmt)
    codebooks = schedule.codebooks(foreign, fmt)
    segment = cpu.encode_segment(content, fmt, schedule, codebooks)
    assert segment.size == encoded_bytes(schedule, fmt, cpu.histogram(content, fmt), codebooks)


def encoded_size(fmt: ElementFormat, schedule: Schedule, parts: list[Bytes]) -> int:
    """By encoding every segment with the codebook of them all."""
    total = cpu.histogram(np.concatenate(parts), fmt)
    codebooks = schedule.codebooks(total, fmt)
    return sum(cpu.encode_segment(part, fmt, schedule, codebooks).size for part in parts)


@given(st.sampled_from(FORMATS).flatmap(lambda fmt: st.tuples(st.just(fmt), st.lists(elements(fmt), max_size=3))))
def test_the_choice_is_the_smallest_by_brute_force(case: tuple[ElementFormat, list[Bytes]]) -> None:
    fmt, parts = case
    chosen = choose_schedule(fmt, [cpu.histogram(part, fmt) for part in parts])
    if not parts:
        assert chosen == STORED
        return
    sizes = {each: encoded_size(fmt, each, parts) for each in CANDIDATES if each.applies_to(fmt)}
    assert sizes[chosen] == min(sizes.values())
    assert chosen == next(each for each in CANDIDATES if sizes.get(each) == sizes[chosen]), "of equals the simplest"


@given(st.sampled_from(FORMATS).flatmap(lambda fmt: st.tuples(st.just(fmt), elements(fmt))))
def test_nothing_grows_by_more_than_its_header_and_padding(case: tuple[ElementFormat, Bytes]) -> None:
    fmt, data = case
    counts = cpu.histogram(data, fmt)
    chosen = choose_schedule(fmt, [counts])
    size = encoded_bytes(chosen, fmt, counts, chosen.codebooks(counts, fmt))
    assert size < data.size + 160 + 32


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
def test_trained_weights_take_three_tiers(fmt: ElementFormat) -> None:
    """That the design's figures hold: (2, 2, 3) wins on weights and saves what it should."""
    data = weights(fmt, 1 << 18, np.random.default_rng(0))
    counts = cpu.histogram(data, fmt)
    chosen = choose_schedule(fmt, [counts])
    size = encoded_bytes(chosen, fmt, counts, chosen.codebooks(counts, fmt))
    assert str(chosen) == "2,2,3"
    coded_bits = (size - 160) * 8 / (1 << 18) - fmt.residual_bits
    assert coded_bits < 2.85


def ranked(order: list[int]) -> NDArray[np.int64]:
    counts = np.zeros(256, np.int64)
    counts[order] = np.arange(len(order), 0, -1) * 10
    return counts


def test_codebooks_follow_frequency_tier_by_tier() -> None:
    order = [120, 7, 255, 0, 9, 130, 11, 12, 90, 91, 92, 93, 94, 95, 96, 97, 98]
    assert Schedule.parse("2,2,3").codebooks(ranked(order), BF16) == tuple(
        bytes(part) for part in (order[:3], order[3:6], order[6:13])
    )
    assert TOP16.codebooks(ranked(order), BF16) == (bytes(order[:16]),)
    assert STORED.codebooks(ranked(order), BF16) == ()


def test_equal_counts_go_by_value_and_short_formats_end_in_zeros() -> None:
    assert Schedule.parse("3").codebooks(np.zeros(256, np.int64), BF16) == (bytes(range(7)),)
    books = Schedule.parse("4,4").codebooks(cpu.histogram(words(np.zeros(3, int), F8_E4M3), F8_E4M3), F8_E4M3)
    assert books == (bytes(range(15)), bytes([15, *[0] * 14]))


@given(st.sampled_from(CODED).flatmap(lambda fmt: st.tuples(st.just(fmt), schedules(fmt), elements(fmt))))
def test_tail_bounds_hold(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    counts = cpu.histogram(data, fmt)
    codebooks = schedule.codebooks(counts, fmt)
    known = sorted(set(b"".join(codebooks)))
    escapes = int(counts.sum() - counts[known].sum()) if codebooks else 0
    least, most = schedule.tail_bounds(int(counts.sum()), escapes)
    assert least <= counts @ schedule.tail_costs(codebooks) <= most
