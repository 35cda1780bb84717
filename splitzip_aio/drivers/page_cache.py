"""What of a file the page cache holds: cachestat(2) where the kernel has it, mincore(2) elsewhere."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

import numpy as np

__all__ = ["PageCache"]

_CACHESTAT = 451  # the same number on every architecture; Linux 6.5


class PageCache:
    """The page cache's view of one file.

    Asking about a megabyte takes cachestat one microsecond or two, and mincore twenty. The answer may be out of date
    when it is used, so it decides about speed only.

    Attributes:
        method: ``"cachestat"`` or ``"mincore"``; None where the kernel tells nothing.
        reason: why it tells nothing; None if it does.

    Args:
        descriptor: an open file; stays open, and the caller's, as long as this is used.
        size: its size in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mapping: mmap.mmap | None = None
        self._address = 0
        self.reason: str | None = None
        self.method, self._count = self._choose()

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether every page of ``[offset, offset + nbytes)`` that the file has is cached; False if it has none."""
        first = offset // mmap.PAGESIZE
        pages = -(-min(offset + nbytes, self._size) // mmap.PAGESIZE) - first
        return pages > 0 and self.method is not None and self._count(first, pages) == pages

    def close(self) -> None:
        """Let go of the mapping that mincore needs, if there is one. Idempotent."""
        self.method = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _choose(self) -> tuple[str | None, Callable[[int, int], int]]:
        if not self._size:
            return "cachestat", self._cachestat
        refused = errno.errorcode.get(-self._cachestat(0, 1), "")
        if not refused:
            return "cachestat", self._cachestat
        # Of a file that the caller could not write to, mincore says that all of it is cached.
        if not _may_write(self._descriptor):
            self.reason = f"cachestat is refused ({refused}), and mincore tells nothing of a file of someone else's"
        else:
            try:
                self._mapping = mmap.mmap(self._descriptor, self._size, prot=mmap.PROT_READ)
                self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data
            except (OSError, ValueError) as exc:
                self.reason = f"cachestat is refused ({refused}), and the file cannot be mapped for mincore ({exc})"
            else:
                return "mincore", self._mincore
        return None, self._cachestat

    def _cachestat(self, first: int, pages: int) -> int:
        """How many of the pages are cached, or a negated errno."""
        extent = (ctypes.c_uint64 * 2)(first * mmap.PAGESIZE, pages * mmap.PAGESIZE)
        counts = (ctypes.c_uint64 * 5)()
        if self._libc.syscall(ctypes.c_long(_CACHESTAT), self._descriptor, extent, counts, 0) != 0:
            return -ctypes.get_errno()
        return counts[0]

    def _mincore(self, first: int, pages: int) -> int:
        """How many of the pages are cached, or a negated errno."""
        flags = np.zeros(pages, np.uint8)
        start = ctypes.c_void_p(self._address + first * mmap.PAGESIZE)
        length = ctypes.c_size_t(pages * mmap.PAGESIZE)
        if self._libc.mincore(start, length, ctypes.c_void_p(flags.ctypes.data)) != 0:
            return -ctypes.get_errno()
        return int(np.count_nonzero(flags & 1))


def _may_write(descriptor: int) -> bool:
    """Whether this process owns the file or might write to it: what the kernel asks for before it tells."""
    return os.fstat(descriptor).st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)
