"""What is kept of what is asked for: loops, loops that change, and the book-keeping under any sequence."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitzip_aio.host_cache.replacement import Replacement

UNIT = 16


class Keeper:
    """Asks for keys of a unit each, and keeps what the policy wants to keep."""

    def __init__(self, units: int) -> None:
        self.policy = Replacement(units * UNIT)
        self.changes = 0

    def hits(self, keys: Iterable[object]) -> float:
        """The share of keys that were found."""
        found = [self.ask(key) for key in keys]
        return sum(found) / len(found)

    def ask(self, key: object) -> bool:
        if self.policy.ask(key, UNIT):
            return True
        victims = self.policy.admit(key, UNIT, idle=lambda _: True)
        if victims is not None:
            self.policy.settle(key, UNIT)
            self.changes += 1
        return False


@pytest.mark.parametrize(("units", "loop"), [(99, 100), (50, 100), (1, 100), (30, 31), (7, 1000)])
def test_a_loop_finds_what_there_is_room_for(units: int, loop: int) -> None:
    """C/N, where the least recently used as victim would find nothing at all."""
    keeper = Keeper(units)
    assert keeper.hits(range(loop)) == 0
    assert keeper.hits(list(range(loop)) * 20) == units / loop
    assert keeper.changes == units  # and nothing moves


def test_a_loop_that_fits_is_found_whole() -> None:
    keeper = Keeper(100)
    keeper.hits(range(100))
    assert keeper.hits(list(range(100)) * 3) == 1


@pytest.mark.parametrize("loop", [60, 100, 300])
def test_another_loop_takes_over(loop: int) -> None:
    keeper = Keeper(50)
    keeper.hits(list(range(100)) * 10)
    moved = [("moved", place) for place in range(loop)]
    keeper.hits(moved * 3)
    assert keeper.hits(moved * 5) == 50 / loop


def test_part_of_a_loop_takes_over() -> None:
    """The first half of the layers is asked for no more: what was kept of it makes room."""
    keeper = Keeper(50)
    keeper.hits(list(range(100)) * 10)
    keeper.hits(list(range(50, 100)) * 3)
    assert keeper.hits(list(range(50, 100)) * 3) == 1


def test_what_comes_by_once_moves_nothing() -> None:
    keeper = Keeper(50)
    keeper.hits(list(range(50)) * 3)
    before = keeper.changes
    keeper.hits(("once", place) for place in range(500))
    assert keeper.changes == before
    assert keeper.hits(range(50)) == 1


def test_what_is_asked_for_more_often_wins() -> None:
    """An encoder's 20 layers before each 30 rounds of a loop over 60, with room for 50."""
    keeper = Keeper(50)
    for _ in range(3):
        keeper.hits(("encoder", place) for place in range(20))
        keeper.hits(list(range(60)) * 30)
    assert keeper.hits(range(60)) == 50 / 60


def test_shuffled_rounds_are_found_as_often_as_ordered_ones() -> None:
    chance = random.Random(3)
    keeper = Keeper(50)
    rounds = [key for _ in range(60) for key in chance.sample(range(100), 100)]
    keeper.hits(rounds[:1000])
    assert keeper.hits(rounds[1000:]) > 0.45


def test_reads_that_overtake_each_other_move_nothing() -> None:
    chance = random.Random(3)
    keeper = Keeper(90)
    keeper.hits(range(100))
    before = keeper.changes
    for _ in range(20):
        keeper.hits(sorted(range(100), key=lambda place: place + chance.uniform(0, 16)))
    assert keeper.changes == before


def test_a_limit_below_the_capacity_holds() -> None:
    policy = Replacement(10 * UNIT)
    for key in range(10):
        policy.ask(key, UNIT)
        policy.admit(key, UNIT, idle=lambda _: True, limit_bytes=4 * UNIT)
    assert len(policy) == 4


def test_what_is_too_large_is_not_kept_and_moves_nothing() -> None:
    keeper = Keeper(3)
    keeper.hits([1, 2, 3])
    for _ in range(9):
        keeper.policy.ask("large", 4 * UNIT)
        assert keeper.policy.admit("large", 4 * UNIT, idle=lambda _: True) is None
    assert len(keeper.policy) == 3


class AnySequence(RuleBasedStateMachine):
    """Keys of any size, asked for in any order, some of them in use."""

    CAPACITY = 100

    def __init__(self) -> None:
        super().__init__()
        self.policy = Replacement(self.CAPACITY)
        self.kept: dict[int, int] = {}
        self.unsettled: dict[int, tuple[int, int]] = {}  # wanted, and taken until settled
        self.busy: set[int] = set()

    @rule(key=st.integers(0, 12), nbytes=st.integers(1, 110))
    def ask(self, key: int, nbytes: int) -> None:
        there = self.policy.ask(key, nbytes)
        assert there == (key in self.kept or key in self.unsettled)
        if there:
            return
        victims = self.policy.admit(key, nbytes, idle=lambda victim: victim not in self.busy)
        if victims is None:
            return
        assert not self.busy.intersection(victims)
        freed = sum(
            self.kept.pop(victim) if victim in self.kept else self.unsettled.pop(victim)[1] for victim in victims
        )
        self.unsettled[key] = (nbytes, max(nbytes, freed))

    @precondition(lambda self: self.unsettled)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.unsettled)))
        self.kept[key], _ = self.unsettled.pop(key)
        self.policy.settle(key, self.kept[key])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)))
        assert self.policy.remove(key) == self.kept.pop(key)

    @rule(key=st.integers(0, 12))
    def use(self, key: int) -> None:
        self.busy ^= {key}

    @invariant()
    def books_balance(self) -> None:
        taken = sum(self.kept.values()) + sum(taken for _, taken in self.unsettled.values())
        assert self.policy.used_bytes == taken <= self.CAPACITY
        assert len(self.policy) == len(self.kept) + len(self.unsettled)
        assert set(self.policy.coldest()) == self.kept.keys() | self.unsettled.keys()


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
