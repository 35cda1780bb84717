"""Admission, joining and eviction, one decision at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from splitzip_aio.arena.host import HostArena
from splitzip_aio.errors import ClosedError, CorruptDataError, LayerTooLargeError, ReadError
from splitzip_aio.loading import Load
from splitzip_aio.plan import LayerPlan, PlannedRead
from splitzip_aio.transport.residency import Occupant, OccupantState, Residency

UNIT = 256


class Fence:
    """The end of someone's work on a stream."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = reached
        self.waited = 0

    def query(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self.waited += 1


class FencingArena(HostArena):
    """Waits for fences as a GPU's arena does, and hands them out."""

    def _wait_before_reuse(self, fences: Iterator[Fence]) -> None:  # type: ignore[override]
        for fence in fences:
            fence.wait()


class House:
    """A residency over an arena of some units, with the loads it started."""

    def __init__(self, units: int) -> None:
        self.arena = FencingArena(units * UNIT)
        self.started: list[Load] = []
        self.residency = Residency(self.arena, self.started.append)

    def hold(self, name: str, units: int = 1, reads: int = 1) -> Occupant:
        read = PlannedRead(0, 0, 4096, ())
        return self.residency.hold(LayerPlan(name, (), units * UNIT, (read,) * reads))

    def finish(self, occupant: Occupant, error: ReadError | CorruptDataError | None = None) -> None:
        """All reads of it are done, the last of them with ``error``."""
        while occupant.placed.queued:
            occupant.placed.take()
            occupant.placed.settle(error=None if occupant.placed.queued else error)

    def bring(self, *names: str, units: int = 1) -> list[Occupant]:
        """Layers loaded, used and let go, one after another."""
        occupants = []
        for name in names:
            occupant = self.hold(name, units)
            if occupant.state is OccupantState.LOADING:
                self.finish(occupant)
            self.residency.let_go(occupant)
            occupants.append(occupant)
        return occupants


@pytest.fixture
def house() -> House:
    return House(4)


def test_a_layer_loads_and_stays(house: House) -> None:
    occupant = house.hold("a", reads=2)
    assert occupant.state is OccupantState.LOADING
    assert not occupant.settled.is_set()
    house.finish(occupant)
    assert occupant.state is OccupantState.RESIDENT
    assert occupant.settled.is_set()
    house.residency.let_go(occupant)
    assert house.hold("a") is occupant
    statistics = house.residency.statistics()
    assert (statistics.demands, statistics.hits, statistics.joins, statistics.loaded) == (2, 1, 0, 1)
    assert statistics.leased == 1


def test_a_layer_on_its_way_is_joined(house: House) -> None:
    first, second = house.hold("a"), house.hold("a")
    assert first is second
    assert len(house.started) == 1
    assert house.residency.statistics().joins == 1
    house.residency.let_go(first)
    house.finish(second)
    assert second.state is OccupantState.RESIDENT


def test_a_layer_without_reads_is_there_at_once(house: House) -> None:
    assert house.hold("empty", units=0, reads=0).state is OccupantState.RESIDENT


def test_the_least_recently_used_goes_first(house: House) -> None:
    a, b, c, d = house.bring("a", "b", "c", "d")
    house.bring("a", "c")
    house.bring("e", "f")
    assert [occupant.state for occupant in (a, b, c, d)] == [
        OccupantState.RESIDENT,
        OccupantState.GONE,
        OccupantState.RESIDENT,
        OccupantState.GONE,
    ]
    assert house.residency.statistics().evictions == 2


def test_no_more_goes_than_has_to(house: House) -> None:
    a, b, c, d = house.bring("a", "b", "c", "d")
    house.bring("large", units=2)
    assert [occupant.state.value for occupant in (a, b, c, d)] == ["gone", "gone", "resident", "resident"]


def test_what_is_held_stays_and_the_rest_goes_only_if_that_helps(house: House) -> None:
    a, b, c, d = house.bring("a", "b", "c", "d")
    held = house.hold("b")
    large = house.hold("large", units=3)
    assert large.state is OccupantState.WAITING
    assert held is b
    assert [occupant.state.value for occupant in (a, c, d)] == ["resident"] * 3  # two pieces of one, and two: no room
    house.residency.let_go(held)
    assert large.state is OccupantState.LOADING
    assert b.state is OccupantState.GONE


def test_waiting_is_in_order_of_arrival(house: House) -> None:
    holders = [house.hold(name) for name in "abcd"]
    for holder in holders:
        house.finish(holder)
    large, small = house.hold("large", units=2), house.hold("small")
    house.residency.let_go(holders[0])
    assert (large.state, small.state) == (OccupantState.WAITING, OccupantState.WAITING)
    assert house.residency.statistics().waiting == 2
    assert house.hold("b") is holders[1]  # who needs no room waits for nobody
    house.residency.let_go(holders[1])
    house.residency.let_go(holders[1])
    assert large.state is OccupantState.LOADING
    house.residency.let_go(holders[2])
    assert small.state is OccupantState.LOADING


def test_a_waiter_that_gives_up_lets_the_next_in(house: House) -> None:
    holders = [house.hold(name) for name in "abc"]
    for holder in holders:
        house.finish(holder)
    large, small = house.hold("large", units=2), house.hold("small")
    house.residency.let_go(large)
    assert large.state is OccupantState.GONE
    assert small.state is OccupantState.LOADING


def test_an_abandoned_load_keeps_its_range_until_its_reads_are_done(house: House) -> None:
    occupant = house.hold("a", units=3, reads=3)
    load = house.started[0]
    load.take()
    house.residency.let_go(occupant)
    assert occupant.state is OccupantState.GONE
    assert not load.queued
    assert not load.wanted
    assert house.residency.statistics().draining == 1
    again = house.hold("a", units=3)
    assert again is not occupant
    assert again.state is OccupantState.WAITING
    load.settle()
    assert again.state is OccupantState.LOADING
    assert house.residency.statistics().draining == 0
    assert house.residency.statistics().abandoned == 1


def test_an_abandoned_load_without_reads_in_flight_is_gone_at_once(house: House) -> None:
    house.residency.let_go(house.hold("a", units=4, reads=2))
    assert house.arena.statistics().used_bytes == 0
    assert house.hold("b", units=4).state is OccupantState.LOADING


@pytest.mark.parametrize("error", [CorruptDataError("bad"), ReadError(5, "bad")])
def test_a_failed_load_is_forgotten_and_its_range_free(house: House, error: ReadError | CorruptDataError) -> None:
    occupant = house.hold("a", units=4, reads=2)
    waiting = house.hold("b")
    house.finish(occupant, error)
    assert occupant.state is OccupantState.GONE
    assert occupant.error is error
    assert occupant.settled.is_set()
    assert waiting.state is OccupantState.LOADING
    statistics = house.residency.statistics()
    assert (statistics.failed, statistics.corrupt) == (1, isinstance(error, CorruptDataError))
    house.residency.let_go(occupant)
    assert house.hold("a") is not occupant


def test_the_first_error_stops_reading_and_is_told_once_all_is_still(house: House) -> None:
    occupant = house.hold("a", reads=5)
    load = occupant.placed
    load.take()
    load.take()
    load.settle(error=CorruptDataError("first"))
    assert not load.queued
    assert not occupant.settled.is_set()
    load.settle(error=CorruptDataError("second"))
    assert str(occupant.error) == "first"
    assert occupant.settled.is_set()


def test_a_layer_larger_than_the_arena_is_refused_at_once(house: House) -> None:
    with pytest.raises(LayerTooLargeError, match="'huge' needs 1280 bytes, and the arena has 1024"):
        house.hold("huge", units=5)
    assert house.residency.statistics().demands == 0


def test_eviction_waits_for_every_use_that_is_not_over(house: House) -> None:
    a = house.hold("a", units=4)
    house.finish(a)
    over, pending, last = Fence(reached=True), Fence(), Fence()
    for use in (over, pending, last):
        house.hold("a")
        house.residency.let_go(a, use=use)
    house.residency.let_go(a)
    assert pending.waited == last.waited == 0
    house.hold("b", units=4)
    assert (over.waited, pending.waited, last.waited) == (0, 1, 1)


def test_closing_tells_everyone_and_frees_what_is_still(house: House) -> None:
    resident, loading, idle = house.hold("a"), house.hold("b", reads=2), house.hold("c", reads=2)
    house.finish(resident)
    idle_load = idle.placed
    loading.placed.take()
    waiting = house.hold("large", units=3)
    house.residency.close(ClosedError("closed"))
    for occupant in (loading, waiting, idle):
        assert isinstance(occupant.error, ClosedError)
        assert occupant.settled.is_set()
    assert resident.state is OccupantState.GONE
    assert not idle_load.queued
    loading.placed.settle()
    for occupant in (resident, loading, waiting, idle):
        house.residency.let_go(occupant)
    statistics = house.residency.statistics()
    assert statistics.draining == statistics.loading == statistics.waiting == statistics.resident == 0
    assert house.arena.statistics().used_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_everyone_is_served_whatever_the_order(seed: int) -> None:
    """Random demands, completions, failures, cancellations: nothing is lost, nobody waits for ever."""
    chance = random.Random(seed)
    house = House(8)
    held: list[Occupant] = []
    for _ in range(400):
        action = chance.random()
        if action < 0.4:
            name = chance.randrange(12)
            held.append(house.hold(str(name), units=1 + name % 5, reads=name % 4))
        elif action < 0.7 and house.started:
            load = chance.choice(house.started)
            if load.queued:
                load.take()
                error = CorruptDataError("bad") if chance.random() < 0.1 else None
                load.settle(error=error)
        elif held:
            house.residency.let_go(held.pop(chance.randrange(len(held))), use=chance.choice([None, Fence()]))
    while held:
        for load in house.started:
            while load.queued:
                load.take()
                load.settle()
        house.residency.let_go(held.pop(0))
    statistics = house.residency.statistics()
    assert statistics.waiting == statistics.loading == statistics.draining == statistics.leased == 0
    assert house.arena.statistics().ranges == statistics.resident
    assert house.hold("whole", units=8).state is OccupantState.LOADING
