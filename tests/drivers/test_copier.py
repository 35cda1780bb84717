"""Threads that copy out of the page cache, by themselves and under a driver."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.abc import FileHandle, ReadDriver
from splitzip_aio.drivers import copier, copying, open_driver
from splitzip_aio.drivers.copier import CopyThreads
from splitzip_aio.errors import ClosedError, ReadError, SplitZipError

MIB = 1 << 20
Results = dict[int, int | SplitZipError]


class Copies:
    """Threads, memory of 40 MiB to copy to, and a descriptor to wait for."""

    def __init__(self, count: int) -> None:
        self.memory = mmap.mmap(-1, 40 * MIB)
        self._first = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._first)
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.threads = CopyThreads(count, self.event)
        until_ready(self.threads)

    def collect(self) -> list[tuple[int, int]]:
        """What is done next."""
        while not (found := self.threads.collect()):
            assert select.select([self.event], [], [], 20)[0]
            os.eventfd_read(self.event)
        return found

    def close(self) -> None:
        self.threads.close()
        os.close(self.event)
        del self._first
        self.memory.close()


def copying_now() -> int:
    """Threads of ours that are alive; event loops keep others."""
    return sum(thread.name.startswith("splitzip-copy") for thread in threading.enumerate())


def until_ready(threads: CopyThreads) -> None:
    deadline = time.monotonic() + 60
    while not threads.ready:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=[1, 3])
def copies(request: pytest.FixtureRequest) -> Iterator[Copies]:
    copies = Copies(request.param)
    yield copies
    copies.close()


@pytest.fixture
def descriptor(big_file: Path) -> Iterator[int]:
    opened = os.open(big_file, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("nbytes", [1, 4095, MIB, MIB + 1, 5 * MIB + 77])
@pytest.mark.parametrize("offset", [0, 12_345])
def test_bytes_are_copied_and_none_beside_them(
    copies: Copies, descriptor: int, content: bytes, nbytes: int, offset: int
) -> None:
    copies.memory[:] = b"\xa5" * len(copies.memory)
    job = copies.threads.give(descriptor, offset, copies.address + 100, nbytes)
    assert copies.threads.under_way == 1
    assert copies.collect() == [(job, nbytes)]
    assert copies.threads.under_way == 0
    assert copies.memory[100 : 100 + nbytes] == content[offset : offset + nbytes]
    assert copies.memory[:100] == b"\xa5" * 100
    assert copies.memory[100 + nbytes : 200 + nbytes] == b"\xa5" * 100


def test_more_than_the_least_shares(copies: Copies, tmp_path: Path) -> None:
    """Of 40 MiB each of the 32 shares has more than one."""
    data = os.urandom(40 * MIB)
    (tmp_path / "file").write_bytes(data)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    job = copies.threads.give(descriptor, 0, copies.address, len(data))
    assert copies.collect() == [(job, len(data))]
    os.close(descriptor)
    assert copies.memory[:] == data


@pytest.mark.parametrize("offset", [0, 3 * MIB + 5, 7 * MIB, 20 * MIB])
def test_a_file_that_ends_early(copies: Copies, descriptor: int, content: bytes, offset: int) -> None:
    """Only what is there from the start on counts."""
    job = copies.threads.give(descriptor, offset, copies.address, 30 * MIB)
    there = max(0, len(content) - offset)
    assert copies.collect() == [(job, there)]
    assert copies.memory[:there] == content[offset:]


def test_what_came_behind_a_share_that_is_not_whole_does_not_count(copies: Copies, descriptor: int) -> None:
    job = copies.threads.give(descriptor, 0, copies.address, 3 * MIB)
    assert select.select([copies.event], [], [], 20)[0]
    copies.threads._shares[job, 1] = 5
    copies.threads._copied[job] -= MIB - 5
    assert copies.collect() == [(job, MIB + 5)]


def test_what_cannot_be_read(copies: Copies, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)  # a directory
    job = copies.threads.give(descriptor, 0, copies.address, 3 * MIB)
    assert copies.collect() == [(job, 0)]
    os.close(descriptor)


def test_many_jobs_at_a_time_and_names_that_are_used_again(copies: Copies, descriptor: int, content: bytes) -> None:
    given: dict[int, int] = {}
    done = 0
    while done < 500:
        while copies.threads.room and len(given) < 8:
            place = copies.threads._given % 30
            given[copies.threads.give(descriptor, place * 1000, copies.address + place * MIB, 70_001)] = place
        for job, count in copies.collect():
            place = given.pop(job)
            assert count == 70_001
            assert copies.memory[place * MIB : place * MIB + count] == content[place * 1000 : place * 1000 + count]
            done += 1
    while given:
        for job, _ in copies.collect():
            del given[job]


def test_room_ends_where_names_do(copies: Copies, descriptor: int) -> None:
    """As long as nothing is collected."""
    count = 0
    while copies.threads.room:
        copies.threads.give(descriptor, 0, copies.address, 1)
        count += 1
    assert count == copies.threads.under_way == 64
    while copies.threads.under_way:
        copies.collect()
    assert copies.threads.room


def test_closing_waits_for_what_was_given(big_file: Path, content: bytes, descriptor: int) -> None:
    copies = Copies(2)
    jobs = [copies.threads.give(descriptor, 0, copies.address + place * 8 * MIB, len(content)) for place in range(4)]
    copies.threads.close()
    assert copying_now() == 0
    assert sorted(copies.threads.collect()) == [(job, len(content)) for job in jobs]
    for place in range(4):
        assert copies.memory[place * 8 * MIB :][: len(content)] == content
    copies.close()


def test_closed_before_they_are_ready() -> None:
    event = os.eventfd(0)
    CopyThreads(5, event).close()
    os.close(event)
    assert copying_now() == 0


@pytest.fixture
def copying_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first cached read on; each waits for them once."""
    monkeypatch.setattr(copying, "_WORTH_IT_BYTES", 0)
    init = CopyThreads.__init__

    def wait(self: CopyThreads, count: int, signal: int) -> None:
        init(self, count, signal)
        until_ready(self)

    monkeypatch.setattr(CopyThreads, "__init__", wait)


