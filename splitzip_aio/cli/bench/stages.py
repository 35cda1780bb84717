"""Each stage of a stream alone: reading with the same driver and ring, copying slots, decoding what has landed."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.abc import Arena, PlannedRead
from splitzip_aio.arena import CudaArena, HostArena
from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.cli.bench.workload import Workload
from splitzip_aio.codec import cpu
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.slot_table import SlotTable
from splitzip_aio.drivers import open_driver
from splitzip_aio.errors import CorruptDataError
from splitzip_aio.host_cache import HostCache
from splitzip_aio.packs import PackSource
from splitzip_aio.plan import ExecutionPlan, largest_read_bytes
from splitzip_aio.staging import StagingRing, split_ring

__all__ = ["Stages"]

_LANDED_BYTES = 4 << 30  # encoded bytes that are decoded over and over, at most
_LANDING_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class _Landed:
    """A slot's payload in memory, where its segments decode to, and how large they are."""

    read: PlannedRead
    payload: NDArray[np.uint8]
    destinations: NDArray[np.int64]


class Stages:
    """The reads of a whole cache, as a transport with the same ring makes them.

    Args:
        workload: the cache.
        device: where it would be decoded.
        ring_bytes: of the staging ring.

    Attributes:
        layers: how many the cache has.
        reads: all of them, in execution order.
        wire_bytes: bytes that they read.
    """

    def __init__(self, workload: Workload, device: torch.device, ring_bytes: int) -> None:
        self._cache_root = workload.cache
        self._device = device
        self._kind: type[Arena] = CudaArena if device.type == "cuda" else HostArena
        with SplitZipShardCache(workload.cache) as cache:
            entries = list(cache.tensors.values())
            packs = [str(cache.pack_path(number)) for number in range(len(cache.manifest.packs))]
        self._slots, self._payload_bytes = split_ring(
            ring_bytes, largest_read_bytes=largest_read_bytes(entries), table_bytes=self._kind.table_bytes
        )
        plan = ExecutionPlan(entries, packs=packs, slot_bytes=self._payload_bytes, max_segments=self._kind.max_segments)
        self.layers = len(plan.layers)
        self.reads: Sequence[PlannedRead] = [read for layer in plan.layers for read in plan.layer(layer).reads]
        self.wire_bytes = sum(read.nbytes for read in self.reads)

    def read(self, *, settled: bool = False) -> float:
        """Seconds in which the driver reads everything, from wherever it is now, all slots at work.

        ``settled`` reads it once before, and at once again.
        """
        with self._ring() as ring:
            return anyio.run(self._read, ring, 1 + settled)

    def copy(self, host: HostCache | None = None) -> float:
        """Seconds in which everything goes to the device, slot after slot, from the ring or from a host cache's memory.

        It was copied just before. A ring stays in the processor's cache, if that is large, and a host cache does not.
        """
        with self._ring() as ring, torch.cuda.device(self._device):
            if host is None:
                slots = itertools.cycle(ring.slots)
                extents = [next(slots).memory[: read.nbytes] for read in self.reads]
            else:
                extents = host.extents()
            sources = [torch.frombuffer(extent, dtype=torch.uint8) for extent in extents]
            largest = max(source.numel() for source in sources)
            landing = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(_LANDING_BUFFERS)]
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            times = []
            for _ in range(2):
                began = time.perf_counter()
                with torch.cuda.stream(stream):
                    for source, target in zip(sources, itertools.cycle(landing), strict=False):
                        target[: source.numel()].copy_(source, non_blocking=True)
                stream.synchronize()
                times.append(time.perf_counter() - began)
            return times[-1]

    def decodes(self) -> Generator[float, None, None]:
        """Seconds in which everything is decoded once it has landed, each time it is asked for; it was just before.

        Of a large cache the first 4 GiB are decoded, and the seconds are scaled. On the CPU by as many threads as the
        arena has.

        Raises:
            CorruptDataError: decoded bytes fail their checksum.
        """
        landed = list(self._land())
        scale = self.wire_bytes / max(sum(each.payload.size for each in landed), 1)
        measure = self._decode_on_device if self._device.type == "cuda" else self._decode_here
        for seconds in measure(landed):
            yield seconds * scale

    @contextmanager
    def _ring(self) -> Iterator[StagingRing]:
        table_bytes = self._kind.table_bytes(self._payload_bytes)
        pinned = self._device.type == "cuda"
        with StagingRing(self._slots, self._payload_bytes, table_bytes=table_bytes, pinned=pinned) as ring:
            for slot in ring.slots:
                np.frombuffer(slot.memory, np.uint8).fill(0)  # committed before anything is timed
            yield ring

    async def _read(self, ring: StagingRing, rounds: int) -> float:
        times = []
        with SplitZipShardCache(self._cache_root) as cache:
            async with open_driver("auto", buffers=[slot.payload for slot in ring.slots]) as driver:
                packs = [
                    PackSource(driver, cache.open_pack(number), str(cache.pack_path(number)), io="auto")
                    for number in range(len(cache.manifest.packs))
                ]

                async def fill(slot: int, waiting: Iterator[PlannedRead]) -> None:
                    for read in waiting:
                        file = packs[read.pack].handle(read.offset, read.nbytes)
                        await driver.read(file, slot, 0, offset=read.offset, nbytes=read.nbytes)

                for _ in range(rounds):
                    waiting, began = iter(self.reads), time.perf_counter()
                    async with anyio.create_task_group() as group:
                        for slot in range(len(ring.slots)):
                            group.start_soon(fill, slot, waiting)
                    times.append(time.perf_counter() - began)
                for pack in packs:
                    pack.close()
        return times[-1]

    def _land(self) -> Iterator[_Landed]:
        """The first reads, in memory; each decodes to a place of its own, one after another."""
        size = decoded = 0
        with SplitZipShardCache(self._cache_root) as cache:
            for read in self.reads:
                if size + read.nbytes > _LANDED_BYTES:
                    return
                size += read.nbytes
                starts = decoded + np.cumsum([0] + [_aligned(segment.decoded_bytes) for segment in read.segments])
                decoded = int(starts[-1])
                payload = np.fromfile(cache.pack_path(read.pack), np.uint8, read.nbytes, offset=read.offset)
                yield _Landed(read, payload, starts[:-1])

    def _decode_here(self, landed: Sequence[_Landed]) -> Iterator[float]:
        out = np.empty(_end(landed), np.uint8)
        work = [
            (
                each.payload[segment.source : segment.source + segment.nbytes],
                out[start : start + segment.decoded_bytes],
            )
            for each in landed
            for segment, start in zip(each.read.segments, each.destinations.tolist(), strict=True)
        ]
        decode = partial(cpu.decode_segment, where="benchmark")
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            while True:
                list(pool.map(decode, *zip(*work, strict=True)))
                began = time.perf_counter()
                list(pool.map(decode, *zip(*work, strict=True)))
                yield time.perf_counter() - began

    def _decode_on_device(self, landed: Sequence[_Landed]) -> Iterator[float]:
        from splitzip_aio.codec.gpu import GpuSplitZipDecoder

        with torch.cuda.device(self._device):
            decoder = GpuSplitZipDecoder()
            out = torch.empty(_end(landed), dtype=torch.uint8, device=self._device)
            slots = [self._slot(each, out) for each in landed]

            def decode() -> list[torch.Tensor]:
                return [decoder.decode_slot(slot, each.payload.size, table) for each, (slot, table) in slots]

            checksums = [found.cpu().numpy().view(np.uint64) for found in decode()]
            _check(checksums, [table for _, (_, table) in slots])
            while True:
                decode()
                torch.cuda.synchronize()
                began = time.perf_counter()
                decode()
                torch.cuda.synchronize()
                yield time.perf_counter() - began

    def _slot(self, landed: _Landed, out: torch.Tensor) -> tuple[_Landed, tuple[torch.Tensor, SlotTable]]:
        """The slot on the device, its table behind the payload as ``CudaArena`` puts it."""
        sources = [segment.source for segment in landed.read.segments]
        sizes = [segment.nbytes for segment in landed.read.segments]
        headers = SegmentHeaders.parse(landed.payload.data, sources, sizes, where=lambda place: f"segment {place}")
        view = bytearray(self._kind.table_bytes(landed.payload.size))
        table = SlotTable.build(headers, sources, out.data_ptr() + landed.destinations, memoryview(view))
        host = np.concatenate([landed.payload, np.frombuffer(view, np.uint8)[: table.nbytes]])
        return landed, (torch.from_numpy(host).to(out.device), table)


def _check(checksums: Iterable[NDArray[np.uint64]], tables: Iterable[SlotTable]) -> None:
    for place, (found, table) in enumerate(zip(checksums, tables, strict=True)):
        wrong = table.failures(found)
        if wrong:
            raise CorruptDataError(f"slot {place}: segments {wrong} fail their checksum; no speed is reported")


def _end(landed: Sequence[_Landed]) -> int:
    last = landed[-1]
    return int(last.destinations[-1]) + _aligned(last.read.segments[-1].decoded_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
