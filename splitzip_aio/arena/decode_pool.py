"""Threads that decode slots into host memory.

Workers take the batches of a slot in turns, so that what is in one slot stays in the cores' caches and the slot is free
soon. Whoever finishes the last one leaves the slot in a deque, and writes to a pipe that the event loop waits for: the
waiting is the arena's, which no cancellation cuts short, and costs the loop much less than a call into a thread.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.abc import Fence, PlannedRead, StageTrace
from splitzip_aio.codec.cpu import decode_segment
from splitzip_aio.errors import CorruptDataError, SplitZipError

__all__ = ["DecodePool", "HostUpload"]


class HostUpload:
    """A slot that is decoded, and how far that is.

    Args:
        memory: the slot.
        read: what is in it.
        target: where its layer goes, (bytes,) uint8.
        batches: indices of its segments, one range for each turn of a worker.
        drained, done, trace: what ``Arena.submit`` was given.

    Attributes:
        error: of the first segment that is wrong.
        failure: what a worker did not expect.
        begin_s, end_s: when the first worker began, and the last one ended.
    """

    def __init__(
        self,
        memory: memoryview,
        read: PlannedRead,
        target: NDArray[np.uint8],
        batches: Sequence[range],
        drained: Callable[[], None],
        done: Callable[[Fence | SplitZipError | None], None],
        trace: StageTrace | None,
    ) -> None:
        self.drained = drained
        self.done = done
        self.trace = trace
        self.error: CorruptDataError | None = None
        self.failure: Exception | None = None
        self.begin_s = self.end_s = 0.0
        self.batches = len(batches)
        self._memory = memory
        self._read = read
        self._target = target
        self._waiting = deque(batches)
        self._left = len(batches)
        self._first_wrong = len(read.segments)
        self._lock = threading.Lock()

    def work(self) -> bool:
        """Decode batches until none waits; True for the one call that ends the last of them."""
        while True:
            try:
                batch = self._waiting.popleft()
            except IndexError:
                return False
            self._note_begin()
            try:
                self._decode(batch)
            except Exception as exc:  # noqa: BLE001 - raised in the event loop
                self.failure = exc
            if self._note_end():
                return True

    def _decode(self, batch: range) -> None:
        payload = np.frombuffer(self._memory, np.uint8, count=self._read.nbytes)
        for place in batch:
            segment = self._read.segments[place]
            source = payload[segment.source : segment.source + segment.nbytes]
            out = self._target[segment.destination : segment.destination + segment.decoded_bytes]
            try:
                decode_segment(source, out, where=self._read.where(place))
            except CorruptDataError as error:
                self._note_wrong(place, error)
                return

    def _note_begin(self) -> None:
        if not self.begin_s:
            self.begin_s = time.perf_counter()

    def _note_wrong(self, place: int, error: CorruptDataError) -> None:
        with self._lock:
            if place < self._first_wrong:
                self._first_wrong = place
                self.error = error.with_traceback(None)  # which would keep views of the slot

    def _note_end(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left:
                return False
        self.end_s = time.perf_counter()
        return True


class DecodePool:
    """Decodes what is submitted, in ``workers`` threads that start with the first of it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._under_way = 0
        self._threads: _Threads | None = None

    @property
    def under_way(self) -> int:
        """Uploads submitted and not yet collected."""
        return self._under_way

    def fileno(self) -> int:
        """A descriptor that is readable while there may be something to collect."""
        assert self._threads is not None
        return self._threads.readable

    def submit(self, upload: HostUpload) -> None:
        """Have an upload decoded, after those submitted before."""
        if self._threads is None:
            self._threads = _Threads(self._workers)
            self._finalizer = weakref.finalize(self, self._threads.close)
        self._under_way += 1
        for _ in range(min(self._workers, upload.batches)):
            self._threads.begin(upload)

    def collect(self) -> list[HostUpload]:
        """Uploads that ended since the last call. Never waits."""
        assert self._threads is not None
        ended = self._threads.collect()
        self._under_way -= len(ended)
        return ended

    def close(self) -> None:
        """Wait for what workers are at; what they have not begun is left. Idempotent; no-op in a forked child."""
        if self._threads is not None:
            self._finalizer()


class _Threads:
    """The threads and their pipe."""

    def __init__(self, workers: int) -> None:
        self._ended: deque[HostUpload] = deque()
        self._process = os.getpid()
        self.readable, self._writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="splitzip-decode")

    def begin(self, upload: HostUpload) -> None:
        self._pool.submit(self._work, upload)

    def collect(self) -> list[HostUpload]:
        """Empty the pipe first, so that a worker finishing in between makes it readable again."""
        with suppress(BlockingIOError):
            os.read(self.readable, 1 << 16)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        if os.getpid() == self._process:
            self._pool.shutdown(wait=True, cancel_futures=True)
            os.close(self.readable)
            os.close(self._writable)

    def _work(self, upload: HostUpload) -> None:
        if upload.work():
            self._ended.append(upload)
            with suppress(BlockingIOError):  # a full pipe is readable already
                os.write(self._writable, b"\0")