def submit(driver: ReadDriver, file: FileHandle, slot: int, results: Results, *, offset: int, nbytes: int) -> None:
    def done(result: int | SplitZipError) -> None:
        assert slot not in results
        results[slot] = result

    driver.submit(file, slot, 0, offset=offset, nbytes=nbytes, urgent=slot % 2 == 1, done=done)


def cached(driver: ReadDriver, path: Path) -> FileHandle:
    file = driver.open(path, io="buffered")
    file.cached = True  # type: ignore[attr-defined]
    return file


@pytest.mark.anyio
@pytest.mark.usefixtures("copying_threads")
async def test_a_driver_has_them_copy_what_is_cached_and_nothing_else(
    driver_name: Any, make_slots: Any, big_file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    most: list[int] = []
    give = CopyThreads.give

    def watched(self: CopyThreads, descriptor: int, offset: int, address: int, nbytes: int) -> int:
        given.append(nbytes)
        most.append(self.under_way + 1)
        return give(self, descriptor, offset, address, nbytes)

    monkeypatch.setattr(CopyThreads, "give", watched)
    slots = make_slots(12)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        for file, expected in ((cached(driver, big_file), 24), (driver.open(big_file, io="buffered"), 0)):
            given.clear()
            for _ in range(2):
                results = Results()
                for slot in range(12):
                    slots.poison(slot)
                    submit(driver, file, slot, results, offset=slot * 1000, nbytes=3 * MIB - slot)
                await driver.reap()
                assert results == {slot: 3 * MIB - slot for slot in range(12)}
                for slot in range(12):
                    assert slots.peek(slot, 0, 3 * MIB - slot) == content[slot * 1000 :][: 3 * MIB - slot]
            assert len(given) == expected
        assert max(most) <= 4
        assert driver.statistics().in_flight == 0
        assert driver.statistics().bytes_read == 2 * 2 * sum(3 * MIB - slot for slot in range(12))
    assert copying_now() == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("copying_threads")
async def test_a_file_cut_short_is_said_in_the_same_words(driver_name: Any, make_slots: Any, tmp_path: Path) -> None:
    """What the threads could not read is read by who can say why."""
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * MIB))
    slots = make_slots(2)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = cached(driver, path)
        os.truncate(path, 2 * MIB + 4096)
        for offset in (0, 5 << 19):
            with anyio.fail_after(20), pytest.raises(ReadError, match="cut short after it was opened"):
                await driver.read(file, 0, 0, offset=offset, nbytes=1 << 19 if offset else 3 * MIB)


