"""What a read returns, on every driver, event loop and way of reading."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.abc import IOMode
from splitzip_aio.drivers import open_driver
from splitzip_aio.errors import ClosedError, InvalidArgumentError, ReadError, UnsupportedError, WrongEventLoopError

pytestmark = pytest.mark.anyio
BLOCK = 4096


def inject(driver: Any, change: Callable[[int], int]) -> None:
    """Have the driver see ``change(result)`` instead of each completion's result."""
    collect = driver._engine.collect
    driver._engine.collect = lambda: [(extent, change(result)) for extent, result in collect()]


def outward(offset: int, nbytes: int, align: int) -> tuple[int, int]:
    start = offset - offset % align
    stop = offset + nbytes + -(offset + nbytes) % align
    return start, stop - start


async def test_random_extents_are_exact(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(2)
    rng = random.Random(11)
    total = 0
    async with open_driver(driver_name, buffers=slots.views, queue_depth=8) as driver:
        file = open_for(driver, big_file, io)
        assert (file.direct, file.size) == (io == "direct", len(content))
        for turn in range(40):
            slot = turn % 2
            align = BLOCK if file.direct else 1
            offset, nbytes = outward(rng.randrange(len(content)), rng.randrange(1, 2 << 20), align)
            position = rng.randrange(0, 1 << 19) // align * align
            slots.poison(slot)
            count = await driver.read(file, slot, position, offset=offset, nbytes=nbytes)
            assert count == min(nbytes, len(content) - offset)
            assert slots.peek(slot, position, count) == content[offset : offset + count]
            assert set(slots.peek(slot, 0, position)) <= {0xA5}
            assert set(slots.peek(slot, position + nbytes, 1 << 16)) <= {0xA5}
            total += count
        statistics = driver.statistics()
    assert (statistics.name, statistics.reads, statistics.bytes_read) == (driver_name, 40, total)
    assert statistics.direct_bytes_read == (total if io == "direct" else 0)
    assert (statistics.in_flight, statistics.queued, statistics.retries) == (0, 0, 0)


async def test_end_of_file(driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, tmp_path: Path) -> None:
    slots = make_slots(1)
    content = random.Random(3).randbytes(BLOCK + 100)
    (tmp_path / "short").write_bytes(content)
    (tmp_path / "empty").touch()
    async with open_driver(driver_name, buffers=slots.views) as driver:
        short, empty = open_for(driver, tmp_path / "short", io), open_for(driver, tmp_path / "empty", io)
        assert await driver.read(short, 0, 0, offset=0, nbytes=8 * BLOCK) == len(content)
        assert slots.peek(0, 0, len(content)) == content
        assert await driver.read(short, 0, 0, offset=BLOCK, nbytes=BLOCK) == 100
        assert await driver.read(short, 0, 0, offset=2 * BLOCK, nbytes=BLOCK) == 0
        assert await driver.read(short, 0, 0, offset=1 << 40, nbytes=BLOCK) == 0
        assert await driver.read(short, 0, 0, offset=0, nbytes=0) == 0
        assert await driver.read(empty, 0, 0, offset=0, nbytes=BLOCK) == 0


@pytest.mark.parametrize("keep", [1, 511, 512, 4097, -1])
async def test_short_reads_are_continued(
    driver_name: Any, io: IOMode, keep: int, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    """Every other completion is told that only ``keep`` bytes came (-1: all but one)."""
    slots = make_slots(1)
    turn = iter(range(10**9))

    def shorten(result: int) -> int:
        return result if next(turn) % 2 else max(1, min(keep, result) if keep > 0 else result - 1)

    async with open_driver(driver_name, buffers=slots.views, queue_depth=4) as driver:
        file = open_for(driver, big_file, io)
        inject(driver, shorten)
        count = await driver.read(file, 0, 0, offset=BLOCK, nbytes=3 << 20)
        assert count == 3 << 20
        assert slots.peek(0, 0, count) == content[BLOCK : BLOCK + count]
        assert driver.statistics().short_reads > 0


async def test_one_byte_at_a_time_forever_is_an_error_only_without_progress(
    driver_name: Any, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        buffered, direct = driver.open(big_file, io="buffered"), open_for(driver, big_file, "direct")
        inject(driver, lambda result: 1)
        assert await driver.read(buffered, 0, 0, offset=5, nbytes=100) == 100
        assert slots.peek(0, 0, 100) == content[5:105]
        with pytest.raises(ReadError, match="short reads without progress"):
            await driver.read(direct, 0, 0, offset=0, nbytes=BLOCK)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
async def test_transient_errors_are_retried(
    driver_name: Any, io: IOMode, code: int, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(1)
    turn = iter(range(10**9))
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = open_for(driver, big_file, io)
        inject(driver, lambda result: result if next(turn) % 3 == 2 else -code)
        assert await driver.read(file, 0, 0, offset=0, nbytes=3 << 20) == 3 << 20
        assert slots.peek(0, 0, 3 << 20) == content[: 3 << 20]
        assert driver.statistics().retries > 0
        inject(driver, lambda result: -code)
        with pytest.raises(ReadError) as caught:
            await driver.read(file, 0, 0, offset=0, nbytes=BLOCK)
        assert caught.value.errno == code


async def test_errors_name_file_extent_and_cause(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path
) -> None:
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = open_for(driver, big_file, io)
        inject(driver, lambda result: -errno.EIO)
        with pytest.raises(ReadError) as caught:
            await driver.read(file, 0, 0, offset=8192, nbytes=BLOCK)
        error = caught.value
        assert (error.errno, error.filename) == (errno.EIO, str(big_file))
        assert f"{io} read of [8192, 12288)" in str(error)
        assert "expected 4096 bytes, found 0" in str(error)
        statistics = driver.statistics()
        assert (statistics.reads, statistics.in_flight, statistics.queued) == (0, 0, 0)


async def test_refused_direct_read_goes_on_buffered(
    driver_name: Any, make_slots: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = driver.open(big_file)
        if not file.direct:
            pytest.skip(file.reason)
        inject(driver, lambda result: -errno.EINVAL if file.direct else result)
        assert await driver.read(file, 0, 0, offset=0, nbytes=3 << 20) == 3 << 20
        assert slots.peek(0, 0, 3 << 20) == content[: 3 << 20]
        assert not file.direct
        assert "EINVAL" in file.reason
        assert await driver.read(file, 0, 0, offset=3, nbytes=5) == 5
        assert slots.peek(0, 0, 5) == content[3:8]
        assert driver.statistics().retries >= 1


async def test_refused_direct_read_is_an_error_where_direct_was_ordered(
    driver_name: Any, make_slots: Any, open_for: Any, big_file: Path
) -> None:
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = open_for(driver, big_file, "direct")
        inject(driver, lambda result: -errno.EINVAL)
        with pytest.raises(ReadError) as caught:
            await driver.read(file, 0, 0, offset=0, nbytes=BLOCK)
        assert caught.value.errno == errno.EINVAL
        assert file.direct


async def test_file_cut_short_after_opening(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, tmp_path: Path
) -> None:
    slots = make_slots(1)
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(8 * BLOCK))
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = open_for(driver, path, io)
        os.truncate(path, 2 * BLOCK)
        with pytest.raises(ReadError, match=r"ended early.*expected 32768 bytes, found 8192"):
            await driver.read(file, 0, 0, offset=0, nbytes=8 * BLOCK)


async def test_hundred_reads_on_a_queue_of_four(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(100, 16 * BLOCK)
    deepest = 0
    async with open_driver(driver_name, buffers=slots.views, queue_depth=4) as driver:
        file = open_for(driver, big_file, io)

        async def one(slot: int) -> None:
            nonlocal deepest
            offset = slot * 17 * BLOCK
            count = await driver.read(file, slot, 0, offset=offset, nbytes=16 * BLOCK)
            deepest = max(deepest, driver.statistics().in_flight)
            assert slots.peek(slot, 0, count) == content[offset : offset + count]
            assert count == 16 * BLOCK

        async with anyio.create_task_group() as group:
            for slot in range(100):
                group.start_soon(one, slot)
        statistics = driver.statistics()
        assert (statistics.reads, statistics.in_flight, statistics.queued) == (100, 0, 0)
        assert statistics.queue_depth == 4
        assert deepest <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, 0, BLOCK), "slot 2 does not exist"),
        ((-1, 0, 0, BLOCK), "slot -1 does not exist"),
        ((0, -BLOCK, 0, BLOCK), "negative"),
        ((0, 0, -BLOCK, BLOCK), "negative"),
        ((0, 0, 0, -BLOCK), "negative"),
        ((0, BLOCK, 0, 16 * BLOCK), "do not fit"),
        ((0, 0, 100, BLOCK), "offset and nbytes in multiples"),
        ((0, 0, 0, 100), "offset and nbytes in multiples"),
        ((0, 1, 0, BLOCK), "memory at a multiple"),
    ],
)
async def test_impossible_extents_are_refused(
    driver_name: Any,
    arguments: tuple[int, int, int, int],
    message: str,
    make_slots: Any,
    open_for: Any,
    big_file: Path,
) -> None:
    slots = make_slots(2, 16 * BLOCK)
    slot, position, offset, nbytes = arguments
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = open_for(driver, big_file, "direct")
        with pytest.raises(InvalidArgumentError, match=message):
            await driver.read(file, slot, position, offset=offset, nbytes=nbytes)
    assert set(slots.peek(0, 0, 16 * BLOCK)) == {0xA5}


async def test_closed_driver_and_closed_file(driver_name: Any, make_slots: Any, big_file: Path) -> None:
    slots = make_slots(1)
    driver = open_driver(driver_name, buffers=slots.views)
    other = open_driver(driver_name, buffers=slots.views)
    file, kept = driver.open(big_file), driver.open(big_file)
    with pytest.raises(InvalidArgumentError, match="another driver"):
        await other.read(file, 0, 0, offset=0, nbytes=BLOCK)
    await other.aclose()
    assert driver.statistics().open_files == 2
    file.close()
    file.close()
    assert file.closed
    assert driver.statistics().open_files == 1
    with pytest.raises(ClosedError, match=r"content\.bin"):
        await driver.read(file, 0, 0, offset=0, nbytes=BLOCK)
    await driver.aclose()
    await driver.aclose()
    assert kept.closed
    assert driver.statistics().open_files == 0
    with pytest.raises(ClosedError):
        await driver.read(kept, 0, 0, offset=0, nbytes=BLOCK)
    with pytest.raises(ClosedError):
        driver.open(big_file)


async def test_other_event_loop_is_refused(
    driver_name: Any, anyio_backend: str, make_slots: Any, big_file: Path
) -> None:
    slots = make_slots(1)
    refused: list[BaseException] = []
    async with open_driver(driver_name, buffers=slots.views) as driver:
        file = driver.open(big_file)
        await driver.read(file, 0, 0, offset=0, nbytes=BLOCK)

        async def read() -> None:
            with pytest.raises(WrongEventLoopError) as caught:
                await driver.read(file, 0, 0, offset=0, nbytes=BLOCK)
            refused.append(caught.value)

        thread = threading.Thread(target=lambda: anyio.run(read, backend=anyio_backend))
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
    assert len(refused) == 1


async def test_missing_file_directory_and_fifo(driver_name: Any, make_slots: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    async with open_driver(driver_name, buffers=make_slots(1).views) as driver:
        for name, code in [("missing", errno.ENOENT), (".", errno.EISDIR), ("fifo", errno.EINVAL)]:
            with pytest.raises(ReadError) as caught:
                driver.open(tmp_path / name)
            assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / name))
        assert driver.statistics().open_files == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_permission_denied(driver_name: Any, make_slots: Any, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0)
    async with open_driver(driver_name, buffers=make_slots(1).views) as driver:
        with pytest.raises(ReadError) as caught:
            driver.open(path)
        assert caught.value.errno == errno.EACCES


