"""The host cache's memory: found, held, evicted and given back, exactly."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.host_cache import HostCache, HostHold
from splitzip_aio.host_cache import cache as module
from splitzip_aio.host_cache.headroom import Headroom

PAGE = mmap.PAGESIZE
PLENTY = Headroom(1 << 40, 1 << 40)


def contents(key: int) -> bytes:
    return np.random.default_rng(key).bytes(PAGE)


def put(cache: HostCache, key: int, *, table_bytes: int = 0) -> HostHold | None:
    """Ask for an extent of a page, and put it in, if it is missing and wanted."""
    hold = cache.find(key, PAGE)
    if hold is None:
        hold = cache.reserve(key, PAGE, table_bytes=table_bytes)
        if hold is not None:
            assert hold.fill(memoryview(contents(key)))
    return hold


def keep(cache: HostCache, *keys: int) -> None:
    for key in keys:
        hold = put(cache, key)
        if hold is not None:
            assert bytes(hold.memory[:PAGE]) == contents(key)
            hold.release()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCache]:
    monkeypatch.setattr(module, "headroom", lambda: PLENTY)
    with HostCache(4 * PAGE, pinned=False) as cache:
        yield cache


def test_what_was_put_in_is_found_until_it_has_to_go(cache: HostCache) -> None:
    keep(cache, 1, 2, 3, 4, 5)
    keep(cache, 1, 2, 3, 4, 5)
    statistics = cache.statistics()
    assert (statistics.hits, statistics.misses) == (4, 6)
    assert (statistics.bytes, statistics.entries, statistics.held) == (4 * PAGE, 4, 0)
    assert (statistics.admissions, statistics.evictions) == (4, 0)


def test_extents_are_the_bytes_without_the_room_behind_them(cache: HostCache) -> None:
    keep(cache, 1, 2)
    unfilled = cache.reserve(3, PAGE, table_bytes=0)
    assert unfilled is not None
    assert [bytes(extent) for extent in cache.extents()] == [contents(1), contents(2)]
    unfilled.release()


def test_what_is_held_stays(cache: HostCache) -> None:
    keep(cache, 1, 2, 3, 4)
    held = cache.find(1, PAGE)
    assert held is not None
    keep(cache, *[*range(10, 14)] * 4)
    statistics = cache.statistics()
    assert statistics.evictions == 3
    assert statistics.bytes <= 4 * PAGE
    assert bytes(held.memory[:PAGE]) == contents(1)
    held.release()
    held.release()
    assert cache.statistics().held == 0


def test_what_is_being_filled_is_not_found_and_not_begun_again(cache: HostCache) -> None:
    cache.find(1, PAGE)
    hold = cache.reserve(1, PAGE, table_bytes=0)
    assert hold is not None
    assert cache.find(1, PAGE) is None
    assert cache.reserve(1, PAGE, table_bytes=0) is None
    hold.release()  # it came to nothing
    assert cache.statistics().entries == cache.statistics().held == 0
    keep(cache, 1)
    assert cache.statistics().entries == 1


def test_the_room_behind_belongs_to_one_at_a_time(cache: HostCache) -> None:
    first = put(cache, 1, table_bytes=100)
    assert first is not None
    assert len(first.memory) == 2 * PAGE
    second = cache.find(1, PAGE)
    assert second is not None
    assert not second.claim(100)
    first.release()
    assert not second.claim(PAGE + 1)
    assert second.claim(100)
    third = cache.find(1, PAGE)
    assert third is not None
    assert not third.claim(0)
    second.release()
    assert third.claim(0)
    third.release()


def test_what_is_wrong_is_dropped_by_who_holds_it_last(cache: HostCache) -> None:
    first, second = put(cache, 1), cache.find(1, PAGE)
    assert first is not None
    assert second is not None
    first.release()
    first.spoil()
    assert cache.find(1, PAGE) is None
    assert bytes(second.memory[:PAGE]) == contents(1)
    assert cache.reserve(1, PAGE, table_bytes=0) is None
    second.release()
    assert not cache.swept
    cache.sweep()
    assert cache.statistics().bytes == 0
    keep(cache, 1)
    last = cache.find(1, PAGE)
    assert last is not None
    last.release()
    last.spoil()
    last.spoil()
    assert cache.statistics().entries == 0


def test_it_shrinks_when_memory_is_short_and_grows_when_there_is_plenty(
    cache: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0)
    total = 20 * 100 * PAGE
    keep(cache, 1, 2, 3)
    monkeypatch.setattr(module, "headroom", lambda: Headroom(98 * PAGE, total))
    held = cache.find(3, PAGE)  # the least recently used are 1 and 2
    statistics = cache.statistics()
    assert held is not None
    assert (statistics.entries, statistics.evictions, statistics.shrunk) == (1, 2, 2)
    assert statistics.bytes == 3 * PAGE
    cache.sweep()
    assert cache.statistics().bytes == PAGE
    for available in (100, 150, 200):
        monkeypatch.setattr(module, "headroom", lambda available=available: Headroom(available * PAGE, total))
        keep(cache, 7)
        assert cache.statistics().entries == 1
    monkeypatch.setattr(module, "headroom", lambda: Headroom(201 * PAGE, total))
    keep(cache, 7)
    assert cache.statistics().entries == 2
    held.release()


def test_no_memory_is_no_failure(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidArgumentError("no")

    monkeypatch.setattr(module, "map_anonymous", refuse)
    cache.find(1, PAGE)
    hold = cache.reserve(1, PAGE, table_bytes=0)
    assert hold is not None
    assert not hold.fill(memoryview(contents(1)))
    hold.release()
    assert cache.statistics().bytes == cache.statistics().entries == 0


@pytest.mark.parametrize("refusal", [None, "cudaHostRegister failed"])
def test_memory_is_locked_and_unlocked(refusal: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(module, "page_lock", lambda memory: (locked.append(len(memory)), refusal)[1])
    monkeypatch.setattr(module, "page_unlock", lambda memory: locked.remove(len(memory)))
    with HostCache(2 * PAGE, pinned=True) as cache:
        keep(cache, 1, 2)
        statistics = cache.statistics()
        assert (statistics.pinned, statistics.fallback) == (refusal is None, refusal)
        assert locked == ([PAGE, PAGE] if refusal is None else [PAGE])  # refused once, not tried again
    assert locked == ([] if refusal is None else [PAGE])


def test_closing_gives_back_all_but_what_is_held(cache: HostCache) -> None:
    keep(cache, 1, 2)
    held = cache.find(1, PAGE)
    assert held is not None
    cache.close()
    cache.close()
    assert cache.closed
    assert cache.statistics().bytes == PAGE
    assert cache.reserve(5, PAGE, table_bytes=0) is None
    assert bytes(held.memory[:PAGE]) == contents(1)
    held.release()
    assert cache.statistics().bytes == 0


def test_one_that_is_never_closed_says_so() -> None:
    caches = [HostCache(PAGE, pinned=False)]
    with pytest.warns(ResourceWarning, match="never closed"):
        caches.clear()


@pytest.mark.parametrize("size", [0, -1, "x"])
def test_impossible_sizes(size: int | str) -> None:
    with pytest.raises(InvalidArgumentError, match="host_cache_bytes"):
        HostCache(size)


class AnyUse(RuleBasedStateMachine):
    """Extents asked for, held, spoilt and let go in any order, with memory coming and going."""

    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "_LOOK_EVERY_S", 0)
        self.patch.setattr(module, "headroom", lambda: PLENTY)
        self.cache = HostCache(self.CAPACITY * PAGE, pinned=False)
        self.holds: list[tuple[int, HostHold]] = []
        self.asked = 0

    @rule(key=st.integers(0, 9), table_pages=st.integers(0, 1))
    def ask(self, key: int, table_pages: int) -> None:
        self.asked += 1
        hold = put(self.cache, key, table_bytes=table_pages * PAGE)
        if hold is not None:
            self.holds.append((key, hold))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), spoil=st.booleans())
    def let_go(self, data: st.DataObject, spoil: bool) -> None:
        key, hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        assert bytes(hold.memory[:PAGE]) == contents(key)
        if spoil:
            hold.spoil()
        hold.release()

    @rule(available=st.sampled_from([0, 50 * PAGE, 1 << 40]))
    def press(self, available: int) -> None:
        self.patch.setattr(module, "headroom", lambda: Headroom(available, 20 * 52 * PAGE))

    @rule()
    def sweep(self) -> None:
        self.cache.sweep()

    @invariant()
    def counts_are_exact(self) -> None:
        statistics = self.cache.statistics()
        entries = self.cache._entries.values()
        mapped = [*entries, *self.cache._doomed]
        assert statistics.bytes == sum(len(entry.memory) for entry in mapped) <= statistics.capacity_bytes
        assert statistics.hits + statistics.misses == self.asked
        assert sum(entry.holds for entry in entries) == len(self.holds)
        assert statistics.admissions >= statistics.entries + statistics.evictions
        assert self.cache._replacement.used_bytes == sum(entry.size for entry in entries)

    @invariant()
    def what_is_held_is_untouched(self) -> None:
        for key, hold in self.holds:
            assert hold.memory[:PAGE] == contents(key)

    def teardown(self) -> None:
        self.cache.close()
        for _, hold in self.holds:
            hold.release()
        assert self.cache.statistics().bytes == 0
        self.patch.undo()


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
