"""Reads that no task waits for: the same results, called back."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.abc import FileHandle, IOMode, ReadDriver
from splitzip_aio.drivers import open_driver
from splitzip_aio.errors import ClosedError, InvalidArgumentError, ReadError, SplitZipError

pytestmark = pytest.mark.anyio
MIB = 1 << 20

Results = dict[int, int | SplitZipError]


def submit(driver: ReadDriver, file: FileHandle, slot: int, results: Results, *, offset: int, nbytes: int) -> None:
    def done(result: int | SplitZipError) -> None:
        assert slot not in results
        results[slot] = result

    driver.submit(file, slot, 0, offset=offset, nbytes=nbytes, urgent=slot % 2 == 1, done=done)


async def test_every_read_is_called_back_once(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(5)
    async with open_driver(driver_name, buffers=slots.views, queue_depth=2) as driver:
        file = open_for(driver, big_file, io)
        await driver.reap()  # nothing to wait for
        for _ in range(10):
            results: Results = {}
            for slot in range(5):
                submit(driver, file, slot, results, offset=slot * MIB, nbytes=3 * MIB)
            await driver.reap()
            assert results == dict.fromkeys(range(5), 3 * MIB)
            for slot in range(5):
                assert slots.peek(slot, 0, 3 * MIB) == content[slot * MIB : (slot + 3) * MIB]
        statistics = driver.statistics()
    assert (statistics.reads, statistics.bytes_read) == (50, 150 * MIB)
    assert (statistics.in_flight, statistics.queued) == (0, 0)


async def test_beside_reads_that_are_waited_for(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path
) -> None:
    """Whoever waits reaps for all; when it is done, the others go on without it."""
    slots = make_slots(6)
    async with open_driver(driver_name, buffers=slots.views, queue_depth=3) as driver:
        file = open_for(driver, big_file, io)
        for _ in range(20):
            results: Results = {}
            for slot in range(3):
                submit(driver, file, slot, results, offset=0, nbytes=3 * MIB)
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    for slot in range(3, 6):
                        group.start_soon(lambda slot=slot: driver.read(file, slot, 0, offset=MIB, nbytes=MIB))
                    group.start_soon(driver.reap)
                    await driver.reap()
                    assert results == dict.fromkeys(range(3), 3 * MIB)


async def test_the_next_read_may_be_given_from_the_call(
    driver_name: Any, make_slots: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(1)
    counts: list[int | SplitZipError] = []
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = driver.open(big_file, io="buffered")

        def again(result: int | SplitZipError) -> None:
            counts.append(result)
            if len(counts) < 5:
                driver.submit(file, 0, 0, offset=len(counts), nbytes=MIB, urgent=False, done=again)

        driver.submit(file, 0, 0, offset=0, nbytes=MIB, urgent=False, done=again)
        await driver.reap()
        assert slots.peek(0, 0, MIB) == content[4 : MIB + 4]
    assert counts == [MIB] * 5


async def test_what_cannot_be_read(driver_name: Any, make_slots: Any, big_file: Path, content: bytes) -> None:
    slots = make_slots(3)
    results: Results = {}
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = driver.open(big_file, io="buffered")
        submit(driver, file, 0, results, offset=len(content) - 5, nbytes=MIB)
        submit(driver, file, 1, results, offset=len(content) + 5, nbytes=MIB)
        with pytest.raises(InvalidArgumentError, match="slot 3 does not exist"):
            submit(driver, file, 3, results, offset=0, nbytes=1)
        collect = driver._engine.collect  # type: ignore[attr-defined]
        await driver.reap()
        driver._engine.collect = lambda: [(extent, -errno.EIO) for extent, _ in collect()]  # type: ignore[attr-defined]
        submit(driver, file, 2, results, offset=0, nbytes=MIB)
        await driver.reap()
    assert (results[0], results[1]) == (5, 0)
    failure = results[2]
    assert isinstance(failure, ReadError)
    assert failure.errno == errno.EIO


async def test_closing_waits_for_the_kernel_and_calls_back(driver_name: Any, make_slots: Any, big_file: Path) -> None:
    """What the kernel had begun arrives, what it had not is given up; nothing is written afterwards."""
    slots = make_slots(8)
    results: Results = {}
    driver = open_driver(driver_name, buffers=slots.views, queue_depth=1)
    file = driver.open(big_file, io="buffered")
    for slot in range(8):
        submit(driver, file, slot, results, offset=0, nbytes=3 * MIB)
    await driver.aclose()
    assert len(results) == 8
    assert sum(isinstance(result, ClosedError) for result in results.values()) >= 7
    assert all(isinstance(result, ClosedError) or result == 3 * MIB for result in results.values())
    with pytest.raises(ClosedError):
        submit(driver, file, 0, {}, offset=0, nbytes=1)


async def test_reads_from_the_page_cache_leave_cores_to_others(
    driver_name: Any, make_slots: Any, open_for: Any, big_file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight cores seven; files that nobody knows to be cached have the whole depth."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    slots = make_slots(12)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        engine = driver._engine  # type: ignore[attr-defined]
        begin, most = engine.begin, 0

        def watched(extents: Any) -> None:
            nonlocal most
            begin(extents)
            most = max(most, engine.in_flight)

        monkeypatch.setattr(engine, "begin", watched)
        for cached, expected in ((False, 12), (True, 7)):
            file = driver.open(big_file, io="buffered")
            file.cached = cached
            most, results = 0, Results()
            for slot in range(12):
                submit(driver, file, slot, results, offset=0, nbytes=MIB)
            await driver.reap()
            assert results == dict.fromkeys(range(12), MIB)
            assert most <= expected
            assert cached or most > 7
            for slot in range(12):
                assert slots.peek(slot, 0, MIB) == content[:MIB]


def test_whoever_reaps_may_be_cancelled(driver_name: Any, make_slots: Any, big_file: Path) -> None:
    """The reads go on, and are called back when someone reaps again."""
    slots = make_slots(4)

    async def main() -> None:
        async with open_driver(driver_name, buffers=slots.views, queue_depth=2) as driver:
            file = driver.open(big_file, io="buffered")
            for _ in range(20):
                results: Results = {}
                for slot in range(4):
                    submit(driver, file, slot, results, offset=0, nbytes=3 * MIB)
                reaping = asyncio.create_task(driver.reap())
                await asyncio.sleep(0)
                reaping.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reaping
                await driver.reap()
                assert results == dict.fromkeys(range(4), 3 * MIB)

    asyncio.run(main())
