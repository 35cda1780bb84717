"""Book-keeping of an arena's ranges, against a model that knows every byte's owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from splitzip_aio.arena.ranges import RANGE_ALIGN, Ranges

UNITS = 40


def test_first_fit_and_alignment() -> None:
    ranges = Ranges(10 * RANGE_ALIGN)
    assert ranges.take(1) == 0
    assert ranges.take(RANGE_ALIGN + 1) == RANGE_ALIGN
    assert ranges.take(0) == 3 * RANGE_ALIGN
    assert ranges.used == 4 * RANGE_ALIGN
    ranges.give_back(RANGE_ALIGN)
    assert ranges.take(2 * RANGE_ALIGN) == RANGE_ALIGN
    assert ranges.peak == 4 * RANGE_ALIGN


def test_capacity_is_rounded_down_to_whole_units() -> None:
    assert Ranges(3 * RANGE_ALIGN + 255).largest_free == 3 * RANGE_ALIGN
    assert Ranges(255).take(1) is None


def test_neighbours_are_joined_when_they_come_back() -> None:
    ranges = Ranges(3 * RANGE_ALIGN)
    offsets = [ranges.take(RANGE_ALIGN) for _ in range(3)]
    assert ranges.take(1) is None
    for offset in (offsets[0], offsets[2], offsets[1]):
        assert offset is not None
        ranges.give_back(offset)
    assert ranges.largest_free == 3 * RANGE_ALIGN
    assert ranges.take(3 * RANGE_ALIGN) == 0


@pytest.mark.parametrize("offset", [RANGE_ALIGN, 7])
def test_what_was_not_taken_cannot_come_back(offset: int) -> None:
    ranges = Ranges(4 * RANGE_ALIGN)
    ranges.take(2 * RANGE_ALIGN)
    with pytest.raises(KeyError):
        ranges.give_back(offset)


@given(st.lists(st.integers(0, 8 * RANGE_ALIGN), max_size=12), st.data())
def test_fits_foresees_take(sizes: list[int], data: st.DataObject) -> None:
    ranges = Ranges(UNITS * RANGE_ALIGN)
    taken = [offset for offset in map(ranges.take, sizes) if offset is not None]
    freeing = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
    wanted = data.draw(st.integers(0, (UNITS + 1) * RANGE_ALIGN))
    foreseen = ranges.fits(wanted, freeing)
    for offset in freeing:
        ranges.give_back(offset)
    assert foreseen == (ranges.take(wanted) is not None)


class RangesModel(RuleBasedStateMachine):
    """Random takes and returns; a set of units says what is really free."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(UNITS * RANGE_ALIGN)
        self.free = set(range(UNITS))
        self.owned: dict[int, set[int]] = {}

    def first_hole(self, units: int) -> int | None:
        return next((unit for unit in range(UNITS) if set(range(unit, unit + units)) <= self.free), None)

    @rule(target=taken, nbytes=st.integers(0, 12 * RANGE_ALIGN))
    def take(self, nbytes: int) -> int | None:
        units = max(1, -(-nbytes // RANGE_ALIGN))
        offset, hole = self.ranges.take(nbytes), self.first_hole(units)
        assert offset == (None if hole is None else hole * RANGE_ALIGN)
        if hole is not None:
            self.owned[hole * RANGE_ALIGN] = set(range(hole, hole + units))
            self.free -= self.owned[hole * RANGE_ALIGN]
        return offset

    @rule(offset=consumes(taken))
    def give_back(self, offset: int | None) -> None:
        if offset is not None:
            self.ranges.give_back(offset)
            self.free |= self.owned.pop(offset)

    @invariant()
    def agrees(self) -> None:
        assert self.ranges.used == (UNITS - len(self.free)) * RANGE_ALIGN
        assert len(self.ranges) == len(self.owned)
        runs = [n for n in range(UNITS + 1) if n == 0 or self.first_hole(n) is not None]
        assert self.ranges.largest_free == max(runs) * RANGE_ALIGN


TestRanges = RangesModel.TestCase
