"""The dispatcher: takes filled slots to the arena, and slots back to the ring."""

from __future__ import annotations

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from splitzip_aio.abc import Arena
from splitzip_aio.errors import CorruptDataError, SplitZipError
from splitzip_aio.loading import FilledSlot
from splitzip_aio.stages import StageClock
from splitzip_aio.staging import StagingRing

__all__ = ["Dispatcher"]


class Dispatcher:
    """Uploads every filled slot as it arrives; the arena decides how much of that happens at a time.

    Wrong bytes end their layer's load and no other.

    Args:
        arena: where layers are decoded to.
        ring: where the slots are from.
        source: where filled slots come from.
        clock: told of each upload; by default nobody is.

    Attributes:
        wire_bytes: bytes of the segments decoded so far.
        decoded_bytes: bytes they decoded to.
    """

    def __init__(
        self,
        arena: Arena,
        ring: StagingRing,
        source: MemoryObjectReceiveStream[FilledSlot],
        *,
        clock: StageClock | None = None,
    ) -> None:
        self.wire_bytes = 0
        self.decoded_bytes = 0
        self._arena = arena
        self._ring = ring
        self._source = source
        self._clock = clock or StageClock()

    async def run(self) -> None:
        """Upload until the prefetcher closes its end, and wait for what was begun."""
        async with self._source, anyio.create_task_group() as group:
            for _ in self._ring.slots:  # a task for each slot that can be on its way: starting one takes long
                group.start_soon(self._upload_all)

    async def _upload_all(self) -> None:
        async for filled in self._source:
            if filled.load.wanted:
                self._ring.mark_copying(filled.slot)
                await self._upload(filled)
            else:
                self._release(filled)
                filled.load.settle()

    async def _upload(self, filled: FilledSlot) -> None:
        slot, read, load = filled.slot, filled.read, filled.load
        in_place = self._arena.decodes_in_place
        with self._clock.upload(
            load.plan.name, slot.index, read.nbytes, read.decoded_bytes, in_place=in_place
        ) as upload:

            def drained() -> None:
                self._release(filled)
                upload.drained()

            try:
                fence = await self._arena.upload(filled.memory, read, load.base, drained=drained, trace=upload.trace)
            except SplitZipError as error:
                if filled.hold is not None and isinstance(error, CorruptDataError):
                    filled.hold.spoil()
                load.settle(error=error)
            else:
                self.wire_bytes += read.encoded_bytes
                self.decoded_bytes += read.decoded_bytes
                load.settle(fence=fence)

    def _release(self, filled: FilledSlot) -> None:
        self._ring.release(filled.slot)
        if filled.hold is not None:
            filled.hold.release()
