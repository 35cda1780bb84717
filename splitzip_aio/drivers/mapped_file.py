"""A file that is decoded from where the page cache has it, without a copy, and without the danger in that.

Who touches a page of a mapping that the kernel cannot bring is killed by SIGBUS: because the file was cut short
meanwhile, or its disk fails. Two things keep that from happening to an extent for as long as it is held.

**A read lease** on the file (fcntl(2), F_SETLEASE). Whoever opens it for writing, or truncates it, waits until we give
the lease back, or until ``/proc/sys/fs/lease-break-time`` is over, 45 seconds by default. It is taken with the first
hold and given back with the last, and no further hold is given while someone waits: a writer waits for milliseconds,
and for an idle reader not at all. Once the lease was taken the file must still be what it was. Leases need the
file's owner or CAP_LEASE, and nobody who writes.

**Locked pages** (mlock(2)). Locking brings the pages or returns an error, and what is locked is neither evicted nor
brought from the disk again. It walks over all pages, at 1.4 ms for 32 MiB. Where a pass before left them mapped, and
a look at the page table says that nothing was evicted since, they are locked as they are, in a fifth of that.

Only file systems are trusted whose files nobody can change but by way of this kernel.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import numpy as np

from splitzip_aio.errors import ReadError

__all__ = ["MappedExtent", "MappedFile"]

_TRUSTED: Mapping[int, str] = MappingProxyType(
    {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0xF2F52010: "f2fs"}
)
_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_LEAST_BREAK_S = 5  # to decode what is under way takes well under a second, also where others use the cores
_REFUSALS: Mapping[int, str | None] = MappingProxyType(
    {
        errno.EAGAIN: "it is open for writing elsewhere",
        errno.EACCES: "that is for its owner, or who has CAP_LEASE",
        errno.EINVAL: "its file system has none",
    }
)
_MLOCK_ONFAULT = 1


class MappedFile:
    """A mapping of a whole file, made when it is first needed, and the holds on extents of it.

    For one thread, but for ``MappedExtent.lock``.

    Args:
        descriptor: of the file, open until ``close``.
        path: what errors are to call it.
        unchanged: whether the file of a descriptor is still what it was.

    Attributes:
        refusal: why no extent can be held now; None if one can.
    """

    def __init__(self, descriptor: int, path: str, unchanged: Callable[[int], bool]) -> None:
        self.path = path
        self.refusal: str | None = None
        self._source = descriptor
        self._unchanged = unchanged
        self._mapping: _Mapping | None = None
        self._over = False  # refused for good, or closed
        self._held: set[MappedExtent] = set()

    def hold(self, offset: int, nbytes: int) -> MappedExtent | None:
        """A hold, to be locked and released, on ``[offset, offset + nbytes)``; None where it has to be read."""
        if self._over:
            return None
        try:
            if self._mapping is None:
                self._mapping = _Mapping(self._source)
            mapping = self._mapping
            if offset + nbytes > mapping.size or not self._leased(mapping):
                return None
        except (OSError, ValueError) as exc:
            self.refuse(f"it cannot be mapped: {exc.strerror if isinstance(exc, OSError) else exc}")
            return None
        extent = MappedExtent(self, mapping, offset, nbytes)
        self._held.add(extent)
        return extent

    def refuse(self, reason: str) -> None:
        """Hold nothing any more."""
        self._over = True
        self.refusal = reason

    def let_go(self, extent: MappedExtent) -> None:
        """A hold is over."""
        self._held.discard(extent)
        if not self._held and self._mapping is not None:
            self._mapping.give_back_lease()

    def close(self) -> None:
        """Give everything back; for when nothing is decoded from it any more. Idempotent; no-op in a forked child."""
        self._over = True
        for extent in list(self._held):
            extent.release()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _leased(self, mapping: _Mapping) -> bool:
        """Have the lease, unless someone waits for it."""
        if self._held:
            return mapping.leased
        try:
            mapping.take_lease()
        except OSError as exc:
            self.refusal = f"a lease on it is refused: {_REFUSALS.get(exc.errno or 0, exc.strerror)}"
            self._over = exc.errno != errno.EAGAIN
            return False
        try:
            unchanged = self._unchanged(mapping.descriptor)
        except BaseException:
            mapping.give_back_lease()
            raise
        if not unchanged:
            mapping.give_back_lease()
            self.refuse("it is not the file any more that it was")
            return False
        self.refusal = None
        return True


class MappedExtent:
    """A hold on an extent of a mapped file, which does not change until ``release``.

    Attributes:
        locked: its pages are locked in memory; it must not be decoded from before.
    """

    __slots__ = ("_file", "_mapping", "_nbytes", "_offset", "_released", "_since_s", "_view", "locked")

    def __init__(self, file: MappedFile, mapping: _Mapping, offset: int, nbytes: int) -> None:
        self._file = file
        self._mapping = mapping
        self._offset = offset
        self._nbytes = nbytes
        self._released = self.locked = False
        self._since_s = time.monotonic()
        self._view = mapping.view[offset : offset + nbytes]
        mapping.count(offset, nbytes)

    @property
    def memory(self) -> memoryview:
        """The extent, to be read only.

        Raises:
            ReadError: someone has waited for the file until the kernel let them, as if this process were dead.
        """
        waited_s = time.monotonic() - self._since_s
        if waited_s > self._mapping.trusted_s and not self._mapping.leased:
            raise ReadError(
                errno.ESTALE,
                f"opened for writing while held, and not decoded for {waited_s:.0f} s: the event loop stood still",
                self._file.path,
            )
        return self._view

    def lock_mapped(self) -> bool:
        """Lock the pages in memory if all of them are mapped; False if ``lock`` has to bring some."""
        self.locked = self._mapping.lock_mapped(self._offset, self._nbytes)
        return self.locked

    def lock(self) -> bool:
        """Bring the pages and lock them in memory; False if the kernel refuses.

        Takes milliseconds, so it is for a worker thread.
        """
        with self._mapping.locking:
            if self._released:
                return False
            refused = self._mapping.lock(self._offset, self._nbytes)
        self.locked = refused is None
        if refused is not None:
            self._file.refuse(f"locking {self._nbytes} bytes of it in memory is refused: {refused}; see ulimit -l")
        return self.locked

    def spoil(self) -> None:
        """The extent turned out to be wrong: the file is, so there is no better copy to fall back to."""

    def release(self) -> None:
        """Let the extent go; nothing may read it any more. Idempotent."""
        if self._released:
            return
        self._released = True
        with suppress(BufferError):  # someone still looks at it
            self._view.release()
        self._mapping.uncount(self._offset, self._nbytes)
        self._file.let_go(self)


class _Mapping:
    """What the kernel gives for a file: an open file of its own, a mapping, and how many hold each page.

    Locks do not nest, and extents may share a page, or be held twice: a page is unlocked when nobody holds it.
    """

    def __init__(self, source: int) -> None:
        self.trusted_s = _trusted_s()
        # Leases belong to an open file description; a duplicate would share that of others with their leases.
        self.descriptor = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self.descriptor, self._process)
        try:
            self._libc = _libc()
            _check_trusted(self._libc, self.descriptor)
            self.size = os.fstat(self.descriptor).st_size
            self._mapped = mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ)
        except BaseException:
            self._finalizer()
            raise
        self.view = memoryview(self._mapped)
        self.locking = threading.Lock()
        self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data
        self._holders = np.zeros(-(-self.size // mmap.PAGESIZE), np.uint16)

    @property
    def leased(self) -> bool:
        """Whether the lease is ours and nobody waits for it."""
        return self._finalizer.alive and fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def take_lease(self) -> None:
        # Who wants the file is announced by a signal. Unless told otherwise, each time anew, that is SIGIO, which ends
        # a process that does not expect it; SIGURG does nothing then. We look for ourselves.
        fcntl.fcntl(self.descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)

    def give_back_lease(self) -> None:
        if self._finalizer.alive:
            _give_back(self.descriptor, self._process)

    def count(self, offset: int, nbytes: int) -> None:
        self._holders[_pages(offset, nbytes)] += 1

    def uncount(self, offset: int, nbytes: int) -> None:
        """Unlock the pages that nobody holds any more."""
        pages = _pages(offset, nbytes)
        held = self._holders[pages]
        held -= 1
        if not self._finalizer.alive:
            return
        if not held.any():
            self._libc.munlock(*self._range(pages.start, pages.stop))
        else:
            idle = np.concatenate(([False], held == 0, [False]))
            edges = pages.start + np.flatnonzero(idle[1:] != idle[:-1])
            for first, stop in edges.reshape(-1, 2).tolist():
                self._libc.munlock(*self._range(first, stop))

    def lock(self, offset: int, nbytes: int) -> str | None:
        """Bring and lock the pages of an extent; the reason if the kernel refuses."""
        if not self._finalizer.alive:
            return "closed"
        pages = _pages(offset, nbytes)
        if self._libc.mlock(*self._range(pages.start, pages.stop)) == 0:
            return None
        return os.strerror(ctypes.get_errno())

    def lock_mapped(self, offset: int, nbytes: int) -> bool:
        """Lock the pages of an extent as they are; whether none of them was missing."""
        pages = _pages(offset, nbytes)
        start, length = self._range(pages.start, pages.stop)
        return self._libc.mlock2(start, length, _MLOCK_ONFAULT) == 0 and _all_present(self._libc, start, length)

    def _range(self, first: int, stop: int) -> tuple[int, int]:
        """Address and bytes of pages."""
        return self._address + first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE

    def close(self) -> None:
        """Give everything back. No-op in a forked child, where a thread that is not there may be locking."""
        if os.getpid() != self._process:
            return
        with self.locking:
            self._libc.munlock(self._address, self.size)
            self._finalizer()
        with suppress(BufferError):  # someone still looks at it: unmapped with the last view
            self.view.release()
            self._mapped.close()


def _pages(offset: int, nbytes: int) -> slice:
    return slice(offset // mmap.PAGESIZE, -(-(offset + nbytes) // mmap.PAGESIZE))


def _close(descriptor: int, process: int) -> None:
    _give_back(descriptor, process)
    os.close(descriptor)


def _give_back(descriptor: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the same lease, and must not give it back
        with suppress(OSError):  # the kernel has let someone else have it
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _trusted_s() -> float:
    """For how many seconds after a look at the lease the file cannot change, whoever wants to: half of what there is.

    Raises:
        OSError: too few to rely on them.
    """
    break_s = int(_BREAK_TIME.read_text())
    if 0 < break_s < _LEAST_BREAK_S:
        raise OSError(errno.ETIME, f"{_BREAK_TIME} is {break_s}, less than {_LEAST_BREAK_S} seconds")
    return break_s / 2 if break_s else float("inf")  # zero: however long it takes


def _check_trusted(libc: ctypes.CDLL, descriptor: int) -> None:
    """Raises OSError on a file system that others may write to, over a network or beneath it."""
    answer = (ctypes.c_long * 64)()
    kind = answer[0] & 0xFFFFFFFF if libc.fstatfs(descriptor, ctypes.byref(answer)) == 0 else 0
    if kind not in _TRUSTED:
        raise OSError(errno.EOPNOTSUPP, f"its file system ({kind:#x}) is none of {', '.join(_TRUSTED.values())}")


def _libc() -> ctypes.CDLL:
    """The system calls that Python does not have; OSError without them."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        libc.mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    except AttributeError as exc:
        raise OSError(errno.ENOSYS, "the C library has no mlock2") from exc
    return libc


class _ScanArguments(ctypes.Structure):
    """``struct pm_scan_arg`` of linux/fs.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len"),
            *("max_pages", "category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    )


_PAGEMAP_SCAN = 0xC0606610
_PAGE_IS_PRESENT = 1 << 3


def _all_present(libc: ctypes.CDLL, start: int, length: int) -> bool:
    """Whether every page is in the page table; False also where the kernel does not say (before Linux 6.7)."""
    regions = (ctypes.c_uint64 * 3)()  # one struct page_region: start, end, categories
    arguments = _ScanArguments(
        size=ctypes.sizeof(_ScanArguments),
        start=start,
        end=start + length,
        vec=ctypes.addressof(regions),
        vec_len=1,
        category_mask=_PAGE_IS_PRESENT,
        return_mask=_PAGE_IS_PRESENT,
    )
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            found = libc.ioctl(table.fileno(), ctypes.c_ulong(_PAGEMAP_SCAN), ctypes.byref(arguments))
    except OSError:
        return False
    return bool(found == 1 and regions[0] == start and regions[1] == start + length)
