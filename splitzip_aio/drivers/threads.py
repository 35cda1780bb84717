"""preadv on a bounded pool of worker threads: works wherever Python does on a Unix."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.operation import Extent, Slots

__all__ = ["ThreadsEngine"]

MAX_THREADS = 16


class ThreadsEngine(Engine):
    """Workers read, leave the result in a deque, and write to a pipe that the event loop waits for.

    ``anyio.to_thread`` would return early when asyncio's own ``Task.cancel`` reaches its caller, with the
    worker still writing into the buffer. Here the waiting is the driver's, the same for every engine.
    """

    name = "threads"

    def __init__(self, slots: Slots, queue_depth: int) -> None:
        self._slots = slots
        self._process = os.getpid()
        self._in_flight = 0
        self._completed: deque[tuple[Extent, int]] = deque()
        self._readable, self._writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pool = ThreadPoolExecutor(min(queue_depth, MAX_THREADS), thread_name_prefix="splitzip-read")
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Extents begun and not yet collected."""
        return self._in_flight

    def fileno(self) -> int:
        """The pipe that workers write to."""
        return self._readable

    @property
    def signal(self) -> int:
        """The pipe's other end."""
        return self._writable

    def begin(self, extents: Sequence[Extent]) -> None:
        """Give each extent to a worker."""
        for extent in extents:
            start = extent.position + extent.done
            view = self._slots.views[extent.slot][start : extent.position + extent.nbytes]
            self._in_flight += 1
            self._pool.submit(self._work, extent, extent.file.descriptor, view, extent.offset + extent.done)

    def flush(self) -> bool:
        """Nothing is ever left: the pool queues without limit."""
        return True

    def collect(self) -> list[tuple[Extent, int]]:
        """Empty the pipe first, so that a worker finishing in between makes it readable again."""
        with suppress(BlockingIOError):
            os.read(self._readable, 1 << 16)
        completions = []
        while self._completed:
            completions.append(self._completed.popleft())
        self._in_flight -= len(completions)
        return completions

    def close(self) -> None:
        """Wait for the workers and end them."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._pool.shutdown(wait=True)
        self.collect()
        os.close(self._readable)
        os.close(self._writable)

    def _work(self, extent: Extent, descriptor: int, view: memoryview, offset: int) -> None:
        try:
            result = os.preadv(descriptor, [view], offset)
        except OSError as exc:
            result = -(exc.errno or 0)
        finally:
            view.release()
        self._completed.append((extent, result))
        with suppress(BlockingIOError):  # a full pipe is readable already
            os.write(self._writable, b"\0")
