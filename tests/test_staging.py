"""The staging ring: states, waiting in order, cancellation, and how a ring is divided."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.errors import BusyError, ClosedError, InvalidArgumentError, LayerTooLargeError
from splitzip_aio.staging import PAGE_BYTES, Slot, SlotState, StagingRing, split_ring

STEPS = {
    SlotState.READY: StagingRing.mark_ready,
    SlotState.COPYING: StagingRing.mark_copying,
    SlotState.FREE: StagingRing.release,
}
PATHS = {
    SlotState.FREE: (),
    SlotState.READING: (SlotState.READING,),
    SlotState.READY: (SlotState.READING, SlotState.READY),
    SlotState.COPYING: (SlotState.READING, SlotState.READY, SlotState.COPYING),
}
ALLOWED = {
    (SlotState.READING, SlotState.READY),
    (SlotState.READING, SlotState.FREE),
    (SlotState.READY, SlotState.COPYING),
    (SlotState.READY, SlotState.FREE),
    (SlotState.COPYING, SlotState.FREE),
}


@pytest.fixture
def ring() -> Iterator[StagingRing]:
    with StagingRing(3, PAGE_BYTES) as ring:
        yield ring
        ring.release_all()


def taken(ring: StagingRing) -> Slot:
    slot = ring.acquire()
    assert slot is not None
    return slot


def slot_in(ring: StagingRing, state: SlotState) -> Slot:
    slot = ring.slots[0]
    for step in PATHS[state]:
        if step is SlotState.READING:
            slot = taken(ring)
        else:
            STEPS[step](ring, slot)
    assert slot.state is state
    return slot


@pytest.mark.parametrize("start", SlotState)
@pytest.mark.parametrize("end", STEPS)
def test_only_drawn_transitions_are_possible(ring: StagingRing, start: SlotState, end: SlotState) -> None:
    slot = slot_in(ring, start)
    if (start, end) in ALLOWED:
        STEPS[end](ring, slot)
        assert slot.state is end
    else:
        with pytest.raises(RuntimeError, match=rf"Slot 0 {start.value}.*cannot become {end.value}"):
            STEPS[end](ring, slot)
        assert slot.state is start


def test_statistics_count_states(ring: StagingRing) -> None:
    ring.acquire()
    ring.mark_ready(taken(ring))
    statistics = ring.statistics()
    assert (statistics.slots, statistics.free, statistics.reading, statistics.ready, statistics.copying) == (
        3,
        1,
        1,
        1,
        0,
    )
    assert statistics.acquired == 2
    assert statistics.slot_bytes == PAGE_BYTES
    assert not statistics.pinned
    assert statistics.fallback is None


def test_there_is_none_when_all_are_taken(ring: StagingRing) -> None:
    slots = [taken(ring) for _ in range(3)]
    assert sorted(slot.index for slot in slots) == [0, 1, 2]
    assert ring.acquire() is None
    assert ring.statistics().acquired == 3
    ring.release(slots[1])
    assert ring.acquire() is slots[1]


def test_slots_are_pages_apart_and_do_not_overlap() -> None:
    with StagingRing(4, 2 * PAGE_BYTES, table_bytes=100) as ring:
        assert ring.payload_bytes == 2 * PAGE_BYTES
        assert ring.statistics().slot_bytes == 3 * PAGE_BYTES
        for slot in ring.slots:
            slot.memory[:] = bytes([slot.index + 1]) * len(slot.memory)
            assert len(slot.payload) == 2 * PAGE_BYTES
        for slot in ring.slots:
            assert set(slot.memory) == {slot.index + 1}
            slot.payload[0] = 0
            assert slot.memory[0] == 0


@pytest.mark.parametrize(("slots", "payload", "table"), [(0, 4096, 0), (1, 0, 0), (1, 4097, 0), (1, 4096, -1)])
def test_impossible_sizes_are_refused(slots: int, payload: int, table: int) -> None:
    with pytest.raises(InvalidArgumentError):
        StagingRing(slots, payload, table_bytes=table)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="ring_bytes: the kernel refused"):
        StagingRing(1 << 20, 1 << 30)


def test_a_closed_ring_refuses() -> None:
    ring = StagingRing(1, PAGE_BYTES)
    slot = taken(ring)
    with pytest.raises(BusyError, match="Slot 0 reading"):
        ring.close()
    ring.release(slot)
    ring.close()
    ring.close()
    with pytest.raises(ClosedError):
        ring.acquire()
    with pytest.raises(ValueError, match="released"):
        slot.memory[0]


def test_memory_outlives_the_ring_while_someone_looks_at_it() -> None:
    ring = StagingRing(1, PAGE_BYTES)
    view = ring.slots[0].memory[:4]
    view[:] = b"seen"
    ring.close()
    assert bytes(view) == b"seen"


def test_pinning_without_cuda_is_a_recorded_fallback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("splitzip_aio.staging.page_lock", lambda memory: "no such thing")
    with caplog.at_level(logging.WARNING), StagingRing(1, PAGE_BYTES, pinned=True) as ring:
        assert ring.statistics().fallback == "no such thing"
        assert not ring.statistics().pinned
    assert "not pinned, so copies are slower: no such thing" in caplog.text


class TestSplit:
    def test_a_large_ring_has_four_slots_or_more(self) -> None:
        for ring_mib, expected in {64: (4, 16), 96: (4, 24), 128: (4, 32), 1024: (16, 64), 50: (3, 16)}.items():
            slots, payload = split_ring(ring_mib << 20, largest_read_bytes=3 << 20, table_bytes=lambda _: 0)
            assert (slots, payload >> 20) == expected

    def test_the_table_is_taken_from_the_slot(self) -> None:
        slots, payload = split_ring(48 << 20, largest_read_bytes=3 << 20, table_bytes=lambda size: size // 100)
        assert slots == 3
        assert payload == (16 << 20) - 167936

    def test_a_small_ring_has_three_smaller_slots(self) -> None:
        assert split_ring(30 << 20, largest_read_bytes=1 << 20, table_bytes=lambda _: 0) == (3, 10 << 20)

    @pytest.mark.parametrize(("largest", "slots"), [(5 << 20, 2), (6 << 20, 1), (10 << 20, 1)])
    def test_a_ring_of_few_segments_has_as_many_slots_as_fit(self, largest: int, slots: int) -> None:
        assert split_ring(10 << 20, largest_read_bytes=largest, table_bytes=lambda _: 0) == (slots, largest)

    def test_a_ring_smaller_than_a_segment_is_refused_with_both_sizes(self) -> None:
        with pytest.raises(LayerTooLargeError, match=r"slot of 16384 bytes.*ring has 16383"):
            split_ring(16383, largest_read_bytes=3 * 4096, table_bytes=lambda _: 1)

    def test_a_cache_without_segments_needs_a_page(self) -> None:
        assert split_ring(4096, largest_read_bytes=0, table_bytes=lambda _: 0) == (1, 4096)

    @given(ring=st.integers(1, 1 << 32), largest=st.integers(0, 1 << 26), table=st.integers(0, 100))
    def test_slots_fit_the_ring_and_hold_a_segment(self, ring: int, largest: int, table: int) -> None:
        def table_bytes(payload: int) -> int:
            return payload * table // 1000

        try:
            slots, payload = split_ring(ring, largest_read_bytes=largest, table_bytes=table_bytes)
        except LayerTooLargeError:
            assert ring < (largest + 4096) * 2 + 8192
            return
        assert slots >= 1
        assert payload >= largest
        assert payload % PAGE_BYTES == 0
        slot = payload + -(-table_bytes(payload) // PAGE_BYTES) * PAGE_BYTES
        assert slots * slot <= ring
