"""The transport: what its callers see of the pipeline, and what keeps the pipeline running."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio
import torch
from anyio.lowlevel import current_token

from splitzip_aio.abc import Arena, ReadDriver
from splitzip_aio.dispatch import Dispatcher
from splitzip_aio.errors import ClosedError, SplitZipError, TransportError, WrongEventLoopError
from splitzip_aio.forecast import Forecast
from splitzip_aio.host_cache import HostTier
from splitzip_aio.loading import FilledSlot
from splitzip_aio.mapped import MappedPacks
from splitzip_aio.packs import PackSource
from splitzip_aio.plan import ExecutionPlan
from splitzip_aio.prefetch import Prefetcher
from splitzip_aio.stages import StageClock
from splitzip_aio.staging import StagingRing
from splitzip_aio.telemetry import TransportStatistics
from splitzip_aio.timeline import Timeline
from splitzip_aio.transport.lease import Lease
from splitzip_aio.transport.residency import Occupant, OccupantState, Residency
from splitzip_aio.waiting import wait_whatever_comes

__all__ = ["Parts", "Transport"]

logger = logging.getLogger(__name__)

_LEAST_AHEAD_BYTES = 256 << 20  # five milliseconds of the fastest link, whatever the ring


@dataclass(frozen=True, slots=True)
class Parts:
    """What a transport is made of, and what it closes."""

    plan: ExecutionPlan
    forecast: Forecast
    ring: StagingRing
    driver: ReadDriver
    files: Sequence[PackSource | None]
    arena: Arena
    tier: HostTier | None
    mapped: MappedPacks
    timeline: Timeline | None
    fallbacks: tuple[str, ...]


class Transport:
    """An open cache, its layers streamed into an arena on demand. Made by ``open_transport``.

    Any number of tasks of one event loop may use it at the same time.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._token = current_token()
        self._process = os.getpid()
        self._clock = StageClock(parts.timeline)
        self._prefetcher = Prefetcher(
            parts.driver,
            parts.ring,
            parts.files,
            self._hand_on,
            tier=parts.tier,
            mapped=parts.mapped,
            clock=self._clock,
        )
        self._dispatcher = Dispatcher(parts.arena, parts.ring, freed=self._prefetcher.go_on, clock=self._clock)
        self._residency = Residency(
            parts.arena,
            parts.plan,
            parts.forecast,
            self._prefetcher.submit,
            ahead_bytes=max(len(parts.ring.slots) * parts.ring.payload_bytes, _LEAST_AHEAD_BYTES),
        )
        self._over: TransportError | None = None
        self._failure: TransportError | None = None
        self._ended = anyio.Event()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in execution order."""
        return self._parts.plan.layers

    @property
    def device(self) -> torch.device:
        """Where layers are decoded to."""
        return self._parts.arena.device

    async def prefetch(self, layer: str) -> Lease:
        """Bring a layer into the arena, and hold it there.

        A layer that is resident or on its way is joined. Where the arena is full, layers that nobody holds make room,
        the least recently used first; while those do not suffice, this waits, in order of arrival. When everyone who
        waits for a layer is cancelled, it is read no further.

        Returns:
            A lease, to be released: ``async with await transport.prefetch(name) as lease``.

        Raises:
            UnknownLayerError: the cache has no such layer.
            LayerTooLargeError: the layer is larger than the arena.
            CorruptDataError: stored bytes of it are wrong; names tensor, pack and offset.
            ReadError: the operating system failed a read.
            ClosedError: the transport is closed, or was while this waited.
            TransportError: streaming broke down; the cause says how.
            WrongEventLoopError: called in another event loop than the transport was opened in.
        """
        self._check_usable()
        occupant = self._residency.hold(layer)
        try:
            await occupant.settled.wait()
            self._check_arrived(occupant)
        except BaseException:
            self._residency.let_go(occupant)
            raise
        return self._lease(occupant)

    def ask(self, layer: str, answer: Callable[[Lease | SplitZipError], None]) -> Callable[[], None]:
        """``prefetch`` without a task that waits: ``answer`` is called, now or later, with what that returns or raises.

        Returns:
            What is to be called if nobody wants the answer any more; ``answer`` may have been called before.
        """
        self._check_usable()
        occupant = self._residency.hold(layer)

        def settled() -> None:
            try:
                self._check_arrived(occupant)
            except SplitZipError as error:
                self._residency.let_go(occupant)
                answer(error)
            else:
                answer(self._lease(occupant))

        def withdraw() -> None:
            if settled in occupant.calls:
                occupant.calls.remove(settled)
                self._residency.let_go(occupant)

        if occupant.settled.is_set():
            settled()
        else:
            occupant.calls.append(settled)
        return withdraw

    def evict(self) -> None:
        """Let go of every layer that is resident and that nobody holds; whoever wants one has it brought anew.

        The arena keeps its memory. For measurements, and for who has written to tensors and wants the stored ones back.
        """
        self._check_usable()
        self._residency.evict()

    def statistics(self) -> TransportStatistics:
        """A snapshot of what the transport is doing and has done."""
        parts = self._parts
        io = parts.driver.statistics()
        host = None if parts.tier is None else parts.tier.cache.statistics()
        unpinned = () if host is None or host.fallback is None else (f"pinned host cache: {host.fallback}",)
        return TransportStatistics(
            device=str(self.device),
            io=io,
            ring=parts.ring.statistics(),
            arena=parts.arena.statistics(),
            residency=self._residency.statistics(),
            time=self._clock.statistics(),
            layers=len(self.layers),
            direct_files=sum(file is not None and file.direct for file in parts.files),
            files=len(parts.files),
            direct_bytes=io.direct_bytes_read,
            buffered_bytes=io.bytes_read - io.direct_bytes_read,
            mapped_bytes=parts.mapped.mapped_bytes,
            host_bytes=0 if parts.tier is None else parts.tier.hit_bytes,
            host=host,
            wire_bytes=self._dispatcher.wire_bytes,
            decoded_bytes=self._dispatcher.decoded_bytes,
            fallbacks=(*parts.fallbacks, *unpinned, *parts.mapped.fallbacks),
        )

    async def aclose(self) -> None:
        """Close, once what is in flight has landed; who waits for a layer gets ClosedError, leases end. Idempotent.

        Raises:
            WrongEventLoopError: called in another event loop than the transport was opened in.
        """
        self._check_loop()
        self._stop(ClosedError("the transport is closed"))
        await wait_whatever_comes(self._ended)

    @property
    def failure(self) -> TransportError | None:
        """What broke streaming down, if anything did."""
        return self._failure

    async def serve(self, resources: AsyncExitStack) -> None:
        """Run the pipeline until the transport is closed, then free ``resources``; not cut short by cancellation."""
        try:
            with anyio.CancelScope(shield=True):
                async with resources:
                    await self._stream()
        except Exception as exc:  # noqa: BLE001 - raised where the transport is left
            self._break_down(exc)
        finally:
            self._clock.stop()
            self._ended.set()

    async def _stream(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._dispatcher.run)
                await self._prefetcher.run()
                self._dispatcher.close()
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._break_down(exc)

    def _hand_on(self, filled: FilledSlot) -> None:
        self._dispatcher.take(filled)

    def _break_down(self, cause: Exception) -> None:
        logger.error("streaming broke down", exc_info=cause)
        if self._failure is None:
            self._failure = TransportError(f"streaming broke down: {_first(cause)!r}")
            self._failure.__cause__ = cause
        self._stop(self._failure)

    def _stop(self, reason: TransportError) -> None:
        if self._over is None:
            self._over = reason
            self._residency.close(reason)
            self._prefetcher.close()

    def _lease(self, occupant: Occupant) -> Lease:
        ended = self._clock.lease(occupant.plan.name, occupant.plan.nbytes)
        return Lease(occupant, self._parts.arena, self._residency, ended=ended)

    def _check_usable(self) -> None:
        self._check_loop()
        if self._over is not None:
            raise _again(self._over)

    def _check_loop(self) -> None:
        if os.getpid() != self._process:
            raise WrongEventLoopError(
                f"the transport was opened in process {self._process} and cannot be used in its child {os.getpid()}; "
                "open one there"
            )
        if current_token() != self._token:
            raise WrongEventLoopError("a transport belongs to the event loop it was opened in; open one in each")

    def _check_arrived(self, occupant: Occupant) -> None:
        error = occupant.error or self._over
        if occupant.state is not OccupantState.RESIDENT and error is not None:
            raise _again(error)


def _again(error: SplitZipError) -> SplitZipError:
    """The same error for one more caller: an exception that is raised twice mixes up its tracebacks."""
    another = copy.copy(error)
    another.__cause__ = error.__cause__
    return another


def _first(exc: BaseException) -> BaseException:
    """What began a group of exceptions."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc
