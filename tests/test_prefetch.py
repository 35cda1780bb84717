"""The prefetcher: order, depth, cancellation, and what becomes of reads that fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast

import anyio
import pytest

from splitzip_aio.errors import CorruptDataError, ReadError
from splitzip_aio.host_cache import HostHold, HostTier
from splitzip_aio.loading import FilledSlot
from splitzip_aio.prefetch import Prefetcher
from splitzip_aio.staging import PAGE_BYTES, SlotState, StagingRing
from tests.pipeline import FakeDriver, FakeFile, Loads

pytestmark = pytest.mark.anyio


class Rig:
    """A prefetcher over two slots, one file of 10 pages, and one that is missing."""

    def __init__(self, ring: StagingRing, *, tier: HostTier | None = None) -> None:
        self.ring = ring
        self.driver = FakeDriver()
        self.loads = Loads()
        send, self.output = anyio.create_memory_object_stream[FilledSlot](len(ring.slots))
        files = [FakeFile("a.szp", 10 * PAGE_BYTES), None]
        self.prefetcher = Prefetcher(self.driver, ring, files, send.send_nowait, tier=tier)
        self._send = send

    async def run(self) -> None:
        with self._send:
            await self.prefetcher.run()

    async def next(self) -> FilledSlot:
        with anyio.fail_after(2):
            return await self.output.receive()

    def release(self, filled: FilledSlot) -> None:
        """Give a slot back as the dispatcher does."""
        self.ring.release(filled.slot)
        self.prefetcher.go_on()

    async def drain(self) -> list[FilledSlot]:
        """What is left until the prefetcher ends, slots released."""
        left = []
        async for filled in self.output:
            left.append(filled)
            self.release(filled)
            filled.load.settle()
        return left


@pytest.fixture
def ring() -> Iterator[StagingRing]:
    with StagingRing(2, PAGE_BYTES) as ring:
        yield ring


@asynccontextmanager
async def running(ring: StagingRing) -> AsyncIterator[Rig]:
    rig = Rig(ring)
    async with rig.output, anyio.create_task_group() as group:
        group.start_soon(rig.run)
        yield rig
        rig.prefetcher.close()


async def test_reads_are_in_order_and_as_many_at_once_as_there_are_slots(ring: StagingRing) -> None:
    async with running(ring) as rig:
        rig.prefetcher.submit(rig.loads.make("one", [0, 4096, 8192]))
        rig.prefetcher.submit(rig.loads.make("two", [12288]))
        await anyio.wait_all_tasks_blocked()
        assert rig.driver.gate.arrived == [0, 4096]
        assert ring.statistics().reading == 2
        rig.driver.gate.let(1)
        filled = await rig.next()
        assert (filled.load.plan.name, filled.read.offset) == ("one", 4096)
        assert filled.slot.state is SlotState.READY
        rig.driver.gate.let_all()
        rig.driver.gate.let(0)
        rig.release(filled)
        rig.prefetcher.close()
        assert {each.read.offset for each in await rig.drain()} == {0, 8192, 12288}
    assert rig.driver.gate.arrived == [0, 4096, 8192, 12288]


async def test_urgent_loads_overtake_those_that_are_read_ahead(ring: StagingRing) -> None:
    async with running(ring) as rig:
        ahead = rig.loads.make("ahead", [0, 4096, 8192, 12288], urgent=False)
        rig.prefetcher.submit(ahead)
        rig.prefetcher.submit(rig.loads.make("later", [16384], urgent=False))
        await anyio.wait_all_tasks_blocked()
        rig.prefetcher.submit(rig.loads.make("urgent", [20480]))
        rig.driver.gate.let_all()
        rig.driver.gate.let(0)
        rig.driver.gate.let(1)
        rig.prefetcher.close()
        await rig.drain()
    assert rig.driver.gate.arrived[:3] == [0, 4096, 20480]
    assert sorted(rig.driver.gate.arrived[3:]) == [8192, 12288, 16384]  # trio starts in any order what may start
    assert [offset for offset, urgent in rig.driver.urgent.items() if urgent] == [20480]


async def test_a_cancelled_load_is_not_read_further(ring: StagingRing) -> None:
    async with running(ring) as rig:
        load = rig.loads.make("one", [0, 4096, 8192])
        rig.prefetcher.submit(load)
        await anyio.wait_all_tasks_blocked()
        load.cancel()
        rig.prefetcher.submit(rig.loads.make("two", [12288]))
        assert rig.loads.settled == []
        rig.driver.gate.let_all()
        rig.driver.gate.let(0)
        rig.driver.gate.let(1)
        rig.prefetcher.close()
        left = await rig.drain()
    assert [each.read.offset for each in left if each.load.wanted] == [12288]
    assert rig.driver.gate.arrived == [0, 4096, 12288]
    assert sorted(rig.loads.settled) == ["one", "two"]


async def test_a_slot_taken_for_nothing_goes_back(ring: StagingRing) -> None:
    taken = [ring.acquire() for _ in range(2)]
    async with running(ring) as rig:
        load = rig.loads.make("one", [0])
        rig.prefetcher.submit(load)
        await anyio.wait_all_tasks_blocked()
        load.cancel()
        for slot in taken:
            assert slot is not None
            ring.release(slot)
            rig.prefetcher.go_on()
        await anyio.wait_all_tasks_blocked()
        assert ring.statistics().free == 2
        assert rig.driver.gate.arrived == []


async def test_a_failed_read_fails_its_load_and_no_other(ring: StagingRing) -> None:
    async with running(ring) as rig:
        rig.driver.gate.let_all()
        rig.driver.failures[0] = ReadError(5, "no", "a.szp")
        broken = rig.loads.make("broken", [0, 4096, 8192])
        rig.prefetcher.submit(broken)
        rig.prefetcher.submit(rig.loads.make("sound", [12288]))
        rig.prefetcher.close()
        left = await rig.drain()
    assert broken.error is rig.driver.failures[0]
    assert [each.load.plan.name for each in left if each.load.wanted] == ["sound"]
    assert 8192 not in rig.driver.gate.arrived
    assert ring.statistics().free == 2


@pytest.mark.parametrize(
    ("pack", "offset", "message"),
    [
        (0, 9 * PAGE_BYTES + 3904, r"'one\.weight': a\.szp is too short: expected 320 bytes at 40800"),
        (0, 20 * PAGE_BYTES, r"'one\.weight': a\.szp is too short: expected 320 bytes at 81952"),
        (1, 0, r"'one\.weight': b\.szp is missing: expected 320 bytes at 32"),
    ],
)
async def test_what_is_not_there_is_named(ring: StagingRing, pack: int, offset: int, message: str) -> None:
    async with running(ring) as rig:
        rig.driver.gate.let_all()
        load = rig.loads.make("one", [offset], pack=pack)
        rig.prefetcher.submit(load)
        rig.prefetcher.close()
        assert await rig.drain() == []
    assert isinstance(load.error, CorruptDataError)
    with pytest.raises(CorruptDataError, match=message):
        raise load.error
    assert rig.loads.settled == ["one"]


async def test_it_waits_for_work_and_ends_when_closed(ring: StagingRing) -> None:
    async with running(ring) as rig:
        await anyio.wait_all_tasks_blocked()
        assert ring.statistics().free == 2  # nothing is held while there is nothing to do
        rig.driver.gate.let_all()
        rig.prefetcher.submit(rig.loads.make("one", [0]))
        rig.release(await rig.next())
        rig.prefetcher.close()
        assert await rig.drain() == []


class KeepingNothing:
    """A host tier that has nothing, keeps nothing, and waits for each read."""

    def find(self, key: object, nbytes: int) -> None:
        return None

    async def bring(
        self, key: object, payload: memoryview, hold: None, read: Callable[[], Awaitable[None]]
    ) -> HostHold | None:
        await read()
        return None


async def test_cancelled_it_sees_its_reads_through(ring: StagingRing) -> None:
    """As where streaming breaks down elsewhere: a slot is the driver's until its read is done, whoever waits for it."""
    rig = Rig(ring, tier=cast("HostTier", KeepingNothing()))
    ended = anyio.Event()

    async def run() -> None:
        try:
            await rig.run()
        finally:
            ended.set()

    async with rig.output, anyio.create_task_group() as group:
        group.start_soon(run)
        rig.prefetcher.submit(rig.loads.make("one", [0, 4096]))
        await anyio.wait_all_tasks_blocked()
        begun = sorted(rig.driver.gate.arrived)  # trio starts in any order what may start
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            early, reading = ended.is_set(), ring.statistics().reading
            rig.driver.gate.let_all()
            with anyio.fail_after(5):
                await ended.wait()
    assert begun == [0, 4096]
    assert not early
    assert reading == 2
    assert ring.statistics().ready == 2
    ring.release_all()
