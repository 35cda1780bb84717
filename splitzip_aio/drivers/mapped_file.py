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
from collections.abc import Callable, Iterable, Mapping
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
        """A hold is over.

        Locks do not nest, and extents may share a page, or be held twice: a page is unlocked when nobody holds it.
        """
        self._held.discard(extent)
        if self._mapping is not None:
            self._mapping.unlock(extent.pages, [other.pages for other in self._held])
            if not self._held:
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
        pages: which of the file's they are.
        locked: they are locked in memory; the extent must not be decoded from before.
    """

    __slots__ = ("_file", "_mapping", "_released", "_since_s", "_view", "locked", "pages")

    def __init__(self, file: MappedFile, mapping: _Mapping, offset: int, nbytes: int) -> None:
        self._file = file
        self._mapping = mapping
        self.pages = range(offset // mmap.PAGESIZE, -(-(offset + nbytes) // mmap.PAGESIZE))
        self._released = self.locked = False
        self._since_s = time.monotonic()
        self._view = mapping.view[offset : offset + nbytes]

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
        self.locked = self._mapping.lock_mapped(self.pages)
        return self.locked

    def lock(self) -> bool:
        """Bring the pages and lock them in memory; False if the kernel refuses.

        Takes milliseconds, so it is for a worker thread.
        """
        with self._mapping.locking:
            if self._released:
                return False
            refused = self._mapping.lock(self.pages)
        self.locked = refused is None
        if refused is not None:
            self._file.refuse(
                f"locking {len(self.pages) * mmap.PAGESIZE} bytes of it in memory is refused: {refused}; see ulimit -l"
            )
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
        self._file.let_go(self)


class _Mapping:
    """What the kernel gives for a file: an open file of its own, with a lease on it, and a mapping."""

    def __init__(self, source: int) -> None:
        self.trusted_s = _trusted_s()
        # Leases belong to an open file description; a duplicate would share that of others with their leases.
        self.descriptor = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC)
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self.descriptor, self._process)
        try:
            self._libc = _libc()
            self._table = _PageTable(self._libc)
            _check_trusted(self._libc, self.descriptor)
            self.size = os.fstat(self.descriptor).st_size
            self._mapped = mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ)
        except BaseException:
            self._finalizer()
            raise
        self.view = memoryview(self._mapped)
        self.locking = threading.Lock()
        self._address = np.frombuffer(self._mapped, np.uint8).ctypes.data

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

    def unlock(self, pages: range, others: Iterable[range]) -> None:
        """Unlock those of the pages that are not among ``others``."""
        if self._finalizer.alive:
            for part in _without(pages, others):
                self._libc.munlock(*self._place(part))

    def lock(self, pages: range) -> str | None:
        """Bring and lock pages; the reason if the kernel refuses."""
        if not self._finalizer.alive:
            return "closed"
        if self._libc.mlock(*self._place(pages)) == 0:
            return None
        return os.strerror(ctypes.get_errno())

    def lock_mapped(self, pages: range) -> bool:
        """Lock pages as they are; whether none of them was missing."""
        start, length = self._place(pages)
        return self._libc.mlock2(start, length, _MLOCK_ONFAULT) == 0 and self._table.has_all(start, length)

    def _place(self, pages: range) -> tuple[int, int]:
        """Address and bytes of pages."""
        return self._address + pages.start * mmap.PAGESIZE, len(pages) * mmap.PAGESIZE

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


def _without(pages: range, others: Iterable[range]) -> list[range]:
    """The parts of ``pages`` that are in none of ``others``."""
    parts = [pages]
    for other in others:
        if other.start < pages.stop and pages.start < other.stop:
            cut = [
                (range(part.start, min(part.stop, other.start)), range(max(part.start, other.stop), part.stop))
                for part in parts
            ]
            parts = [part for pair in cut for part in pair if part]
    return parts


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


class _PageTable:
    """Which pages of this process are mapped, as far as the kernel says: from Linux 6.7 on."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._ioctl = libc.ioctl
        self._region = (ctypes.c_uint64 * 3)()  # struct page_region: start, end, categories
        self._arguments = _ScanArguments(
            size=ctypes.sizeof(_ScanArguments),
            vec=ctypes.addressof(self._region),
            vec_len=1,
            category_mask=_PAGE_IS_PRESENT,
            return_mask=_PAGE_IS_PRESENT,
        )

    def has_all(self, start: int, length: int) -> bool:
        """Whether every page is there; False also where the kernel does not say."""
        self._arguments.start, self._arguments.end = start, start + length
        try:
            table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            found = self._ioctl(table, ctypes.c_ulong(_PAGEMAP_SCAN), ctypes.byref(self._arguments))
        finally:
            os.close(table)
        return bool(found == 1 and self._region[0] == start and self._region[1] == start + length)
