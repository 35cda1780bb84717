"""Where bytes come from: past the page cache, or out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from splitzip_aio.abc import IOMode
from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.drivers import DriverFactory, open_driver
from splitzip_aio.drivers.faults import FaultSchedule, faulty_driver
from splitzip_aio.drivers.files import direct_support
from splitzip_aio.drivers.page_cache import PageCache
from splitzip_aio.packs import PackSource
from splitzip_aio.transport import Transport, open_transport
from tests.transport.samples import Sample, settled

pytestmark = pytest.mark.anyio

READERS = pytest.mark.parametrize(
    ("driver", "way", "other"),
    [
        pytest.param("auto", "mapped_bytes", "buffered_bytes", id="mapped"),
        # A driver whose reads may fail makes every one of them.
        pytest.param(faulty_driver(FaultSchedule(rate=0.0)), "buffered_bytes", "mapped_bytes", id="read"),
    ],
)
"""Who brings what the page cache has, what counts it, and what does not."""


class Packs:
    """The packs of a cache, and how many of their pages the page cache holds."""

    def __init__(self, root: Path) -> None:
        self.descriptors = [os.open(path, os.O_RDONLY) for path in sorted((root / "packs").iterdir())]
        self.sizes = [os.fstat(descriptor).st_size for descriptor in self.descriptors]
        self.mapped: list[mmap.mmap] = []

    def evict(self) -> None:
        self.unmap()
        for descriptor in self.descriptors:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def fill(self, count: int) -> None:
        """Map the first ``count`` packs: pages that are mapped stay, also where someone else drops all caches."""
        for descriptor in self.descriptors[:count]:
            self.mapped.append(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ))

    def unmap(self) -> None:
        while self.mapped:
            self.mapped.pop().close()

    @property
    def cached_pages(self) -> int:
        libc = ctypes.CDLL(None)
        total = 0
        for descriptor, size in zip(self.descriptors, self.sizes, strict=True):
            counts = (ctypes.c_uint64 * 5)()
            if libc.syscall(ctypes.c_long(451), descriptor, (ctypes.c_uint64 * 2)(0, size), counts, 0) != 0:
                pytest.skip("no cachestat here")
            total += counts[0]
        return total


@pytest.fixture
def packs(sample: Sample) -> Iterator[Packs]:
    packs = Packs(sample.root)
    if not direct_support(packs.descriptors[0]).supported:
        pytest.skip("no direct I/O here")
    yield packs
    packs.unmap()
    for descriptor in packs.descriptors:
        os.close(descriptor)


async def stream(sample: Sample, io: IOMode, *, driver: DriverFactory | Literal["auto"] = "auto") -> Transport:
    async with open_transport(sample.root, device="cpu", ring_bytes="1MiB", io=io, driver=driver) as transport:
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
    return transport


@pytest.mark.parametrize("io", ["auto", "direct"])
async def test_a_cold_cache_leaves_the_page_cache_as_it_was(sample: Sample, packs: Packs, io: IOMode) -> None:
    packs.evict()
    assert packs.cached_pages == 0
    statistics = (await stream(sample, io)).statistics()
    assert packs.cached_pages == 0
    assert statistics.buffered_bytes == 0
    assert statistics.direct_bytes == statistics.io.bytes_read > 0


@READERS
async def test_a_warm_cache_is_served_by_the_page_cache(
    sample: Sample, packs: Packs, driver: DriverFactory | Literal["auto"], way: str, other: str
) -> None:
    packs.fill(len(packs.descriptors))
    statistics = (await stream(sample, "auto", driver=driver)).statistics()
    assert statistics.direct_files == statistics.files
    assert statistics.direct_bytes == 0
    assert getattr(statistics, other) == 0
    assert getattr(statistics, way) >= statistics.wire_bytes > 0
    assert statistics.fallbacks == ()


@READERS
async def test_each_extent_comes_from_where_it_is(
    sample: Sample, packs: Packs, driver: DriverFactory | Literal["auto"], way: str, other: str
) -> None:
    packs.evict()
    packs.fill(1)
    before = packs.cached_pages
    statistics = (await stream(sample, "auto", driver=driver)).statistics()
    assert packs.cached_pages == before > 0
    assert statistics.direct_bytes > 0
    assert getattr(statistics, way) > 0
    assert getattr(statistics, other) == 0


async def test_orders_are_followed_whatever_is_cached(sample: Sample, packs: Packs) -> None:
    packs.fill(len(packs.descriptors))
    assert (await stream(sample, "direct")).statistics().buffered_bytes == 0
    packs.evict()
    assert (await stream(sample, "buffered")).statistics().direct_bytes == 0
    assert packs.cached_pages > 0


@pytest.mark.parametrize(("io", "told"), [("auto", True), ("buffered", True), ("direct", False)])
async def test_the_driver_is_told_what_the_page_cache_has(sample: Sample, packs: Packs, io: IOMode, told: bool) -> None:
    with SplitZipShardCache(sample.root) as cache:
        async with open_driver("threads", buffers=[memoryview(bytearray(4096))]) as driver:
            pack = PackSource(driver, cache.open_pack(0), str(cache.pack_path(0)), io=io)
            packs.evict()
            assert not pack.handle(0, 4096).cached
            packs.fill(1)
            assert pack.handle(0, 4096).cached == told
            pack.close()


async def test_a_page_cache_that_cannot_be_asked_is_a_fallback(
    sample: Sample, packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageCache, "_choose", lambda self: (setattr(self, "reason", "no"), (None, None))[1])
    statistics = (await stream(sample, "auto")).statistics()
    assert statistics.buffered_bytes == 0
    assert statistics.fallbacks == ("page cache: never read from, no",)
