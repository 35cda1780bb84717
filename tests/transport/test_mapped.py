"""Streaming from where the page cache has packs: who may write to them, and what comes of it."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from splitzip_aio.abc import PlannedRead
from splitzip_aio.drivers.files import direct_support
from splitzip_aio.drivers.mapped_file import MappedExtent
from splitzip_aio.errors import CorruptDataError, ReadError
from splitzip_aio.mapped import MappedPacks
from splitzip_aio.transport import Transport, open_transport
from tests.drivers.locked import locked_bytes
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

pytestmark = pytest.mark.anyio


@pytest.fixture
def copied(sample: Sample, tmp_path: Path) -> Sample:
    """A cache to be damaged, all of it in the page cache, where packs can be mapped."""
    shutil.copytree(sample.root, tmp_path / "cache")
    copy = Sample(tmp_path / "cache", sample.tensors)
    for pack in packs(copy):
        descriptor = os.open(pack, os.O_RDONLY)
        os.fsync(descriptor)
        supported = direct_support(descriptor).supported
        os.close(descriptor)
        if not supported:
            pytest.skip("no direct I/O here, so everything is read buffered")
    return copy


@pytest.fixture(autouse=True)
def nothing_stays_locked() -> Iterator[None]:
    before = locked_bytes()
    yield
    assert locked_bytes() == before


def packs(sample: Sample) -> list[Path]:
    return sorted((sample.root / "packs").iterdir())


def mapped_files() -> list[str]:
    """Packs among what this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if ".szp" in line]


def opens_for_writing(path: Path) -> bool:
    """Whether who opens it for writing need not wait."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return False
    return True


async def stream_all(sample: Sample, transport: Transport) -> None:
    for layer in transport.layers:
        await sample.check_prefetch(transport, layer)
    await settled(transport)


async def test_bytes_are_right_round_after_round(copied: Sample) -> None:
    async with open_transport(copied.root, device="cpu", ring_bytes="1MiB", arena_bytes=3 * LAYER_BYTES) as transport:
        for _ in range(3):
            await stream_all(copied, transport)
            statistics = transport.statistics()
            assert_idle(statistics)
            assert locked_bytes() == 0
            assert all(map(opens_for_writing, packs(copied)))  # an idle transport makes nobody wait
    assert statistics.io.bytes_read == 0
    assert statistics.mapped_bytes >= statistics.wire_bytes > 0
    assert statistics.fallbacks == ()
    assert mapped_files() == []


async def test_the_host_tier_comes_first(copied: Sample) -> None:
    async with open_transport(copied.root, device="cpu", ring_bytes="1MiB", host_cache_bytes="1MiB") as transport:
        await stream_all(copied, transport)
        assert transport.statistics().mapped_bytes == 0


async def test_packs_that_are_written_to_are_read(copied: Sample, caplog: pytest.LogCaptureFixture) -> None:
    """And mapped as soon as they are not any more."""
    writing = [os.open(pack, os.O_RDWR) for pack in packs(copied)]
    with caplog.at_level(logging.WARNING, "splitzip_aio"):
        async with open_transport(
            copied.root, device="cpu", ring_bytes="1MiB", arena_bytes=2 * LAYER_BYTES
        ) as transport:
            await stream_all(copied, transport)
            before = transport.statistics()
            for descriptor in writing:
                os.close(descriptor)
            await stream_all(copied, transport)
            after = transport.statistics()
    assert before.mapped_bytes == 0
    assert before.buffered_bytes > 0
    assert after.mapped_bytes > 0
    assert after.fallbacks == ("mapping: a lease on it is refused: it is open for writing elsewhere",)
    assert caplog.text.count("open for writing elsewhere") == 1


async def test_a_pack_cut_short_before_is_named(copied: Sample) -> None:
    async with open_transport(copied.root, device="cpu", ring_bytes="1MiB") as transport:
        for pack in packs(copied):
            os.truncate(pack, 4096)
        with pytest.raises((CorruptDataError, ReadError), match=r"\.szp"):
            await stream_all(copied, transport)
        assert transport.statistics().mapped_bytes == 0


@pytest.mark.parametrize("seed", range(3))
async def test_packs_cut_short_while_they_stream(copied: Sample, seed: int) -> None:
    """Whenever it happens: right bytes or an error of ours, and whoever cuts them does not wait long."""
    waited_s: list[float] = []

    def cut() -> None:
        time.sleep(0.002 * 7**seed)
        for pack in packs(copied):
            began = time.monotonic()
            os.truncate(pack, 4096)
            waited_s.append(time.monotonic() - began)

    cutting = threading.Thread(target=cut)
    failed = False
    async with open_transport(copied.root, device="cpu", ring_bytes="64KiB", arena_bytes=2 * LAYER_BYTES) as transport:
        await stream_all(copied, transport)
        assert transport.statistics().mapped_bytes > 0
        cutting.start()
        with anyio.fail_after(60):
            while not failed:
                for layer in transport.layers:
                    try:
                        await copied.check_prefetch(transport, layer)
                    except (CorruptDataError, ReadError):
                        failed = True
        await anyio.to_thread.run_sync(cutting.join)
    assert len(waited_s) == len(packs(copied))
    assert max(waited_s) < 10


async def test_an_extent_held_too_long_is_an_error_and_no_more(copied: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be trusted any more is not decoded; it is there again for who asks again."""

    def too_late(extent: MappedExtent) -> memoryview:
        raise ReadError(116, "opened for writing while held", "pack")

    async with open_transport(copied.root, device="cpu", ring_bytes="1MiB", arena_bytes=2 * LAYER_BYTES) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(MappedExtent, "memory", property(too_late))
            with pytest.raises(ReadError, match="opened for writing while held"):
                await transport.prefetch(transport.layers[0])
            await settled(transport)
            assert_idle(transport.statistics())
        assert locked_bytes() == 0
        assert opens_for_writing(packs(copied)[0])
        await stream_all(copied, transport)