@pytest.mark.anyio
@pytest.mark.usefixtures("copying_threads")
async def test_what_the_threads_cannot_read_the_driver_reads_itself(
    driver_name: Any, make_slots: Any, big_file: Path, content: bytes, tmp_path: Path
) -> None:
    """io_uring has the file registered, and threads say what is wrong with the descriptor."""
    slots = make_slots(1)
    with (tmp_path / "other").open("wb") as write_only:
        async with open_driver(driver_name, buffers=slots.views) as driver:
            file = cached(driver, big_file)
            os.dup2(write_only.fileno(), file.descriptor, inheritable=False)  # type: ignore[attr-defined]
            with anyio.fail_after(20):
                if driver_name == "uring":
                    assert await driver.read(file, 0, 0, offset=0, nbytes=3 * MIB) == 3 * MIB
                    assert slots.peek(0, 0, 3 * MIB) == content[: 3 * MIB]
                else:
                    with pytest.raises(ReadError, match="Bad file descriptor"):
                        await driver.read(file, 0, 0, offset=0, nbytes=3 * MIB)


@pytest.mark.anyio
@pytest.mark.usefixtures("copying_threads")
async def test_closing_a_driver_waits_for_them(driver_name: Any, make_slots: Any, big_file: Path) -> None:
    slots = make_slots(12)
    results = Results()
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = cached(driver, big_file)
        for slot in range(12):
            submit(driver, file, slot, results, offset=0, nbytes=3 * MIB)
    assert len(results) == 12
    assert all(isinstance(result, ClosedError) or result == 3 * MIB for result in results.values())


@pytest.mark.anyio
async def test_they_start_once_it_is_worth_it(
    driver_name: Any, make_slots: Any, big_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_WORTH_IT_BYTES", 5 * MIB)
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        engine = driver._engine  # type: ignore[attr-defined]
        file = cached(driver, big_file)
        await driver.read(file, 0, 0, offset=0, nbytes=3 * MIB)
        assert engine._threads is None
        assert driver.statistics().copy_threads == 0
        assert engine.copy_bytes == 8 * MIB
        await driver.read(file, 0, 0, offset=0, nbytes=3 * MIB)
        until_ready(engine._threads)
        assert engine.copies == 4
        assert driver.statistics().copy_threads == max(1, len(os.sched_getaffinity(0)) * 7 // 8)
        assert engine.copy_bytes > 1 << 40


@pytest.mark.anyio
@pytest.mark.usefixtures("copying_threads")
async def test_small_slots_are_given_in_greater_number(
    driver_name: Any, make_slots: Any, big_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that each of seven threads has something to do."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    slots = make_slots(20, 1 << 20)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file, results = cached(driver, big_file), Results()
        for slot in range(20):
            submit(driver, file, slot, results, offset=slot << 18, nbytes=MIB)
        assert driver._engine.copies == 14  # type: ignore[attr-defined]
        await driver.reap()
    assert results == dict.fromkeys(range(20), MIB)


@pytest.mark.anyio
async def test_without_numba_the_engine_goes_on(
    driver_name: Any, make_slots: Any, big_file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def missing() -> None:
        raise ImportError("no numba here")

    monkeypatch.setattr(copying, "_WORTH_IT_BYTES", 0)
    monkeypatch.setattr(copier, "_load", missing)
    slots = make_slots(1)
    with caplog.at_level("INFO", logger="splitzip_aio"):
        async with open_driver(driver_name, buffers=slots.views) as driver:
            file = cached(driver, big_file)
            for _ in range(3):
                slots.poison(0)
                assert await driver.read(file, 0, 0, offset=0, nbytes=3 * MIB) == 3 * MIB
                assert slots.peek(0, 0, 3 * MIB) == content[: 3 * MIB]
            driver._engine._threads._starter.join()  # type: ignore[attr-defined]
    assert "no numba here" in caplog.text
