"""The arena in host memory, decoded into by worker threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from splitzip_aio.abc import Fence, PlannedRead, PlannedSegment, StageTrace
from splitzip_aio.arena.base import BufferArena, checked_capacity
from splitzip_aio.arena.decode_pool import DecodePool, HostUpload
from splitzip_aio.errors import SplitZipError
from splitzip_aio.memory import map_anonymous
from splitzip_aio.timeline import Stage
from splitzip_aio.waiting import Watch

__all__ = ["HostArena"]

_BATCH_BYTES = 1 << 20  # enough decoding to be worth another turn: about a millisecond


class HostArena(BufferArena):
    """An arena in anonymous host memory, which the kernel commits as it is written to.

    Segments are decoded from the slot itself, by ``workers`` threads that share every slot, batch by batch. The
    compiled decoder runs without the GIL.

    Args:
        capacity_bytes: its size.
        workers: threads that decode at the same time; as many as this process may use cores, if not given.

    Raises:
        InvalidArgumentError: the capacity is under 256 bytes.
    """

    max_segments = 1 << 31
    decodes_in_place = True

    def __init__(self, capacity_bytes: int, *, workers: int | None = None) -> None:
        capacity = checked_capacity(capacity_bytes)
        super().__init__(torch.frombuffer(map_anonymous(capacity, option="arena_bytes"), dtype=torch.uint8))
        self._pool = DecodePool(workers or len(os.sched_getaffinity(0)))
        self._ended: deque[HostUpload] = deque()

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        """Bytes to keep free behind the payload: none."""
        return 0

    def submit(
        self,
        memory: memoryview,
        read: PlannedRead,
        base: int,
        *,
        drained: Callable[[], None],
        done: Callable[[Fence | SplitZipError | None], None],
        trace: StageTrace | None = None,
    ) -> None:
        """Begin to decode the segments of a slot into the arena; see ``splitzip_aio.abc.Arena.submit``."""
        target = self.buffer.numpy()[base:]
        self._pool.submit(HostUpload(memory, read, target, list(_batches(read.segments)), drained, done, trace))

    async def reap(self) -> None:
        """Return once nothing that was submitted is under way."""
        with Watch(self._pool) as watch:
            while self._pool.under_way or self._ended:
                while self._ended:  # also what a caller collected that was cancelled then
                    _settle(self._ended.popleft())
                if self._pool.under_way:
                    await watch.call(self._collect, lambda: not self._ended)

    def _collect(self) -> None:
        self._ended.extend(self._pool.collect())

    def fence(self) -> Fence | None:
        """None: work on the host is done when it returns."""
        return None

    async def aclose(self) -> None:
        """Let go of the memory; views that callers still hold stay valid. Idempotent."""
        self._pool.close()
        self._let_go()


def _settle(upload: HostUpload) -> None:
    """Make the calls that are due."""
    upload.drained()
    if upload.failure is not None:
        raise upload.failure
    if upload.error is None and upload.trace is not None:
        upload.trace(Stage.DECODE, upload.begin_s, upload.end_s)
    upload.done(upload.error)


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
