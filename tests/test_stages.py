"""The clock of a stream: what it waits for at each instant, and that the times add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from splitzip_aio.stages import StageClock
from splitzip_aio.timeline import Slice, Stage, Timeline


class Hands:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def clock(hands: Hands) -> StageClock:
    return StageClock(now=hands)


def waited(clock: StageClock) -> dict[str, float]:
    """What was waited for, without what was not."""
    times = clock.statistics()
    return {
        name: getattr(times, f"{name}_s")
        for name in ("disk", "slot", "copy", "decode", "consumer")
        if getattr(times, f"{name}_s")
    }


@contextmanager
def wanting_a_slot(clock: StageClock) -> Iterator[None]:
    end = clock.slot_wait()
    try:
        yield
    finally:
        end()


@contextmanager
def reading(clock: StageClock, layer: str, slot: int, nbytes: int) -> Iterator[None]:
    end = clock.read(layer, slot, nbytes)
    try:
        yield
    finally:
        end()


def test_nothing_on_its_way_waits_for_the_consumer(clock: StageClock, hands: Hands) -> None:
    hands.time += 3
    assert waited(clock) == {"consumer": 3}


def test_a_slot_goes_through_each_stage(clock: StageClock, hands: Hands) -> None:
    with wanting_a_slot(clock):
        hands.time += 1
    with reading(clock, "one", 0, 4096):
        hands.time += 2
    with clock.upload("one", 0, 4096, 6000, in_place=False) as upload:
        hands.time += 4
        upload.drained()
        hands.time += 8
    hands.time += 16
    assert waited(clock) == {"slot": 1, "disk": 2, "copy": 4, "decode": 8, "consumer": 16}


def test_what_is_decoded_in_place_is_never_copied(clock: StageClock, hands: Hands) -> None:
    with clock.upload("one", 0, 4096, 6000, in_place=True) as upload:
        hands.time += 4
        upload.drained()
        hands.time += 8
    assert waited(clock) == {"decode": 4, "consumer": 8}


def test_one_slot_downstream_costs_nothing_while_others_are_read(clock: StageClock, hands: Hands) -> None:
    with reading(clock, "one", 0, 4096), clock.upload("one", 1, 4096, 6000, in_place=True):
        hands.time += 5
    assert waited(clock) == {"disk": 5}


@pytest.mark.parametrize(("in_place", "expected"), [(True, "decode"), (False, "copy")])
def test_a_backlog_is_what_is_waited_for_however_much_is_read(
    clock: StageClock, hands: Hands, in_place: bool, expected: str
) -> None:
    with ExitStack() as work:
        for slot in range(3):
            work.enter_context(reading(clock, "one", slot, 4096))
        for slot in range(3, 5):
            work.enter_context(clock.upload("one", slot, 4096, 6000, in_place=in_place))
        work.enter_context(wanting_a_slot(clock))
        hands.time += 5
    assert waited(clock) == {expected: 5}


def test_a_ring_of_one_slot_waits_for_it(clock: StageClock, hands: Hands) -> None:
    with wanting_a_slot(clock), clock.upload("one", 0, 4096, 6000, in_place=False):
        hands.time += 5
    assert waited(clock) == {"slot": 5}


def test_it_stops(clock: StageClock, hands: Hands) -> None:
    hands.time += 1
    clock.stop()
    hands.time += 10
    assert waited(clock) == {"consumer": 1}


@pytest.mark.parametrize("stage", ["read", "upload"])
def test_what_fails_is_over(clock: StageClock, hands: Hands, stage: str) -> None:
    work = reading(clock, "one", 0, 1) if stage == "read" else clock.upload("one", 0, 1, 1, in_place=False)
    with pytest.raises(OSError, match="broken"), work:
        raise OSError("broken")
    hands.time += 2
    assert waited(clock) == {"consumer": 2}


def test_slices_only_for_a_timeline(hands: Hands) -> None:
    timeline = Timeline()
    clock = StageClock(timeline, now=hands)
    with reading(clock, "one", 7, 4096):
        hands.time += 2
    with clock.upload("one", 7, 4096, 6000, in_place=True) as upload:
        assert upload.trace is not None
        upload.trace(Stage.DECODE, 103.0, 104.0)
    end = clock.lease("one", 9000)
    hands.time += 4
    end()
    assert timeline.slices == (
        Slice(Stage.READ, 100.0, 102.0, "one", 7, 4096),
        Slice(Stage.DECODE, 103.0, 104.0, "one", 7, 6000),
        Slice(Stage.LEASE, 102.0, 106.0, "one", None, 9000),
    )
    with StageClock(now=hands).upload("one", 7, 4096, 6000, in_place=True) as upload:
        assert upload.trace is None
