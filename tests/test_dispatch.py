"""The dispatcher: what is uploaded where, and which slot goes back when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest

from splitzip_aio.dispatch import Dispatcher
from splitzip_aio.errors import CorruptDataError
from splitzip_aio.loading import FilledSlot, Load
from splitzip_aio.staging import PAGE_BYTES, SlotState, StagingRing
from tests.pipeline import FakeArena, Loads

pytestmark = pytest.mark.anyio


class Rig:
    """A dispatcher, fed by hand."""

    def __init__(self, ring: StagingRing) -> None:
        self.ring = ring
        self.arena = FakeArena()
        self.loads = Loads()
        self.freed: list[int] = []
        self.dispatcher = Dispatcher(self.arena, ring, freed=lambda: self.freed.append(ring.statistics().free))

    def fill(self, load: Load) -> FilledSlot:
        slot = self.ring.acquire()
        assert slot is not None
        self.ring.mark_ready(slot)
        return FilledSlot(slot, load.take(), load)

    def feed(self, load: Load) -> FilledSlot:
        filled = self.fill(load)
        self.dispatcher.take(filled)
        return filled


@pytest.fixture
def ring() -> Iterator[StagingRing]:
    with StagingRing(3, PAGE_BYTES) as ring:
        yield ring


@asynccontextmanager
async def running(ring: StagingRing) -> AsyncIterator[Rig]:
    rig = Rig(ring)
    async with anyio.create_task_group() as group:
        group.start_soon(rig.dispatcher.run)
        yield rig
        rig.dispatcher.close()


async def test_reads_go_to_the_layers_range(ring: StagingRing) -> None:
    async with running(ring) as rig:
        rig.arena.gate.let_all()
        load = rig.loads.make("one", [0, 8192], base=1024)
        rig.feed(load)
        rig.feed(load)
    assert rig.arena.uploads == [(read, 1024) for read in load.plan.reads]
    assert rig.loads.settled == ["one"]
    assert (rig.dispatcher.wire_bytes, rig.dispatcher.decoded_bytes) == (640, 400)
    assert ring.statistics().free == 3


async def test_uploads_overlap_and_each_frees_its_slot(ring: StagingRing) -> None:
    async with running(ring) as rig:
        loads = [rig.loads.make(name, [0], base=base) for name, base in (("one", 0), ("two", 256))]
        slots = [rig.feed(load).slot for load in loads]
        await anyio.wait_all_tasks_blocked()
        assert [slot.state for slot in slots] == [SlotState.COPYING] * 2
        rig.arena.gate.let(rig.arena.gate.arrived.index(256))
        await anyio.wait_all_tasks_blocked()
        assert [slot.state for slot in slots] == [SlotState.COPYING, SlotState.FREE]
        assert rig.freed == [2]
        assert rig.loads.settled == ["two"]
        rig.arena.gate.let(rig.arena.gate.arrived.index(0))


async def test_wrong_bytes_fail_their_load_and_no_other(ring: StagingRing) -> None:
    async with running(ring) as rig:
        rig.arena.gate.let_all()
        rig.arena.failures[0] = CorruptDataError("bad")
        bad, good = rig.loads.make("bad", [0, 4096]), rig.loads.make("good", [8192], base=512)
        rig.feed(bad)
        rig.feed(good)
        await anyio.wait_all_tasks_blocked()
        assert bad.error is rig.arena.failures[0]
        assert not bad.queued
        assert good.error is None
        assert sorted(rig.loads.settled) == ["bad", "good"]
    assert rig.dispatcher.decoded_bytes == 200


async def test_what_nobody_wants_is_not_uploaded(ring: StagingRing) -> None:
    async with running(ring) as rig:
        load = rig.loads.make("one", [0])
        filled = rig.fill(load)
        load.cancel()
        rig.dispatcher.take(filled)
        assert rig.freed == [3]
    assert rig.arena.uploads == []
    assert rig.loads.settled == ["one"]
    assert ring.statistics().free == 3


async def test_it_ends_once_what_it_began_is_done(ring: StagingRing) -> None:
    ended = anyio.Event()
    rig = Rig(ring)

    async def run() -> None:
        await rig.dispatcher.run()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        rig.feed(rig.loads.make("one", [0]))
        await anyio.wait_all_tasks_blocked()
        rig.dispatcher.close()
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        rig.arena.gate.let(0)
    assert ended.is_set()


async def test_after_its_end_slots_go_back_and_nothing_is_uploaded(ring: StagingRing) -> None:
    """As where streaming broke down: reads that were in flight still arrive."""
    rig = Rig(ring)
    with anyio.move_on_after(0.01):
        await rig.dispatcher.run()
    rig.feed(rig.loads.make("one", [0]))
    assert rig.arena.uploads == []
    assert rig.loads.settled == []
    assert ring.statistics().free == 3
