"""Threads that copy out of the page cache without the interpreter: one call for a slot, however many share it.

io_uring's workers copy as well, but then each part of a slot is an entry to write, a completion to see to, and at worst
a wake-up of the event loop, and a worker that is done waits for the loop to give it more. Here all threads work on the
first slot first, and the loop hears of it once it is full.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from types import ModuleType

import numpy as np

__all__ = ["CopyThreads", "code_is_loaded"]

logger = logging.getLogger(__name__)

_ROWS = 64  # jobs under way at a time, at most; a power of two
_LEAST_SHARE_BYTES = 1 << 20  # a third of a millisecond
_SEM_BYTES = 64  # of a sem_t, or more
_PAGE_BYTES = 4096


class _Code:
    """What the threads run: loaded once in a process."""

    module: ModuleType | None = None
    loading = threading.Lock()


def code_is_loaded() -> bool:
    """Whether threads can start at once. The first ones wait for numba to be imported, at worst to compile."""
    return _Code.module is not None


class CopyThreads:
    """Some threads, and what they have been given; for one thread, that of an event loop.

    They start in the background: until ``ready`` nothing can be given to them.

    Args:
        count: how many threads.
        signal: a descriptor, written to whenever a job is done; it must outlive them.

    Attributes:
        ready: whether jobs can be given.
    """

    def __init__(self, count: int, signal: int) -> None:
        self.ready = False
        self._count = count
        self._signal = signal
        self._given = self._seen = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # of jobs under way, by row: bytes, and bytes of a share
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._starter = threading.Thread(target=self._start, name="splitzip-copy", daemon=True)
        self._starter.start()

    @property
    def count(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    @property
    def under_way(self) -> int:
        """Jobs given and not yet collected."""
        return len(self._sizes)

    @property
    def room(self) -> bool:
        """Whether another job can be given now."""
        return self.ready and self._given % _ROWS not in self._sizes

    def give(self, descriptor: int, offset: int, address: int, nbytes: int) -> int:
        """Copy ``nbytes`` bytes from ``offset`` of a file to ``address``; returns the job's name until it is collected.

        There must be ``room``, and the memory must stay there until then.
        """
        row = self._given % _ROWS
        share = max(_LEAST_SHARE_BYTES, -(-nbytes // (self._shares.shape[1] * _PAGE_BYTES)) * _PAGE_BYTES)
        self._jobs[row] = descriptor, offset, address, nbytes, share
        self._left[row] = -(-nbytes // share)
        self._copied[row] = 0
        self._sizes[row] = nbytes, share
        self._given += 1
        self._code.give(self._control, self._semaphore)
        return row

    def collect(self) -> list[tuple[int, int]]:
        """Jobs done since the last call, each with how many bytes from its start there are, fewer if reading failed."""
        found = []
        while (row := int(self._done[self._seen % _ROWS]) if self.ready else -1) >= 0:
            self._done[self._seen % _ROWS] = -1
            self._seen += 1
            nbytes, share = self._sizes.pop(row)
            whole = int(self._copied[row]) == nbytes
            found.append((row, nbytes if whole else self._arrived(row, nbytes, share)))
        return found

    def close(self) -> None:
        """Wait for the threads to do what they were given, and end them; what they did is still to be collected."""
        self._closing = True
        self._starter.join()
        if self._threads:
            self._code.stop(self._control, self._semaphore)
            for thread in self._threads:
                thread.join()
            self._threads.clear()

    def _arrived(self, row: int, nbytes: int, share: int) -> int:
        """Bytes from the start of a job that are there, up to the first share that is not whole."""
        for number in range(-(-nbytes // share)):
            count = int(self._shares[row, number])
            if count < min(share, nbytes - number * share):
                return number * share + count
        return nbytes

    def _start(self) -> None:
        try:
            code = _load()
        except Exception as exc:  # noqa: BLE001 - whatever numba raises: others copy then
            logger.info("no threads copy out of the page cache: %r", exc)
            return
        self._code = code
        self._control = np.zeros(code.CONTROL_WORDS, np.int64)
        self._jobs = np.zeros((_ROWS, code.JOB_WORDS), np.int64)
        self._left = np.zeros(_ROWS, np.int64)
        self._copied = np.zeros(_ROWS, np.int64)
        self._shares = np.zeros((_ROWS, code.SHARES), np.int64)
        self._done = np.full(_ROWS, -1, np.int64)
        self._semaphore = _semaphore()
        shared = self._control, self._jobs, self._left, self._copied, self._shares, self._done
        arguments = (*shared, np.ones(1, np.int64), self._semaphore, self._signal)
        for number in range(0 if self._closing else self._count):
            thread = threading.Thread(target=code.work, args=arguments, name=f"splitzip-copy_{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # no more threads: those there are do it alone
                logger.info("%d of %d threads copy out of the page cache: %s", number, self._count, exc)
                break
            self._threads.append(thread)
        self.ready = bool(self._threads)


def _load() -> ModuleType:
    """Import what is compiled, and have it compiled for the arguments it gets, if it has not been before."""
    with _Code.loading:
        if _Code.module is None:
            from splitzip_aio.drivers import copier_code as code

            control, semaphore = np.zeros(code.CONTROL_WORDS, np.int64), _semaphore()
            words, rows = np.zeros(1, np.int64), np.zeros((1, code.JOB_WORDS), np.int64)
            code.stop(control, semaphore)
            code.work(control, rows, words, words, rows, words, words, semaphore, -1)
            code.give(control, semaphore)
            _Code.module = code
        return _Code.module


def _semaphore() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    memory = np.zeros(_SEM_BYTES, np.uint8)
    if ctypes.CDLL(None).sem_init(ctypes.c_void_p(memory.ctypes.data), 0, 0):
        raise OSError("sem_init failed")
    return memory
