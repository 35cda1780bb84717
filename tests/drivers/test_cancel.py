"""A buffer belongs to the kernel until its completion: cancellation, closing, and loops that die."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.abc import IOMode
from splitzip_aio.drivers import open_driver
from splitzip_aio.drivers.completion import CompletionDriver
from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.operation import Extent, Slots
from splitzip_aio.errors import ClosedError, WrongEventLoopError

BLOCK = 4096
MIB = 1 << 20


class HeldEngine(Engine):
    """A kernel that completes when told to, and writes into the buffer at that moment, not before."""

    name = "held"

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.begun: list[Extent] = []
        self.refuse_submission = False
        self.flushes = 0
        self.flushed_often = anyio.Event()
        self.closed = False
        self._completed: list[tuple[Extent, int]] = []
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def in_flight(self) -> int:
        return len(self.begun) + len(self._completed)

    def fileno(self) -> int:
        return self._readable

    @property
    def signal(self) -> int:
        return self._writable

    def begin(self, extents: Sequence[Extent]) -> None:
        self.begun.extend(extents)

    def flush(self) -> bool:
        self.flushes += 1
        if self.flushes == 4:
            self.flushed_often.set()
        return not self.refuse_submission

    def complete(self, index: int = 0) -> None:
        extent = self.begun.pop(index)
        view = self.slots.views[extent.slot]
        view[extent.position : extent.position + extent.expected] = b"\x11" * extent.expected
        self._completed.append((extent, extent.expected))
        os.write(self._writable, b"\0")

    def collect(self) -> list[tuple[Extent, int]]:
        with suppress(BlockingIOError):
            os.read(self._readable, 4096)
        completed, self._completed = self._completed, []
        return completed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            while self.begun:
                self.complete()
            self._completed.clear()
            os.close(self._readable)
            os.close(self._writable)


@pytest.fixture
def held() -> Any:
    """A driver on a HeldEngine over two slots of 4 MiB, at most 2 extents of 1 MiB at once."""
    views = tuple(memoryview(bytearray(b"\xa5") * (4 * MIB)) for _ in range(2))
    slots = Slots(views, (0, 0))
    engine = HeldEngine(slots)
    return CompletionDriver(engine, slots, queue_depth=2, chunk_bytes=MIB, fallbacks=()), engine


async def settle_tasks() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_cancelled_read_waits_for_the_kernel_and_begins_nothing_more(held: Any, big_file: Path) -> None:
    driver, engine = held
    left: list[int] = []
    async with driver:
        file = driver.open(big_file, io="buffered")

        async def read() -> None:
            try:
                await driver.read(file, 0, 0, offset=0, nbytes=4 * MIB)
            finally:
                left.append(engine.in_flight)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settle_tasks()
            assert (driver.statistics().in_flight, driver.statistics().queued) == (2, 2)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await settle_tasks()
                assert not left
                assert driver.statistics().queued == 0
                engine.complete()
                await settle_tasks()
                assert not left
                engine.complete()
                await settle_tasks()
                assert left == [0]
        assert driver.statistics().reads == 0


@pytest.mark.anyio
async def test_lead_passes_on_when_the_leader_is_cancelled_or_done(held: Any, big_file: Path) -> None:
    driver, engine = held
    done: list[int] = []
    async with driver:
        file = driver.open(big_file, io="buffered")

        async def read(slot: int, scope: anyio.CancelScope) -> None:
            with scope:
                await driver.read(file, slot, 0, offset=0, nbytes=MIB)
                done.append(slot)

        scopes = [anyio.CancelScope(), anyio.CancelScope()]
        async with anyio.create_task_group() as group:
            group.start_soon(read, 0, scopes[0])
            await settle_tasks()
            group.start_soon(read, 1, scopes[1])
            await settle_tasks()
            scopes[0].cancel()
            await settle_tasks()
            engine.complete(1)
            with anyio.fail_after(5):
                while not done:
                    await settle_tasks()
            assert done == [1]
            assert engine.in_flight == 1
            engine.complete()
        assert driver.statistics().in_flight == 0


@pytest.mark.anyio
async def test_refused_submission_is_repeated(held: Any, big_file: Path) -> None:
    driver, engine = held
    async with driver:
        file = driver.open(big_file, io="buffered")
        engine.refuse_submission = True
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: driver.read(file, 0, 0, offset=0, nbytes=MIB))
            with anyio.fail_after(5):
                await engine.flushed_often.wait()
            engine.refuse_submission = False
            engine.complete()
        assert driver.statistics().reads == 1


@pytest.mark.anyio
async def test_urgent_read_overtakes_what_is_queued(held: Any, big_file: Path) -> None:
    driver, engine = held
    async with driver:
        file = driver.open(big_file, io="buffered")
        order: list[str] = []

        async def read(name: str, offset: int, nbytes: int, urgent: bool) -> None:
            await driver.read(file, 0, 0, offset=offset, nbytes=nbytes, urgent=urgent)
            order.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(read, "ahead", 0, 4 * MIB, False)
            await settle_tasks()
            group.start_soon(read, "first", 4 * MIB, 2 * MIB, True)
            await settle_tasks()
            group.start_soon(read, "second", 6 * MIB, MIB, True)
            await settle_tasks()
            assert driver.statistics().queued == 5
            begun: list[int] = []
            while engine.begun:
                begun.append(engine.begun[0].offset // MIB)
                engine.complete()
                await settle_tasks()
                with anyio.move_on_after(0.001):
                    await anyio.sleep_forever()
            assert begun == [0, 1, 4, 5, 6, 2, 3]
        assert order == ["first", "second", "ahead"]


@pytest.mark.anyio
async def test_aclose_waits_for_the_kernel_and_fails_what_is_queued(held: Any, big_file: Path) -> None:
    driver, engine = held
    file = driver.open(big_file, io="buffered")
    failures: list[ClosedError] = []

    async def read(slot: int) -> None:
        with pytest.raises(ClosedError, match="before this read began") as caught:
            await driver.read(file, slot, 0, offset=0, nbytes=4 * MIB)
        failures.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(read, 0)
        group.start_soon(read, 1)
        await settle_tasks()
        group.start_soon(driver.aclose)
        group.start_soon(driver.aclose)
        await settle_tasks()
        assert not engine.closed
        assert driver.statistics().queued == 0
        engine.complete()
        engine.complete()
    assert engine.closed
    assert len(failures) == 2
    assert file.closed


@pytest.mark.parametrize("how", ["timeout", "wait_for", "cancel"])
def test_asyncio_cancellation_cannot_reach_through(held: Any, big_file: Path, how: str) -> None:
    """asyncio's own Task.cancel ignores the shield of anyio's scopes; the read must wait regardless."""
    driver, engine = held

    async def main() -> None:
        async with driver:
            file = driver.open(big_file, io="buffered")

            async def limited() -> None:
                reading = driver.read(file, 0, 0, offset=0, nbytes=MIB)
                if how == "timeout":
                    async with asyncio.timeout(0.01):
                        await reading
                else:
                    await asyncio.wait_for(reading, 0.01 if how == "wait_for" else None)

            task = asyncio.create_task(limited())
            await asyncio.sleep(0.05)
            for _ in range(3):
                if how == "cancel":
                    task.cancel()
                await asyncio.sleep(0.01)
                assert not task.done()
                assert engine.in_flight == 1
            engine.complete()
            with pytest.raises(asyncio.CancelledError if how == "cancel" else TimeoutError):
                await task
            assert engine.in_flight == 0

    asyncio.run(main())


@pytest.mark.anyio
async def test_cancelled_at_random_nothing_is_written_afterwards(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(4)
    rng = random.Random(5)
    cancelled = 0
    async with open_driver(driver_name, buffers=slots.views, queue_depth=4) as driver:
        file = open_for(driver, big_file, io)
        for _ in range(60):
            poisoned: set[int] = set()

            async def read(slot: int, poisoned: set[int] = poisoned) -> None:
                nonlocal cancelled
                try:
                    count = await driver.read(file, slot, 0, offset=MIB, nbytes=3 * MIB)
                except anyio.get_cancelled_exc_class():
                    slots.poison(slot)  # it is ours again: any later write is the driver's fault
                    poisoned.add(slot)
                    cancelled += 1
                    raise
                assert slots.peek(slot, 0, count) == content[MIB : MIB + count]

            with anyio.move_on_after(rng.random() * 0.004):
                async with anyio.create_task_group() as group:
                    for slot in range(4):
                        group.start_soon(read, slot)
            statistics = driver.statistics()
            assert (statistics.in_flight, statistics.queued) == (0, 0)
            await anyio.sleep(0.001)
            for slot in poisoned:
                assert slots.peek(slot, 0, 3 * MIB).count(0xA5) == 3 * MIB
        assert await driver.read(file, 0, 0, offset=0, nbytes=3 * MIB) == 3 * MIB
    assert cancelled >= 10


def test_loop_closed_under_a_read(driver_name: Any, make_slots: Any, big_file: Path, content: bytes) -> None:
    """The coroutine is torn down with its loop; dropping the driver waits for the kernel before the memory goes."""
    slots = make_slots(1)
    driver = open_driver(driver_name, buffers=slots.views, queue_depth=4)
    file = driver.open(big_file, io="buffered")
    loop = asyncio.new_event_loop()
    reading = driver.read(file, 0, 0, offset=0, nbytes=3 * MIB)
    task = loop.create_task(reading)
    loop.call_soon(loop.call_soon, loop.stop)
    loop.run_forever()
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    reading.close()
    assert driver.statistics().reads == 0
    dropping = [driver, file]
    del driver, file
    with pytest.warns(ResourceWarning, match="never closed"):
        dropping.clear()
    slots.poison(0)
    time.sleep(0.02)
    assert slots.peek(0, 0, 3 * MIB).count(0xA5) == 3 * MIB


def test_dropped_driver_frees_everything(
    driver_name: Any, make_slots: Any, big_file: Path, no_leaked_descriptors: Any
) -> None:
    slots = make_slots(1)
    with no_leaked_descriptors():
        dropping: list[object] = [open_driver(driver_name, buffers=slots.views)]
        dropping.append(dropping[0].open(big_file))  # type: ignore[attr-defined]
        with pytest.warns(ResourceWarning, match=f"{driver_name} driver was never closed"):
            dropping.clear()


def _child(driver: Any, path: str, answer: Any) -> None:
    try:
        driver.open(path)
    except WrongEventLoopError as exc:
        answer.send(str(exc))
    else:
        answer.send("no error")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_is_refused_and_parent_unharmed(
    driver_name: Any, make_slots: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(1)

    async def main() -> None:
        async with open_driver(driver_name, buffers=slots.views) as driver:
            file = driver.open(big_file)
            await driver.read(file, 0, 0, offset=0, nbytes=BLOCK)
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(driver, str(big_file), theirs))
            child.start()
            assert "in process" in ours.recv()
            child.join()
            assert child.exitcode == 0
            assert await driver.read(file, 0, 0, offset=0, nbytes=2 * MIB) == 2 * MIB
            assert slots.peek(0, 0, 2 * MIB) == content[: 2 * MIB]
            ours.close()
            theirs.close()

    anyio.run(main)
