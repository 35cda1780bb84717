"""Layers that come from the host tier: the same bytes, counted, shared, and read anew when they are wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
import torch

from splitzip_aio.arena import HostArena
from splitzip_aio.errors import ClosedError, CorruptDataError, InvalidArgumentError
from splitzip_aio.host_cache import HostCache
from splitzip_aio.transport import Transport, open_transport
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

pytestmark = pytest.mark.anyio

OPTIONS = {"ring_bytes": "1MiB", "arena_bytes": 2 * LAYER_BYTES}


@pytest.fixture
def host(device: str) -> Iterator[HostCache]:
    with HostCache("64MiB", pinned=device == "cuda") as host:
        yield host
        assert host.statistics().held == 0


async def rounds(sample: Sample, transport: Transport, count: int = 1) -> None:
    for layer in transport.layers * count:
        await sample.check_prefetch(transport, layer)
    await settled(transport)


async def test_later_rounds_read_no_file(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, host_cache_bytes="64MiB", **OPTIONS) as transport:
        await rounds(sample, transport)
        first = transport.statistics()
        await rounds(sample, transport, 3)
        last = transport.statistics()
    assert first.io.bytes_read == last.io.bytes_read == first.direct_bytes + first.buffered_bytes > 0
    assert last.host_bytes > 2 * first.io.bytes_read
    assert first.host is not None
    assert last.host is not None
    assert last.host.misses == last.host.admissions == last.host.entries == first.host.entries >= 10
    assert last.host.bytes >= first.io.bytes_read
    assert last.host.pinned == (device == "cuda")
    assert last.host.evictions == last.host.held == 0
    assert last.decoded_bytes > 3 * first.decoded_bytes
    assert_idle(last)
    after = transport.statistics().host
    assert after is not None
    assert after.bytes == 0


async def test_a_loop_finds_as_much_as_there_is_room_for(sample: Sample) -> None:
    """Half of the bytes fit, so half of what is asked for is found; plain LRU would find none."""
    async with open_transport(sample.root, device="cpu", host_cache_bytes="64MiB", **OPTIONS) as transport:
        await rounds(sample, transport)
        host = transport.statistics().host
    assert host is not None
    async with open_transport(sample.root, device="cpu", host_cache_bytes=host.bytes // 2, **OPTIONS) as transport:
        await rounds(sample, transport)
        before = transport.statistics()
        await rounds(sample, transport, 10)
        after = transport.statistics()
    found, read = after.host_bytes - before.host_bytes, after.io.bytes_read - before.io.bytes_read
    assert 0.4 <= found / (found + read) <= 0.6
    assert after.host is not None
    assert after.host.bytes <= after.host.capacity_bytes
    assert after.host.evictions == 0


async def test_what_is_found_is_decoded_from_where_it_is(
    sample: Sample, host: HostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    submit = HostArena.submit

    def spy(self: HostArena, memory: memoryview, *arguments: object, **options: object) -> object:
        seen.append(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
        return submit(self, memory, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HostArena, "submit", spy)
    async with open_transport(sample.root, device="cpu", host_cache=host, **OPTIONS) as transport:
        await rounds(sample, transport, 2)
        entries = {torch.frombuffer(entry.memory, dtype=torch.uint8).data_ptr() for entry in host._entries.values()}
    assert set(seen) <= entries


async def test_transports_share_it(sample: Sample, device: str, host: HostCache) -> None:
    async with open_transport(sample.root, device=device, host_cache=host, **OPTIONS) as transport:
        await rounds(sample, transport)
    async with open_transport(sample.root, device=device, host_cache=host, **OPTIONS) as transport:
        await rounds(sample, transport)
        assert transport.statistics().io.bytes_read == 0
        assert transport.statistics().host_bytes > 0


async def test_transports_use_it_at_the_same_time(sample: Sample, device: str, host: HostCache) -> None:
    """Also the same extent: one of them then copies it, since each writes a table of its own behind it."""
    async with (
        open_transport(sample.root, device=device, host_cache=host, **OPTIONS) as one,
        open_transport(sample.root, device=device, host_cache=host, **OPTIONS) as other,
        anyio.create_task_group() as group,
    ):
        for transport in (one, other):
            group.start_soon(rounds, sample, transport, 5)


async def test_an_extent_in_use_elsewhere_is_copied(sample: Sample, device: str, host: HostCache) -> None:
    async with open_transport(sample.root, device=device, host_cache=host, **OPTIONS) as transport:
        await rounds(sample, transport)
        holds = [host.find(key, 0) for key in list(host._entries)]
        assert all(hold is not None and hold.claim(0) for hold in holds)
        before = transport.statistics()
        await rounds(sample, transport)
        assert transport.statistics().io.bytes_read == before.io.bytes_read
        assert transport.statistics().host_bytes > before.host_bytes
        for hold in holds:
            assert hold is not None
            hold.release()


def test_event_loops_in_threads_share_it(sample: Sample) -> None:
    errors: list[BaseException] = []

    async def stream() -> None:
        async with open_transport(sample.root, device="cpu", host_cache=host, **OPTIONS) as transport:
            await rounds(sample, transport, 3)

    def run() -> None:
        try:
            asyncio.run(stream())
        except BaseException as exc:  # noqa: BLE001 - raised in the test's own thread
            errors.append(exc)

    with HostCache("64MiB", pinned=False) as host:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert host.statistics().held == 0


async def test_wrong_bytes_are_dropped_and_read_anew(
    sample: Sample, device: str, host: HostCache, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    shutil.copytree(sample.root, root)
    pack = min((root / "packs").iterdir())
    sound = pack.read_bytes()
    with pack.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([sound[400] ^ 1]), 400)
    async with open_transport(root, device=device, host_cache=host, **OPTIONS) as transport:
        layer = transport.layers[0]
        for _ in range(2):
            with pytest.raises(CorruptDataError, match=r"blocks\.0"):
                await transport.prefetch(layer)
        await settled(transport)
        assert host.statistics().hits < host.statistics().misses
        with pack.open("r+b") as file:  # the file is the one that is open, repaired
            os.pwrite(file.fileno(), sound[400:401], 400)
        await sample.check_prefetch(transport, layer)


async def test_another_file_is_not_taken_for_the_one_before(
    sample: Sample, device: str, host: HostCache, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    for _ in range(2):
        shutil.copytree(sample.root, root)
        async with open_transport(root, device=device, host_cache=host, **OPTIONS) as transport:
            await rounds(sample, transport)
            assert transport.statistics().io.bytes_read > 0
        shutil.rmtree(root)


async def test_cancelled_prefetches_let_go(sample: Sample, device: str, host: HostCache) -> None:
    async with open_transport(sample.root, device=device, host_cache=host, **OPTIONS) as transport:
        for delay in range(60):
            with anyio.move_on_after(delay * 2e-4):
                await rounds(sample, transport)
        await settled(transport)
        assert_idle(transport.statistics())
        assert host.statistics().held == 0
        await rounds(sample, transport)


async def test_impossible_options(sample: Sample, host: HostCache) -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        async with open_transport(sample.root, device="cpu", host_cache=host, host_cache_bytes=1):
            pass
    host.close()
    with pytest.raises(ClosedError, match="host cache is closed"):
        async with open_transport(sample.root, device="cpu", host_cache=host):
            pass


@pytest.mark.slow
async def test_opening_and_closing_leaves_nothing(sample: Sample, device: str) -> None:
    """80 cycles: descriptors, threads and memory as after the first ten."""

    async def cycle() -> None:
        async with open_transport(sample.root, device=device, host_cache_bytes="8MiB", **OPTIONS) as transport:
            for layer in transport.layers[:3]:
                await sample.check_prefetch(transport, layer)

    for _ in range(10):
        await cycle()
    before = resources()
    for _ in range(80):
        await cycle()
    after = resources()
    assert after.descriptors == before.descriptors
    assert after.threads <= before.threads + 2  # workers come and go
    assert after.locked_bytes == before.locked_bytes
    assert after.resident_bytes <= before.resident_bytes + (6 << 20)


class Resources(NamedTuple):
    descriptors: int
    threads: int
    locked_bytes: int
    resident_bytes: int


def resources() -> Resources:
    """What this process has of each."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    locked, resident = (int(status[name].split()[0]) << 10 for name in ("VmLck", "VmRSS"))
    return Resources(len(os.listdir("/proc/self/fd")), threading.active_count(), locked, resident)