async def test_descriptors_are_returned(
    driver_name: Any, make_slots: Any, big_file: Path, no_leaked_descriptors: Any, tmp_path: Path
) -> None:
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views) as warm:  # what a first use opens for good
        await warm.read(warm.open(big_file), 0, 0, offset=0, nbytes=BLOCK)
    with no_leaked_descriptors():
        for _ in range(20):
            async with open_driver(driver_name, buffers=slots.views) as driver:
                files = [driver.open(big_file) for _ in range(70)]  # more than a uring registers
                for file in files:
                    assert await driver.read(file, 0, 0, offset=0, nbytes=BLOCK) == BLOCK
                for file in files[::2]:
                    file.close()
                again = driver.open(big_file)
                assert await driver.read(again, 0, 0, offset=0, nbytes=BLOCK) == BLOCK
                with pytest.raises(ReadError):
                    driver.open(tmp_path)


async def test_a_file_closed_during_its_read_stays_open_until_then(
    driver_name: Any, io: IOMode, make_slots: Any, open_for: Any, big_file: Path, content: bytes
) -> None:
    slots = make_slots(1)
    async with open_driver(driver_name, buffers=slots.views, queue_depth=1) as driver:
        file = open_for(driver, big_file, io)
        counts: list[int] = []
        collect = driver._engine.collect
        driver._engine.collect = lambda: collect() if file.closed else []  # else it may be done before anyone looks

        async def read() -> None:
            counts.append(await driver.read(file, 0, 0, offset=0, nbytes=3 << 20))

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            while not driver.statistics().in_flight:
                await anyio.lowlevel.checkpoint()
            file.close()
            assert not counts
        assert counts == [3 << 20]
        assert slots.peek(0, 0, 3 << 20) == content[: 3 << 20]
        assert driver.statistics().open_files == 0


async def test_direct_where_there_is_none(driver_name: Any, make_slots: Any, monkeypatch: Any, big_file: Path) -> None:
    import splitzip_aio.drivers.files as files

    monkeypatch.setattr(files, "_dio_alignments", lambda libc, descriptor: (0, 0))
    async with open_driver(driver_name, buffers=make_slots(1).views) as driver:
        with pytest.raises(
            UnsupportedError, match=r"content\.bin: direct I/O was asked for, but the file system has no"
        ):
            driver.open(big_file, io="direct")
        file = driver.open(big_file)
        assert (file.direct, file.memory_alignment, file.offset_alignment) == (False, 1, 1)
        assert file.reason == "buffered: the file system has no direct I/O for this file"
        with pytest.raises(InvalidArgumentError, match="io: expected one of"):
            driver.open(big_file, io="fast")  # type: ignore[arg-type]
