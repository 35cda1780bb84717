"""Passes over a cache through the transport, from each place that it can be read from."""

from __future__ import annotations

import enum
import os
import platform
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

import splitzip_aio
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.cli.bench.workload import Workload, drop_from_page_cache, load_into_page_cache
from splitzip_aio.cli.demo import Comparison
from splitzip_aio.cli.streaming import Visit
from splitzip_aio.codec import cpu
from splitzip_aio.errors import CorruptDataError, SplitZipError
from splitzip_aio.host_cache import HostCache
from splitzip_aio.telemetry import TimeStatistics, TransportStatistics
from splitzip_aio.timeline import Timeline

__all__ = ["Pass", "Passes", "Streamer", "Tier", "processor"]

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
    """One pass: seconds from the first request until the last layer was decoded; the transport's account around it."""

    seconds: float
    before: TransportStatistics
    after: TransportStatistics

    @property
    def waited(self) -> TimeStatistics:
        """What the pass waited for."""
        before, after = asdict(self.before.time), asdict(self.after.time)
        return TimeStatistics(**{name: after[name] - before[name] for name in after})

    @property
    def direct_bytes(self) -> int:
        """Bytes read past the page cache."""
        return self.after.direct_bytes - self.before.direct_bytes

    @property
    def buffered_bytes(self) -> int:
        """Bytes read through the page cache."""
        return self.after.buffered_bytes - self.before.buffered_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes decoded from where the page cache has them."""
        return self.after.mapped_bytes - self.before.mapped_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes from the host tier."""
        return self.after.host_bytes - self.before.host_bytes


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

    @contextmanager
    def open(self, tier: Tier, *, timeline: Timeline | None = None) -> Iterator[Passes]:
        """A transport in an event loop of its own, for pass after pass."""
        transport = splitzip_aio.open_transport(
            self.workload.cache,
            device=self.device,
            ring_bytes=self.ring_bytes,
            arena_bytes=self.arena_bytes,
            host_cache=self.host if tier is Tier.HOST else None,
            timeline=timeline,
        )
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(transport) as opened:
            yield Passes(portal, opened)

    def run(self, tier: Tier, *, timeline: Timeline | None = None, visit: Visit | None = None) -> Pass:
        """One pass of a transport opened for it, after ``ready``.

        Raises:
            SplitZipError: streaming failed, or stored bytes are wrong.
        """
        with self.open(tier, timeline=timeline) as passes:
            return passes.run(visit)

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


class Passes:
    """Passes of one transport, each from an empty arena."""

    def __init__(self, portal: BlockingPortal, transport: splitzip_aio.Transport) -> None:
        self._portal = portal
        self._transport = transport

    def run(self, visit: Visit | None = None) -> Pass:
        """One pass.

        Raises:
            SplitZipError: streaming failed, or stored bytes are wrong.
        """
        return self._portal.call(self._run, visit)

    def run_beside(self, task: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        """Pass after pass for at least so long, and ``task`` in the same event loop until then."""
        self._portal.call(self._run_beside, task, seconds)

    async def _run(self, visit: Visit | None) -> Pass:
        await self._empty()
        before = self._transport.statistics()
        began = time.perf_counter()
        await self._visit_all(visit)
        # A layer arrives once the device has decoded it. What is on its way by now is read ahead for the next round.
        seconds = time.perf_counter() - began
        after = self._transport.statistics()
        await self._rest()
        return Pass(seconds, before, after)

    async def _run_beside(self, task: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(task)
            began = time.perf_counter()
            while time.perf_counter() < began + seconds:
                await self._visit_all(None)
            group.cancel_scope.cancel()

    async def _rest(self) -> None:
        """Wait for what is read ahead for the next round, so that nothing runs beside what is timed next."""
        while self._transport.statistics().residency.loading:  # noqa: ASYNC110 - nothing announces it
            await anyio.sleep(0.001)

    async def _empty(self) -> None:
        """Let go of everything, also of what is read ahead."""
        await self._rest()
        self._transport.evict()

    async def _visit_all(self, visit: Visit | None) -> None:
        """Ask for each layer in order, and for the two after it, as a caller does who knows what comes next."""
        layers = self._transport.layers
        arrived = [anyio.Event() for _ in layers]
        leases: dict[int, splitzip_aio.Lease] = {}
        failures: list[SplitZipError] = []
        async with anyio.create_task_group() as group:

            async def fetch(place: int) -> None:
                try:
                    leases[place] = await self._transport.prefetch(layers[place])
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
