"""The arena in host memory, decoded into by worker threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.abc import Fence, PlannedRead, PlannedSegment, StageTrace
from splitzip_aio.arena.base import BufferArena, checked_capacity
from splitzip_aio.codec.cpu import decode_segment
from splitzip_aio.errors import CorruptDataError
from splitzip_aio.memory import map_anonymous
from splitzip_aio.timeline import Stage

__all__ = ["HostArena"]

_BATCH_BYTES = 1 << 20  # enough decoding to be worth another turn: about a millisecond


class HostArena(BufferArena):
    """An arena in anonymous host memory, which the kernel commits as it is written to.

    Segments are decoded from the slot itself by at most ``workers`` threads at a time. Several share a slot, batch by
    batch, while there are fewer slots than threads; otherwise a slot is one call into a thread, since each costs the
    event loop as much as decoding some 100 KB. The compiled decoder runs without the GIL.

    Args:
        capacity_bytes: its size.
        workers: threads that decode at the same time; as many as this process may use cores, if not given.

    Raises:
        InvalidArgumentError: the capacity is under 256 bytes.
    """

    def __init__(self, capacity_bytes: int, *, workers: int | None = None) -> None:
        capacity = checked_capacity(capacity_bytes)
        super().__init__(torch.frombuffer(map_anonymous(capacity, option="arena_bytes"), dtype=torch.uint8))
        # Its own limiter: user code that fills anyio's default one must not stop decoding.
        self._workers = workers or len(os.sched_getaffinity(0))
        self._limiter = anyio.CapacityLimiter(self._workers)

    max_segments = 1 << 31
    decodes_in_place = True

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        """Bytes to keep free behind the payload: none."""
        return 0

    async def upload(
        self,
        memory: memoryview,
        read: PlannedRead,
        base: int,
        *,
        drained: Callable[[], None],
        trace: StageTrace | None = None,
    ) -> Fence | None:
        """Decode the segments of a slot into the arena and check them; see ``splitzip_aio.abc.Arena.upload``."""
        batches = list(_batches(read.segments))
        waiting = iter(batches)
        shares: list[_Share] = []

        async def decode() -> None:
            shares.append(await anyio.to_thread.run_sync(_decode, memory, read, target, waiting, limiter=self._limiter))

        try:
            target = self.buffer.numpy()[base:]
            # As long as slots keep every thread busy, each has one; else idle threads help.
            helpers = min(len(batches), int(self._limiter.available_tokens)) - 1
            if helpers > 0:
                async with anyio.create_task_group() as group:
                    for _ in range(1 + helpers):
                        group.start_soon(decode)
            else:
                await decode()
        finally:
            drained()
        failed = [share for share in shares if share.error is not None]
        if failed:
            first = min(failed, key=lambda share: share.place).error
            assert first is not None
            raise first
        if trace is not None:
            trace(Stage.DECODE, min(share.begin_s for share in shares), max(share.end_s for share in shares))
        return None

    def fence(self) -> Fence | None:
        """None: work on the host is done when it returns."""
        return None

    async def aclose(self) -> None:
        """Let go of the memory; views that callers still hold stay valid. Idempotent."""
        self._buffer = None


def _batches(segments: Sequence[PlannedSegment]) -> Iterator[range]:
    """Indices of neighbours that decode to ``_BATCH_BYTES`` or more; the last may be fewer."""
    start = size = 0
    for stop, segment in enumerate(segments, 1):
        size += segment.decoded_bytes
        if size >= _BATCH_BYTES:
            yield range(start, stop)
            start, size = stop, 0
    if start < len(segments):
        yield range(start, len(segments))


@dataclass(slots=True)
class _Share:
    """What one thread did of a slot: when, and the first error, in segment number ``place``."""

    begin_s: float
    end_s: float = 0.0
    place: int = 0
    error: CorruptDataError | None = None


def _decode(memory: memoryview, read: PlannedRead, target: NDArray[np.uint8], waiting: Iterator[range]) -> _Share:
    """Take batches and decode them until none waits, in this thread; several share ``waiting``.

    An error is returned: raised, it would cancel the waits for the other threads, which go on.
    """
    share = _Share(time.perf_counter())
    payload = np.frombuffer(memory, np.uint8, count=read.nbytes)
    try:
        for batch in waiting:
            for share.place in batch:
                segment = read.segments[share.place]
                source = payload[segment.source : segment.source + segment.nbytes]
                out = target[segment.destination : segment.destination + segment.decoded_bytes]
                decode_segment(source, out, where=read.where(share.place))
    except CorruptDataError as error:
        share.error = error.with_traceback(None)  # which would keep views of the slot
    share.end_s = time.perf_counter()
    return share
