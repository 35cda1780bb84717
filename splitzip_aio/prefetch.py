"""The prefetcher: fills staging slots with what layers need, those first that someone waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from splitzip_aio.abc import PlannedRead, ReadDriver
from splitzip_aio.errors import BusyError, CorruptDataError, SplitZipError
from splitzip_aio.host_cache import HostHold, HostTier
from splitzip_aio.loading import FilledSlot, Load
from splitzip_aio.packs import PackSource
from splitzip_aio.stages import StageClock
from splitzip_aio.staging import Slot, StagingRing

__all__ = ["Prefetcher"]


class _Fill(NamedTuple):
    """A slot to fill, and with what of which load; ``hold`` if the host tier has it."""

    slot: Slot
    load: Load
    read: PlannedRead
    hold: HostHold | None


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
        clock: told of each wait; by default nobody is.
    """

    def __init__(
        self,
        driver: ReadDriver,
        ring: StagingRing,
        files: Sequence[PackSource | None],
        output: MemoryObjectSendStream[FilledSlot],
        *,
        tier: HostTier | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._driver = driver
        self._ring = ring
        self._files = files
        self._output = output
        self._tier = tier
        self._clock = clock or StageClock()
        self._loads: deque[Load] = deque()
        self._wake = anyio.Event()
        self._closing = False

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
        send, receive = anyio.create_memory_object_stream[_Fill](len(self._ring.slots))
        async with self._output, anyio.create_task_group() as group, receive:
            for _ in self._ring.slots:  # a task for each slot that can be on its way: starting one takes long
                group.start_soon(self._fill_all, receive.clone())
            async with send:
                while await self._wait_for_load():
                    slot = await self._acquire()
                    load = self._next_load()
                    if load is None:
                        self._ring.release(slot)
                    else:
                        self._begin(slot, load, send)

    async def _acquire(self) -> Slot:
        with suppress(BusyError):
            return self._ring.acquire_nowait()
        with self._clock.slot_wait():
            return await self._ring.acquire()

    def _begin(self, slot: Slot, load: Load, fillers: MemoryObjectSendStream[_Fill]) -> None:
        """Send on at once what the host tier has; leave the rest to the tasks that wait."""
        read = load.take()
        hold = None if self._tier is None else self._tier.find(self._key(read), read.nbytes)
        fill = _Fill(slot, load, read, hold)
        if self._tier is not None and hold is not None and self._tier.at_hand(hold, read.nbytes):
            self._send(fill, hold)
        else:
            fillers.send_nowait(fill)

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

    async def _fill_all(self, waiting: MemoryObjectReceiveStream[_Fill]) -> None:
        async with waiting:
            async for fill in waiting:
                await self._fill(fill)

    async def _fill(self, fill: _Fill) -> None:
        sent = False
        try:
            with self._clock.read(fill.load.plan.name, fill.slot.index, fill.read.nbytes):
                hold = await self._bring(fill)
            self._send(fill, hold)
            sent = True
        except SplitZipError as error:
            fill.load.settle(error=error)
        finally:
            if not sent:
                self._ring.release(fill.slot)

    def _send(self, fill: _Fill, hold: HostHold | None) -> None:
        self._ring.mark_ready(fill.slot)
        self._output.send_nowait(FilledSlot(fill.slot, fill.read, fill.load, hold))

    async def _bring(self, fill: _Fill) -> HostHold | None:
        """Make a read, and keep it in the host tier if that is worth it; where it is if not in the slot."""
        read = partial(self._read, fill.slot, fill.load, fill.read)
        if self._tier is None:
            await read()
            return None
        payload = fill.slot.payload[: fill.read.nbytes]
        return await self._tier.bring(self._key(fill.read), payload, fill.hold, read)

    def _key(self, read: PlannedRead) -> Hashable:
        """What the host tier knows a read by."""
        file = self._files[read.pack]
        return None if file is None else file.identity, read.offset, read.nbytes

    async def _read(self, slot: Slot, load: Load, read: PlannedRead) -> None:
        file, count = self._files[read.pack], 0
        if file is not None:
            count = await self._driver.read(
                file.handle(read.offset, read.nbytes),
                slot.index,
                0,
                offset=read.offset,
                nbytes=read.nbytes,
                urgent=load.urgent,
            )
        if count < read.nbytes:
            lost = next(segment for segment in read.segments if segment.source + segment.nbytes > count)
            raise CorruptDataError(
                f"tensor {lost.tensor!r}: {read.path} is {'missing' if file is None else 'too short'}: "
                f"expected {lost.nbytes} bytes at {read.offset + lost.source}; rebuild the cache"
            )
