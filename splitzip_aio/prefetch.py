"""The prefetcher: fills staging slots with what layers need, those first that someone waits for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from splitzip_aio.abc import Hold, PlannedRead, ReadDriver
from splitzip_aio.drivers.mapped_file import MappedExtent
from splitzip_aio.errors import CorruptDataError, SplitZipError
from splitzip_aio.host_cache import HostHold, HostTier
from splitzip_aio.loading import FilledSlot, Load
from splitzip_aio.mapped import MappedPacks
from splitzip_aio.packs import PackSource
from splitzip_aio.stages import StageClock
from splitzip_aio.staging import Slot, StagingRing
from splitzip_aio.waiting import finish_whatever_comes, wait_whatever_comes

__all__ = ["Prefetcher"]

_TURN_S = 0.0005  # of the event loop at a time, as long as there is more to begin


class _Fill(NamedTuple):
    """A slot to fill, and with what of which load; ``ended`` is to be called when that is over."""

    slot: Slot
    load: Load
    read: PlannedRead
    ended: Callable[[], None]


class Prefetcher:
    """Takes reads from loads, and hands filled slots on.

    As many reads are in flight as there are free slots. A read is chosen only once there is a slot for it, so a load
    that is cancelled meanwhile costs nothing. Whoever frees a slot calls ``go_on``, which begins the next read there
    and then, since a task that waits for slots would cost the event loop turns for each of them.

    Args:
        driver: reads into the ring's slots, which are its buffers.
        ring: the staging ring.
        files: packs by index, read by ``driver``; None for one that is missing.
        output: called with every filled slot, in a task.
        tier: where reads are found, and kept for later rounds; None if there is no such place.
        mapped: where reads are found that need not be made, unless there is a ``tier``; None if there is no such place.
        clock: told of each wait; by default nobody is.
    """

    def __init__(
        self,
        driver: ReadDriver,
        ring: StagingRing,
        files: Sequence[PackSource | None],
        output: Callable[[FilledSlot], None],
        *,
        tier: HostTier | None = None,
        mapped: MappedPacks | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._driver = driver
        self._ring = ring
        self._files = files
        self._output = output
        self._tier = tier
        self._mapped = mapped or MappedPacks()
        self._clock = clock or StageClock()
        self._loads: deque[Load] = deque()
        self._group: TaskGroup | None = None
        self._going_on = False
        self._slot_came: Callable[[], None] | None = None
        self._wake = anyio.Event()
        self._begun = anyio.Event()
        self._closing = self._over = False

    def submit(self, load: Load) -> None:
        """Read a layer after those submitted before; an urgent one before those that are not."""
        self._loads.append(load)
        self._wake.set()

    def close(self) -> None:
        """End ``run`` once no submitted load has reads queued, and what is in flight was handed on."""
        self._closing = True
        self._wake.set()

    def go_on(self) -> None:
        """Begin the next reads, for which there are slots; for who freed one, in a task of the pipeline."""
        if self._group is None or self._going_on:  # whoever began calls this finds the slot, too
            return
        self._going_on = True
        try:
            self._fill_slots(self._group)
        finally:
            self._going_on = False
        if self._closing:
            self._wake.set()

    async def run(self) -> None:
        """Fill slots until ``close``."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._reap)
            self._group = group
            try:
                while not self._closing or self._next_load() is not None:
                    self._wake = anyio.Event()
                    self.go_on()
                    await self._wake.wait()
            finally:
                self._group = None
            self._over = True
            self._begun.set()

    def _fill_slots(self, group: TaskGroup) -> None:
        """Begin reads while there are slots, for half a millisecond or so; ``run`` goes on after other tasks' turn."""
        until = time.perf_counter() + _TURN_S
        while (load := self._next_load()) is not None:
            if time.perf_counter() > until:
                self._wake.set()
                return
            slot = self._ring.acquire()
            if slot is None:
                if self._slot_came is None:
                    self._slot_came = self._clock.slot_wait()
                return
            if self._slot_came is not None:
                self._slot_came()
                self._slot_came = None
            self._begin(slot, load, group)
        if self._slot_came is not None:  # what waited for one was cancelled
            self._slot_came()
            self._slot_came = None

    async def _reap(self) -> None:
        """Have the driver call back for every read; nobody else does.

        Whatever comes, for what is begun: those who wait for a read while the others are cancelled wait for this.
        """
        try:
            while True:
                await self._driver.reap()
                if self._over:
                    return
                self._begun = anyio.Event()
                await self._begun.wait()
        except GeneratorExit:  # torn down with its event loop: nothing can be waited for
            raise
        except BaseException:
            await finish_whatever_comes(self._driver.reap)
            raise

    def _begin(self, slot: Slot, load: Load, group: TaskGroup) -> None:
        """Send on at once what the host tier or a mapping has; read the rest, or have the tier see to it."""
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
            return
        hold = self._tier.find(self._key(read), read.nbytes)
        if hold is not None and self._tier.at_hand(hold, read.nbytes):
            self._settle(fill, None, hold)
        else:
            group.start_soon(self._bring, self._tier, fill, hold)

    def _next_load(self) -> Load | None:
        """The load to read from next; loads without queued reads are forgotten on the way."""
        loads = self._loads
        while loads and not loads[0].queued:
            loads.popleft()
        if loads and not loads[0].urgent:
            return next((load for load in loads if load.urgent and load.queued), loads[0])
        return loads[0] if loads else None

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
            self._output(FilledSlot(fill.slot, fill.read, fill.load, hold))
        else:
            self._ring.release(fill.slot)
            fill.load.settle(error=error)
            self.go_on()

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
