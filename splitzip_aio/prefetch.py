"""The prefetcher: fills staging slots with what layers need, those first that someone waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectSendStream

from splitzip_aio.abc import Hold, PlannedRead, ReadDriver
from splitzip_aio.drivers.mapped_file import MappedExtent
from splitzip_aio.errors import BusyError, CorruptDataError, SplitZipError
from splitzip_aio.host_cache import HostHold, HostTier
from splitzip_aio.loading import FilledSlot, Load
from splitzip_aio.mapped import MappedPacks
from splitzip_aio.packs import PackSource
from splitzip_aio.stages import StageClock
from splitzip_aio.staging import Slot, StagingRing
from splitzip_aio.waiting import finish_whatever_comes, wait_whatever_comes

__all__ = ["Prefetcher"]


class _Fill(NamedTuple):
    """A slot to fill, and with what of which load; ``ended`` is to be called when that is over."""

    slot: Slot
    load: Load
    read: PlannedRead
    ended: Callable[[], None]


class Prefetcher:
    """Takes reads from loads, and sends filled slots on.

    As many reads are in flight as there are free slots. A read is chosen only once there is a slot for it, so a load
    that is cancelled meanwhile costs nothing.

    Args:
        driver: reads into the ring's slots, which are its buffers.
        ring: the staging ring.
        files: packs by index, read by ``driver``; None for one that is missing.
        output: where filled slots go; it has room for every slot, so the ring alone holds reading back.
        tier: where reads are found, and kept for later rounds; None if there is no such place.
        mapped: where reads are found that need not be made, unless there is a ``tier``; None if there is no such place.
        clock: told of each wait; by default nobody is.
        meanwhile: called whenever something of a read arrived; see ``ReadDriver.reap``.
    """

    def __init__(
        self,
        driver: ReadDriver,
        ring: StagingRing,
        files: Sequence[PackSource | None],
        output: MemoryObjectSendStream[FilledSlot],
        *,
        tier: HostTier | None = None,
        mapped: MappedPacks | None = None,
        clock: StageClock | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._driver = driver
        self._meanwhile = meanwhile
        self._ring = ring
        self._files = files
        self._output = output
        self._tier = tier
        self._mapped = mapped or MappedPacks()
        self._clock = clock or StageClock()
        self._loads: deque[Load] = deque()
        self._wake = anyio.Event()
        self._begun = anyio.Event()
        self._closing = self._over = False

    def submit(self, load: Load) -> None:
        """Read a layer after those submitted before; an urgent one before those that are not."""
        self._loads.append(load)
        self._wake.set()

    def close(self) -> None:
        """End ``run`` once no submitted load has reads queued, and what is in flight was sent on."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Fill slots until ``close``; then close the output."""
        async with self._output, anyio.create_task_group() as group:
            group.start_soon(self._reap)
            while await self._wait_for_load():
                slot = await self._acquire()
                load = self._next_load()
                if load is None:
                    self._ring.release(slot)
                elif self._begin(slot, load, group):
                    await checkpoint()  # whoever decodes it need not wait until every slot is filled
            self._over = True
            self._begun.set()

    async def _reap(self) -> None:
        """Have the driver call back for every read; nobody else does.

        Whatever comes, for what is begun: those who wait for a read while the others are cancelled wait for this.
        """
        try:
            while True:
                await self._driver.reap(meanwhile=self._meanwhile)
                if self._over:
                    return
                self._begun = anyio.Event()
                await self._begun.wait()
        except GeneratorExit:  # torn down with its event loop: nothing can be waited for
            raise
        except BaseException:
            await finish_whatever_comes(self._driver.reap)
            raise

    async def _acquire(self) -> Slot:
        with suppress(BusyError):
            return self._ring.acquire_nowait()
        with self._clock.slot_wait():
            return await self._ring.acquire()

    def _begin(self, slot: Slot, load: Load, group: TaskGroup) -> bool:
        """Send on at once what the host tier or a mapping has; read the rest, or have the tier see to it.

        Returns whether that took some time, as locking does what is mapped.
        """
        read = load.take()
        fill = _Fill(slot, load, read, self._clock.read(load.plan.name, slot.index, read.nbytes))
        if self._tier is None:
            extent = self._mapped.find(read)
            if extent is None:
                self._read(fill, partial(self._settle, fill))
            elif extent.locked:
                self._settle(fill, None, extent)
            else:
                group.start_soon(self._lock, fill, extent)
            return extent is not None
        hold = self._tier.find(self._key(read), read.nbytes)
        if hold is not None and self._tier.at_hand(hold, read.nbytes):
            self._settle(fill, None, hold)
        else:
            group.start_soon(self._bring, self._tier, fill, hold)
        return False

    async def _wait_for_load(self) -> bool:
        """Wait for a load with something to read; False if there will be none."""
        while self._next_load() is None:
            if self._closing:
                return False
            self._wake = anyio.Event()
            await self._wake.wait()
        return True

    def _next_load(self) -> Load | None:
        while self._loads and not self._loads[0].queued:
            self._loads.popleft()
        queued = [load for load in self._loads if load.queued]
        return next((load for load in queued if load.urgent), queued[0] if queued else None)

    async def _bring(self, tier: HostTier, fill: _Fill, hold: HostHold | None) -> None:
        """Make a read that the host tier wants to keep, or bring what is there and not at hand."""
        payload = fill.slot.payload[: fill.read.nbytes]
        try:
            hold = await tier.bring(self._key(fill.read), payload, hold, partial(self._wait_for_read, fill))
        except SplitZipError as error:
            self._settle(fill, error)
        except BaseException:
            fill.ended()
            self._ring.release(fill.slot)
            raise
        else:
            self._settle(fill, None, hold)

    async def _lock(self, fill: _Fill, extent: MappedExtent) -> None:
        """Send on what is mapped once it is locked in memory; read it if that is refused."""
        try:
            locked = await self._mapped.lock(extent, fill.read)
        except BaseException:
            fill.ended()
            self._ring.release(fill.slot)
            raise
        if locked:
            self._settle(fill, None, extent)
        else:
            self._read(fill, partial(self._settle, fill))

    async def _wait_for_read(self, fill: _Fill) -> None:
        errors: list[SplitZipError | None] = []
        arrived = anyio.Event()

        def done(error: SplitZipError | None) -> None:
            errors.append(error)
            arrived.set()

        self._read(fill, done)
        await wait_whatever_comes(arrived)  # until then the slot is the driver's
        (error,) = errors
        if error is not None:
            raise error

    def _read(self, fill: _Fill, done: Callable[[SplitZipError | None], None]) -> None:
        """Read into the slot, and call ``done`` with what went wrong."""
        read, file = fill.read, self._files[fill.read.pack]

        def ended(result: int | SplitZipError) -> None:
            if isinstance(result, SplitZipError):
                done(result)
            else:
                done(None if result >= read.nbytes else _incomplete(read, result, missing=False))

        if file is None:
            done(_incomplete(read, 0, missing=True))
            return
        try:
            handle = file.handle(read.offset, read.nbytes)
            self._driver.submit(
                handle,
                fill.slot.index,
                0,
                offset=read.offset,
                nbytes=read.nbytes,
                urgent=fill.load.urgent,
                done=ended,
            )
        except SplitZipError as error:
            done(error)
        else:
            self._begun.set()

    def _settle(self, fill: _Fill, error: SplitZipError | None, hold: Hold | None = None) -> None:
        """A slot is full, or its contents are where ``hold`` says; or it is not going to be."""
        fill.ended()
        if error is None:
            self._ring.mark_ready(fill.slot)
            # Once streaming broke down nobody takes slots: those who wait for the layer are told why by the transport.
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._output.send_nowait(FilledSlot(fill.slot, fill.read, fill.load, hold))
                return
        self._ring.release(fill.slot)
        if hold is not None:
            hold.release()
        if error is not None:
            fill.load.settle(error=error)

    def _key(self, read: PlannedRead) -> Hashable:
        """What the host tier knows a read by."""
        file = self._files[read.pack]
        return None if file is None else file.identity, read.offset, read.nbytes


def _incomplete(read: PlannedRead, count: int, *, missing: bool) -> CorruptDataError:
    lost = next(segment for segment in read.segments if segment.source + segment.nbytes > count)
    return CorruptDataError(
        f"tensor {lost.tensor!r}: {read.path} is {'missing' if missing else 'too short'}: "
        f"expected {lost.nbytes} bytes at {read.offset + lost.source}; rebuild the cache"
    )
