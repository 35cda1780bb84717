"""Admission, joining and eviction, one decision at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from splitzip_aio.abc import PlannedRead
from splitzip_aio.arena.host import HostArena
from splitzip_aio.errors import ClosedError, CorruptDataError, LayerTooLargeError, ReadError
from splitzip_aio.forecast import Forecast
from splitzip_aio.loading import Load
from splitzip_aio.plan import ExecutionPlan, LayerPlan
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


class Order(ExecutionPlan):
    """Layers as the tests make them, in the order of the names given."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__((), packs=(), slot_bytes=4096, max_segments=1)
        self.layers = tuple(names)
        for name in names:
            self.add(name)

    def add(self, name: str, units: int = 1, reads: int = 1) -> None:
        read = PlannedRead(0, "a.szp", 0, 4096, ())
        self._planned[name] = LayerPlan(name, (), units * UNIT, (read,) * reads)


class House:
    """A residency over an arena of some units, with the loads it started."""

    def __init__(self, units: int, order: Sequence[str] = (), ahead_units: int = 100) -> None:
        self.arena = FencingArena(units * UNIT)
        self.started: list[Load] = []
        self.order = Order(order)
        self.residency = Residency(
            self.arena, self.order, Forecast(self.order.layers), self.started.append, ahead_bytes=ahead_units * UNIT
        )

    def hold(self, name: str, units: int = 1, reads: int = 1) -> Occupant:
        if name not in self.order.layers:
            self.order.add(name, units, reads)
        return self.residency.hold(name)

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


class TestReadAhead:
    """Layers ``a`` to ``h`` run in this order."""

    def on_course(self, units: int, ahead_units: int = 100) -> House:
        """A house in which ``a`` to ``c`` were asked for, one after another, and only ``c`` is held."""
        house = House(units, "abcdefgh", ahead_units)
        house.bring("a", "b")
        assert len(house.started) == 2
        house.finish(house.hold("c"))
        return house

    def names(self, house: House) -> str:
        """What is loading, in the order in which it began."""
        return "".join(load.plan.name for load in house.started if load.queued)

    def finish_all(self, house: House) -> None:
        while loading := [load for load in house.started if load.queued]:
            for load in loading:
                load.take()
                load.settle()

    def test_what_comes_next_is_loaded_once_demands_follow_the_order(self) -> None:
        house = self.on_course(units=8)
        assert self.names(house) == "defgh"
        assert not any(load.urgent for load in house.started[3:])
        assert house.residency.statistics().read_ahead == 5

    @pytest.mark.parametrize("demands", ["a", "ab", "aaaa", "abab", "aceg", "dcba"])
    def test_nothing_is_loaded_ahead_of_other_demands(self, demands: str) -> None:
        house = House(8, "abcdefgh")
        house.bring(*demands)
        assert self.names(house) == ""

    def test_the_next_pass_is_foreseen_from_its_first_layer_on(self) -> None:
        house = House(2, "abcdefgh")
        for name in "abcdefgha":
            house.bring(name)
        assert self.names(house).startswith("b")

    def test_no_more_is_under_way_than_the_ring_holds(self) -> None:
        house = self.on_course(units=8, ahead_units=2)
        assert self.names(house) == "de"
        house.finish(house.residency._occupants["d"])
        assert self.names(house) == "ef"
        self.finish_all(house)
        assert house.residency.statistics().resident == 8

    def test_room_is_made_of_what_is_needed_last(self) -> None:
        house = self.on_course(units=5)
        assert self.names(house) == "defg"  # d and e found room; f replaced b, g replaced a
        assert sorted(house.residency._occupants) == list("cdefg")
        assert house.residency.statistics().evictions == 2

    def test_what_is_needed_sooner_is_not_evicted(self) -> None:
        house = self.on_course(units=3)
        self.finish_all(house)
        house.hold("d")
        assert sorted(house.residency._occupants) == list("cde")
        assert self.names(house) == ""  # c and d are held; e is next
        house.residency.let_go(house.residency._occupants["c"])
        assert self.names(house) == "f"

    def test_a_demand_joins_and_hurries_what_is_on_its_way(self) -> None:
        house = self.on_course(units=8)
        d = house.hold("d")
        assert d.placed.urgent
        assert house.residency.statistics().joins == 1
        house.residency.let_go(d)
        assert d.state is OccupantState.GONE  # everyone who waited gave up

    def test_a_demand_evicts_what_was_loaded_ahead(self) -> None:
        house = self.on_course(units=4)
        self.finish_all(house)
        assert sorted(house.residency._occupants) == list("cdef")
        assert house.hold("x", units=2).state is OccupantState.LOADING

    def test_a_demand_gives_up_what_is_being_loaded_ahead_and_no_more_than_it_needs(self) -> None:
        house = self.on_course(units=5)
        ahead = house.started[3:]
        for load in ahead:
            load.take()
        extra = house.hold("x", units=2)
        assert extra.state is OccupantState.WAITING
        assert [load.wanted for load in ahead] == [True, True, False, False]
        ahead[2].settle()
        assert house.residency.statistics().draining == 1
        house.residency.let_go(house.hold("d"))  # asking for anything else changes nothing
        assert [load.wanted for load in ahead[:2]] == [False, True]  # but whoever asked for d gave up
        ahead[3].settle()
        assert extra.state is OccupantState.LOADING

    def test_a_demand_that_leases_keep_out_gives_nothing_up(self) -> None:
        house = self.on_course(units=4)
        assert house.hold("x", units=4).state is OccupantState.WAITING
        assert all(load.wanted for load in house.started)

    def test_what_failed_is_left_alone_until_someone_asks(self) -> None:
        house = self.on_course(units=8)
        house.finish(house.residency._occupants["d"], CorruptDataError("bad"))
        assert house.residency.statistics().corrupt == 1
        house.finish(house.residency._occupants["e"])
        assert self.names(house) == "fgh"
        house.residency.let_go(house.residency._occupants["c"])
        assert self.names(house) == "fgh"
        assert house.hold("d").state is OccupantState.LOADING

    def test_closing_gives_it_up(self) -> None:
        house = self.on_course(units=8)
        house.residency.close(ClosedError("closed"))
        assert self.names(house) == ""
        assert house.arena.statistics().used_bytes == 0


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_everyone_is_served_whatever_the_order(seed: int, ordered: bool) -> None:
    """Random demands, completions, failures, cancellations: nothing is lost, nobody waits for ever."""
    chance = random.Random(seed)
    house = House(8, [str(name) for name in range(12)] if ordered else (), ahead_units=4)
    for name in range(12):
        house.order.add(str(name), 1 + name % 5, name % 4)
    held: list[Occupant] = []
    name = 0
    for _ in range(400):
        action = chance.random()
        if action < 0.4:
            name = (name + chance.choice([0, 1, 1, 1, 1, 5])) % 12
            held.append(house.hold(str(name), units=1 + name % 5, reads=name % 4))
        elif action < 0.7 and house.started:
            load = chance.choice(house.started)
            if load.queued:
                load.take()
                error = CorruptDataError("bad") if chance.random() < 0.1 else None
                load.settle(error=error)
        elif held:
            house.residency.let_go(held.pop(chance.randrange(len(held))), use=chance.choice([None, Fence()]))
    while held or any(load.queued for load in house.started):
        for load in house.started:
            while load.queued:
                load.take()
                load.settle()
        if held:
            house.residency.let_go(held.pop(0))
    statistics = house.residency.statistics()
    assert statistics.waiting == statistics.loading == statistics.draining == statistics.leased == 0
    assert house.arena.statistics().ranges == statistics.resident
    assert house.hold("whole", units=8).state is OccupantState.LOADING
