"""The dispatcher: takes filled slots to the arena, and slots back to the ring."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from splitzip_aio.abc import Arena, Fence
from splitzip_aio.errors import CorruptDataError, ReadError, SplitZipError
from splitzip_aio.loading import FilledSlot
from splitzip_aio.stages import StageClock, Upload
from splitzip_aio.staging import StagingRing

__all__ = ["Dispatcher"]

_AT_ONCE = 2  # slots begun before other tasks have a turn: a millisecond


class Dispatcher:
    """Gives every filled slot to the arena as it arrives; the arena decides how much of that happens at a time.

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
        self._begun = anyio.Event()
        self._over = False

    async def run(self) -> None:
        """Upload until the prefetcher closes its end, and wait for what was begun."""
        async with self._source, anyio.create_task_group() as group:
            group.start_soon(self._reap)
            async for filled in self._source:
                self._take(filled)
                with suppress(anyio.WouldBlock, anyio.EndOfStream):
                    for _ in range(_AT_ONCE - 1):
                        self._take(self._source.receive_nowait())
                self._begun.set()
            self._over = True
            self._begun.set()

    async def _reap(self) -> None:
        """Have the arena call back for every upload; nobody else waits for one."""
        while not self._over:
            await self._begun.wait()
            self._begun = anyio.Event()
            await self._arena.reap()

    def _take(self, filled: FilledSlot) -> None:
        if filled.load.wanted:
            self._ring.mark_copying(filled.slot)
            self._upload(filled)
        else:
            self._release(filled)
            filled.load.settle()

    def _upload(self, filled: FilledSlot) -> None:
        slot, read, load = filled.slot, filled.read, filled.load
        try:
            memory = filled.memory
        except ReadError as error:
            self._release(filled)
            load.settle(error=error)
            return
        upload = self._clock.upload(
            load.plan.name, slot.index, read.nbytes, read.decoded_bytes, in_place=self._arena.decodes_in_place
        )
        self._arena.submit(
            memory,
            read,
            load.base,
            drained=partial(self._drained, filled, upload),
            done=partial(self._done, filled, upload),
            trace=upload.trace,
        )

    def _drained(self, filled: FilledSlot, upload: Upload) -> None:
        self._release(filled)
        upload.drained()

    def _done(self, filled: FilledSlot, upload: Upload, result: Fence | SplitZipError | None) -> None:
        upload.end()
        if isinstance(result, SplitZipError):
            if filled.hold is not None and isinstance(result, CorruptDataError):
                filled.hold.spoil()
            filled.load.settle(error=result)
        else:
            self.wire_bytes += filled.read.encoded_bytes
            self.decoded_bytes += filled.read.decoded_bytes
            filled.load.settle(fence=result)

    def _release(self, filled: FilledSlot) -> None:
        self._ring.release(filled.slot)
        if filled.hold is not None:
            filled.hold.release()
