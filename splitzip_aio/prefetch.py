"""The prefetcher: fills staging slots with what layers need, those first that someone waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from splitzip_aio.abc import ReadDriver
from splitzip_aio.errors import CorruptDataError, SplitZipError
from splitzip_aio.host_cache import HostHold, HostTier
from splitzip_aio.loading import FilledSlot, Load
from splitzip_aio.packs import PackSource
from splitzip_aio.plan import PlannedRead
from splitzip_aio.stages import StageClock
from splitzip_aio.staging import Slot, StagingRing

__all__ = ["Prefetcher"]


class Prefetcher:
    """Takes reads from loads, and sends filled slots on.

    As many reads are in flight as there are free slots. A read is chosen only once there is a slot for it, so a load
    that is cancelled meanwhile costs nothing.

    Args:
        driver: reads into the ring's slots, which are its buffers.
        ring: the staging ring.
        files: packs by index, read by ``driver``; None for one that is missing.
        packs: their paths, for errors.
        output: where filled slots go; it has room for every slot, so the ring alone holds reading back.
        tier: where reads are found, and kept for later rounds; None if there is no such place.
        clock: told of each wait; by default nobody is.
    """

    def __init__(
        self,
        driver: ReadDriver,
        ring: StagingRing,
        files: Sequence[PackSource | None],
        packs: Sequence[str],
        output: MemoryObjectSendStream[FilledSlot],
        *,
        tier: HostTier | None = None,
        clock: StageClock | None = None,
    ) -> None:
        self._driver = driver
        self._ring = ring
        self._files = files
        self._packs = packs
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
        async with self._output, anyio.create_task_group() as group:
            while await self._wait_for_load():
                with self._clock.slot_wait():
                    slot = await self._ring.acquire()
                load = self._next_load()
                if load is None:
                    self._ring.release(slot)
                else:
                    group.start_soon(self._fill, slot, load, load.take())

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

    async def _fill(self, slot: Slot, load: Load, read: PlannedRead) -> None:
        sent = False
        try:
            with self._clock.read(load.plan.name, slot.index, read.nbytes):
                hold = await self._bring(slot, load, read)
            self._ring.mark_ready(slot)
            self._output.send_nowait(FilledSlot(slot, read, load, hold))
            sent = True
        except SplitZipError as error:
            load.settle(error=error)
        finally:
            if not sent:
                self._ring.release(slot)

    async def _bring(self, slot: Slot, load: Load, read: PlannedRead) -> HostHold | None:
        """Find a read in the host tier, or make it; where it is if not in the slot."""
        file = self._files[read.pack]
        if self._tier is None or file is None:
            await self._read(slot, load, read)
            return None
        key = (file.identity, read.offset, read.nbytes)
        return await self._tier.bring(key, slot.payload, read.nbytes, partial(self._read, slot, load, read))

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
                f"tensor {lost.tensor!r}: {self._packs[read.pack]} is {'missing' if file is None else 'too short'}: "
                f"expected {lost.nbytes} bytes at {read.offset + lost.source}; rebuild the cache"
            )
