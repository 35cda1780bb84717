"""The dispatcher: takes filled slots to the arena, and slots back to the ring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio

from splitzip_aio.abc import Arena, Fence
from splitzip_aio.errors import CorruptDataError, ReadError, SplitZipError
from splitzip_aio.loading import FilledSlot
from splitzip_aio.stages import StageClock, Upload
from splitzip_aio.staging import StagingRing

__all__ = ["Dispatcher"]


class Dispatcher:
    """Gives every filled slot to the arena as it arrives; the arena decides how much of that happens at a time.

    Wrong bytes end their layer's load and no other.

    Args:
        arena: where layers are decoded to.
        ring: where the slots are from.
        freed: called whenever a slot went back to the ring.
        clock: told of each upload; by default nobody is.

    Attributes:
        wire_bytes: bytes of the segments decoded so far.
        decoded_bytes: bytes they decoded to.
    """

    def __init__(
        self,
        arena: Arena,
        ring: StagingRing,
        *,
        freed: Callable[[], None],
        clock: StageClock | None = None,
    ) -> None:
        self.wire_bytes = 0
        self.decoded_bytes = 0
        self._arena = arena
        self._ring = ring
        self._freed = freed
        self._clock = clock or StageClock()
        self._begun = anyio.Event()
        self._closing = self._over = False

    def take(self, filled: FilledSlot) -> None:
        """Begin to upload a slot, unless nobody wants what is in it any more.

        Once ``run`` has ended, however it did, slots go back as they are, and their layers remain unsettled: those who
        wait for one are told why by the transport.
        """
        if self._over:
            self._release(filled)
        elif filled.load.wanted:
            self._ring.mark_copying(filled.slot)
            self._upload(filled)
            self._begun.set()
        else:
            self._release(filled)
            filled.load.settle()

    def close(self) -> None:
        """End ``run`` once what was taken is done; nothing more will be."""
        self._closing = True
        self._begun.set()

    async def run(self) -> None:
        """Have the arena call back for every upload, until ``close``; nobody else waits for one."""
        try:
            while True:
                await self._begun.wait()
                self._begun = anyio.Event()
                await self._arena.reap()
                if self._closing:
                    return
        finally:
            self._over = True

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
        upload.drained()
        self._release(filled)

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
        self._freed()