async def test_what_cannot_be_locked_is_read(copied: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(extent: MappedExtent) -> bool:
        extent._file.refuse("locking it is refused")
        return False

    monkeypatch.setattr(MappedExtent, "lock_mapped", lambda extent: False)
    monkeypatch.setattr(MappedExtent, "lock", refuse)
    async with open_transport(copied.root, device="cpu", ring_bytes="1MiB") as transport:
        await stream_all(copied, transport)
        statistics = transport.statistics()
    assert statistics.mapped_bytes == 0
    assert statistics.io.bytes_read >= statistics.wire_bytes > 0  # from wherever: others may drop the page cache
    assert statistics.fallbacks == ("mapping: locking it is refused",)


async def test_cancelled_while_pages_are_locked(copied: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is left in the middle of it: nothing stays held."""
    locking, go_on = threading.Event(), threading.Event()
    lock = MappedExtent.lock

    def slow(extent: MappedExtent) -> bool:
        locking.set()
        assert go_on.wait(20)
        return lock(extent)

    monkeypatch.setattr(MappedExtent, "lock", slow)
    with anyio.CancelScope() as scope:
        async with (
            open_transport(copied.root, device="cpu", ring_bytes="1MiB") as transport,
            anyio.create_task_group() as group,
        ):
            group.start_soon(transport.prefetch, transport.layers[0])
            await anyio.to_thread.run_sync(locking.wait, 20)
            threading.Timer(0.05, go_on.set).start()
            scope.cancel()
            await anyio.sleep(60)
    assert scope.cancelled_caught
    assert transport.statistics().ring.free == transport.statistics().ring.slots
    assert all(map(opens_for_writing, packs(copied)))


async def test_nothing_is_found_where_no_packs_were_added() -> None:
    assert MappedPacks().find(PlannedRead(0, "a.szp", 0, 4096, ())) is None
