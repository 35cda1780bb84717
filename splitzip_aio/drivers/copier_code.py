"""What a thread that copies out of the page cache does, as machine code: it runs without the interpreter.

Importing this imports numba, and the first call of each function compiles it or takes it from disk.

**Work.** A job is a part of a file and where to copy it, one row of ``jobs``. It has SHARES shares of equal size, of
which the last may be empty, and a share is what a thread takes at a time, by its number: jobs and shares are numbered
for good, and job n is in row n modulo the rows. ``control`` has the next number to take and the first that there is not
yet. Who takes a share with others behind it wakes another thread, so that giving a job costs its giver one wake-up.

**Memory.** Rows are written before the limit is raised, and read after a number below it was taken; both are atomic.
Bytes copied are added to ``copied`` before the job counts as done. So each side sees what the other has written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["CONTROL_WORDS", "JOB_WORDS", "SHARES", "give", "stop", "work"]

SHARES = 32
"""Parts of a job, at most."""

CONTROL_WORDS = 32
"""Words of ``control``: a number in each of four cache lines."""

JOB_WORDS = 5
"""Words of a row of ``jobs``."""

NEXT, LIMIT, FINISHED, STOPPED = 0, 8, 16, 24
DESCRIPTOR, OFFSET, ADDRESS, NBYTES, SHARE_BYTES = range(JOB_WORDS)

_WORD = ir.IntType(64)
_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


def _kept(*, nogil: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiled, and kept on disk where there is a place for it; ``nogil`` for what takes its time."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            dispatcher: Callable[..., Any] = numba.njit(nogil=nogil, cache=True)(function)
        except RuntimeError:  # no writable directory
            dispatcher = numba.njit(nogil=nogil)(function)
        return dispatcher

    return compiled


@intrinsic  # type: ignore[untyped-decorator]
def _add(_typing: Any, _address: Any, _value: Any) -> Any:
    """Add to the word at an address, atomically; returns what it was."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _replace(_typing: Any, _address: Any, _old: Any, _new: Any) -> Any:
    """Replace the word at an address, if it is the old one, atomically; returns whether it was."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _WORD.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, values[1], values[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@_kept()
def give(control: Any, semaphore: Any) -> None:
    """There is another job: wake a thread, if one has nothing to do."""
    _add(control.ctypes.data + 8 * LIMIT, SHARES)
    _post(semaphore.ctypes.data)


@_kept()
def stop(control: Any, semaphore: Any) -> None:
    """There will be no more jobs: have all threads end once none is left."""
    _add(control.ctypes.data + 8 * STOPPED, 1)
    _post(semaphore.ctypes.data)


@_kept(nogil=True)
def work(
    control: Any, jobs: Any, left: Any, copied: Any, shares: Any, done: Any, one: Any, semaphore: Any, signal: int
) -> None:
    """Take shares of jobs until it is time to stop, and no share is left.

    Args:
        control: (CONTROL_WORDS,) int64, zero to begin with.
        jobs: (rows, JOB_WORDS) int64; the number of rows is a power of two.
        left: (rows,) int64, shares of each job that are not done; its giver sets them.
        copied: (rows,) int64, bytes of each job so far.
        shares: (rows, SHARES) int64, bytes of each share.
        done: (rows,) int64, rows whose job is done, in the order of that; -1 where there is none yet.
        one: (1,) int64, the 1 that is written to ``signal``.
        semaphore: room for a ``sem_t``, initialised.
        signal: a descriptor that is written to whenever a job is done.
    """
    base, wake, rows = control.ctypes.data, semaphore.ctypes.data, len(left)
    following, limit, finished, stopped = base + 8 * NEXT, base + 8 * LIMIT, base + 8 * FINISHED, base + 8 * STOPPED
    while True:
        while _wait(wake) != 0:  # interrupted by a signal
            pass
        while True:
            number, end = _add(following, 0), _add(limit, 0)
            if number >= end:
                break
            row, share = (number // SHARES) & (rows - 1), number % SHARES
            start = share * jobs[row, SHARE_BYTES]
            nbytes = min(jobs[row, SHARE_BYTES], jobs[row, NBYTES] - start)
            descriptor, offset, address = jobs[row, DESCRIPTOR], jobs[row, OFFSET], jobs[row, ADDRESS]
            # An empty share is followed by empty ones. If another thread was faster, the row may be a new job's.
            after = number + 1 if nbytes > 0 else number - share + SHARES
            if not _replace(following, number, after) or nbytes <= 0:
                continue
            if after < end:
                _post(wake)
            count = 0
            while count < nbytes:
                more = _pread(np.int32(descriptor), address + start + count, nbytes - count, offset + start + count)
                if more <= 0:
                    break
                count += more
            shares[row, share] = count
            _add(copied.ctypes.data + 8 * row, count)
            if _add(left.ctypes.data + 8 * row, -1) == 1:
                place = _add(finished, 1) & (rows - 1)
                _add(done.ctypes.data + 8 * place, row + 1)
                _write(np.int32(signal), one.ctypes.data, 8)
        if _add(stopped, 0) != 0:
            _post(wake)
            return
