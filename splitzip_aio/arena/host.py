"""The arena in host memory, decoded into by worker threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import anyio
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.abc import Fence, SegmentPlacement
from splitzip_aio.arena.base import BufferArena, checked_capacity
from splitzip_aio.codec.cpu import decode_segment
from splitzip_aio.errors import CorruptDataError
from splitzip_aio.memory import map_anonymous

__all__ = ["HostArena"]

_BATCH_BYTES = 1 << 20  # enough decoding to be worth a thread: about a millisecond


class HostArena(BufferArena):
    """An arena in anonymous host memory, which the kernel commits as it is written to.

    Segments are decoded from the slot itself by at most ``workers`` threads at a time, in batches of neighbours that
    are worth a thread each; the compiled decoder runs without the GIL.

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
        self._limiter = anyio.CapacityLimiter(workers or len(os.sched_getaffinity(0)))

    max_segments = 1 << 31

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        """Bytes to keep free behind the payload: none."""
        return 0

    async def upload(
        self,
        memory: memoryview,
        payload_bytes: int,
        segments: Sequence[SegmentPlacement],
        *,
        drained: Callable[[], None],
    ) -> Fence | None:
        """Decode the segments of a slot into the arena and check them; see :meth:`splitzip_aio.abc.Arena.upload`."""
        batches = list(_batches(segments))
        errors: list[CorruptDataError | None] = [None] * len(batches)

        async def decode(place: int) -> None:
            errors[place] = await anyio.to_thread.run_sync(
                _decode, memory, payload_bytes, target, batches[place], limiter=self._limiter
            )

        try:
            target = self.buffer.numpy()
            async with anyio.create_task_group() as group:
                for place in range(len(batches)):
                    group.start_soon(decode, place)
        finally:
            drained()
        first = next((error for error in errors if error is not None), None)
        if first is not None:
            raise first
        return None

    def fence(self) -> Fence | None:
        """None: work on the host is done when it returns."""
        return None

    async def aclose(self) -> None:
        """Let go of the memory; views that callers still hold stay valid. Idempotent."""
        self._buffer = None


def _batches(segments: Sequence[SegmentPlacement]) -> Iterator[Sequence[SegmentPlacement]]:
    """Runs of neighbours that decode to ``_BATCH_BYTES`` or more; the last may be shorter."""
    start = size = 0
    for stop, segment in enumerate(segments, 1):
        size += segment.decoded_bytes
        if size >= _BATCH_BYTES:
            yield segments[start:stop]
            start, size = stop, 0
    if start < len(segments):
        yield segments[start:]


def _decode(
    memory: memoryview, payload_bytes: int, target: NDArray[np.uint8], batch: Sequence[SegmentPlacement]
) -> CorruptDataError | None:
    """Decode in this thread; the first error is returned, since a raise would cancel the other threads' batches."""
    payload = np.frombuffer(memory, np.uint8, count=payload_bytes)
    for segment in batch:
        source = payload[segment.source : segment.source + segment.nbytes]
        out = target[segment.destination : segment.destination + segment.decoded_bytes]
        try:
            decode_segment(source, out, where=segment.where)
        except CorruptDataError as error:
            return error.with_traceback(None)  # which would keep views of the slot
    return None
