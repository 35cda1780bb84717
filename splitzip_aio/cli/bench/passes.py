"""Passes over a cache through the transport, from each place that it can be read from."""

from __future__ import annotations

import enum
import os
import platform
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import anyio
import torch

import splitzip_aio
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.cli.bench.workload import Workload, drop_from_page_cache, load_into_page_cache
from splitzip_aio.cli.demo import Comparison
from splitzip_aio.cli.streaming import Visit
from splitzip_aio.codec import cpu
from splitzip_aio.errors import CorruptDataError, SplitZipError
from splitzip_aio.host_cache import HostCache
from splitzip_aio.telemetry import TransportStatistics
from splitzip_aio.timeline import Timeline

__all__ = ["Pass", "Streamer", "Tier", "processor"]

_ASKED_FOR = 3


class Tier(enum.Enum):
    """Where the packs are when a pass begins."""

    DISK = "disk"
    PAGE_CACHE = "page cache"
    HOST = "host tier"


def processor(device: torch.device) -> str:
    """The GPU's name, or what decodes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {cpu.implementation()}"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: seconds from the first request until the last layer was there, and the transport's account."""

    seconds: float
    statistics: TransportStatistics


@dataclass(frozen=True, slots=True)
class Streamer:
    """How to stream a workload.

    Attributes:
        workload: what.
        device: where to.
        ring_bytes: of the staging ring.
        arena_bytes: of the arena.
        host: what the host tier keeps, from its first pass on.
    """

    workload: Workload
    device: torch.device
    ring_bytes: int
    arena_bytes: int
    host: HostCache

    def ready(self, tier: Tier) -> None:
        """Bring the packs to where ``tier`` says, but for the host tier, which the pass that verifies fills."""
        if tier is Tier.DISK:
            drop_from_page_cache(self.workload.packs)
        elif tier is Tier.PAGE_CACHE:
            load_into_page_cache(self.workload.packs)

    def run(self, tier: Tier, *, timeline: Timeline | None = None, visit: Visit | None = None) -> Pass:
        """One pass, after ``ready``.

        Raises:
            SplitZipError: streaming failed, or stored bytes are wrong.
        """
        return anyio.run(partial(self._stream, tier, timeline=timeline, visit=visit))

    def verify(self, tier: Tier) -> None:
        """One pass, each tensor compared with the source.

        Raises:
            CorruptDataError: one differs.
        """
        self.ready(tier)
        with Comparison(open_checkpoint(self.workload.checkpoint)) as comparison:
            self.run(tier, visit=comparison.visit)
        if comparison.differing:
            raise CorruptDataError(
                f"{len(comparison.differing)} tensors from the {tier.value} differ from {self.workload.checkpoint}, "
                f"{min(comparison.differing)!r} among them; no speed is reported"
            )

    async def run_for(self, tier: Tier, seconds: float) -> None:
        """Pass after pass in the running event loop, for at least so long, with one transport."""
        async with self._open(tier, timeline=None) as transport:
            began = time.perf_counter()
            while time.perf_counter() < began + seconds:
                await self._pass(transport, None)

    async def _stream(self, tier: Tier, *, timeline: Timeline | None, visit: Visit | None) -> Pass:
        async with self._open(tier, timeline=timeline) as transport:
            return await self._pass(transport, visit)

    async def _pass(self, transport: splitzip_aio.Transport, visit: Visit | None) -> Pass:
        """Ask for each layer in order, and for the two after it, as a caller does who knows what comes next."""
        layers = transport.layers
        arrived = [anyio.Event() for _ in layers]
        leases: dict[int, splitzip_aio.Lease] = {}
        failures: list[SplitZipError] = []
        began = time.perf_counter()
        async with anyio.create_task_group() as group:

            async def fetch(place: int) -> None:
                try:
                    leases[place] = await transport.prefetch(layers[place])
                except SplitZipError as error:
                    failures.append(error)  # raised here, it would come out as a group
                    group.cancel_scope.cancel()
                arrived[place].set()

            for place in range(min(_ASKED_FOR, len(layers))):
                group.start_soon(fetch, place)
            for place, event in enumerate(arrived):
                await event.wait()
                async with leases.pop(place) as lease:
                    if visit is not None:
                        visit(lease.tensors)
                if place + _ASKED_FOR < len(layers):
                    group.start_soon(fetch, place + _ASKED_FOR)
        if failures:
            raise failures[0]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Pass(time.perf_counter() - began, transport.statistics())

    def _open(self, tier: Tier, *, timeline: Timeline | None) -> AbstractAsyncContextManager[splitzip_aio.Transport]:
        return splitzip_aio.open_transport(
            self.workload.cache,
            device=self.device,
            ring_bytes=self.ring_bytes,
            arena_bytes=self.arena_bytes,
            host_cache=self.host if tier is Tier.HOST else None,
            timeline=timeline,
        )
