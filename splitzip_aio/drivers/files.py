"""Opening a file for reading: past the page cache where the file system has it, and why not where it has not."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

from splitzip_aio.abc import FileHandle, IOMode
from splitzip_aio.errors import InvalidArgumentError, ReadError, UnsupportedError

__all__ = ["DirectSupport", "OpenFile", "direct_support", "open_file"]

FALLBACK_ALIGNMENT = 4096
MODES = ("auto", "direct", "buffered")

_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_ALIGN_AT = 152


@dataclass(frozen=True, slots=True)
class DirectSupport:
    """Whether a file can be read past the page cache, the reason, and the alignments in bytes."""

    supported: bool
    reason: str
    memory_alignment: int = 1
    offset_alignment: int = 1


class OpenFile(FileHandle):
    """A descriptor that stays open until its last read is done, whenever ``close`` is called.

    A short read is continued with the same descriptor. Were it closed in between, its number could by then
    be another file's; so reads pin the handle, and the last one to let go of a closed handle releases it.
    """

    def __init__(self, path: str, descriptor: int, size: int, direct: DirectSupport, *, may_demote: bool) -> None:
        self.path = path
        self.size = size
        self.descriptor = descriptor
        self.direct = direct.supported
        self.reason = direct.reason
        self.memory_alignment = direct.memory_alignment
        self.offset_alignment = direct.offset_alignment
        self.registered_index: int | None = None
        self.on_release: Callable[[OpenFile], None] | None = None
        self._may_demote = may_demote
        self._pins = 0
        self._closed = False

    def __repr__(self) -> str:
        mode = "closed" if self._closed else "direct" if self.direct else "buffered"
        return f"<{type(self).__name__} {self.path!r} {mode}, {self.size} bytes>"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self) -> None:
        """Refuse further reads, and release the descriptor once those in flight are done. Idempotent."""
        self._closed = True
        if self._pins == 0:
            self.release()

    def pin(self) -> None:
        """A read begins."""
        self._pins += 1

    def unpin(self) -> None:
        """A read is over, and the kernel done with it."""
        self._pins -= 1
        if self._closed and self._pins == 0:
            self.release()

    def demote(self) -> bool:
        """Go on through the page cache after a refused direct read; False where that would be no help.

        Some file systems accept O_DIRECT and refuse the first read. The flag belongs to the open file
        description, so clearing it also serves reads through a registered descriptor.
        """
        if not self._may_demote:
            return False
        if not self.direct:
            return True
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        self.reason = "buffered: the file system took O_DIRECT but refused an aligned direct read (EINVAL)"
        self.memory_alignment = self.offset_alignment = 1
        return True

    def release(self) -> None:
        """Close the descriptor now: whatever was in flight is done. Idempotent."""
        self._closed = True
        if self.descriptor >= 0:
            if self.on_release is not None:
                self.on_release(self)
            os.close(self.descriptor)
            self.descriptor = -1


def open_file(path: str | os.PathLike[str], io: IOMode) -> OpenFile:
    """Open ``path``, choosing direct or buffered reading as ``ReadDriver.open`` describes."""
    if io not in MODES:
        raise InvalidArgumentError(f"io: expected one of {', '.join(MODES)}, found {io!r}")
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a FIFO must fail below, not wait for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        remedy = "; raise the limit on open files (ulimit -n)" if exc.errno == errno.EMFILE else ""
        raise ReadError(exc.errno, f"cannot open for reading: {exc.strerror}{remedy}", name) from exc
    try:
        return _examine(name, descriptor, io)
    except BaseException:
        os.close(descriptor)
        raise


def _examine(name: str, descriptor: int, io: IOMode) -> OpenFile:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise ReadError(code, "cannot read extents: not a regular file", name)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK
    if io == "buffered":
        direct = DirectSupport(False, "buffered: asked for")
    else:
        direct = direct_support(descriptor, required=io == "direct")
    if direct.supported:
        direct = _with_direct_flag(descriptor, flags, direct)
    if not direct.supported:
        if io == "direct":
            raise UnsupportedError(
                f"{name}: direct I/O was asked for, but {direct.reason.removeprefix('buffered: ')}; "
                "use io='auto' or 'buffered'"
            )
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return OpenFile(name, descriptor, status.st_size, direct, may_demote=direct.supported and io == "auto")


def _with_direct_flag(descriptor: int, flags: int, direct: DirectSupport) -> DirectSupport:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as exc:
        return DirectSupport(False, f"buffered: the file system refuses O_DIRECT ({exc.strerror})")
    return direct


def direct_support(descriptor: int, *, required: bool = False) -> DirectSupport:
    """Ask the kernel whether and how a file can be read with O_DIRECT.

    Args:
        descriptor: the open file.
        required: take O_DIRECT also where it gains nothing, as on tmpfs.
    """
    if not hasattr(os, "O_DIRECT"):
        return DirectSupport(False, "buffered: this system has no O_DIRECT")
    libc = ctypes.CDLL(None, use_errno=True)
    memory = _in_memory(libc, descriptor)
    if memory is not None and not required:
        return DirectSupport(False, f"buffered: {memory} is memory already; there is no cache to go past")
    alignments = _dio_alignments(libc, descriptor)
    if alignments is None:
        reason = f"direct: the file system tells no alignment, {FALLBACK_ALIGNMENT} is assumed"
        return DirectSupport(True, reason, FALLBACK_ALIGNMENT, FALLBACK_ALIGNMENT)
    in_memory, in_file = alignments
    if in_memory == 0 or in_file == 0:
        return DirectSupport(False, "buffered: the file system has no direct I/O for this file")
    return DirectSupport(True, "direct: the file system has it", in_memory, in_file)


def _in_memory(libc: ctypes.CDLL, descriptor: int) -> str | None:
    """The name of the file system if it lives in memory. ``f_type`` is the first word of struct statfs."""
    answer = (ctypes.c_long * 64)()
    if libc.fstatfs(descriptor, ctypes.byref(answer)) != 0:
        return None
    return _IN_MEMORY.get(answer[0] & 0xFFFFFFFF)


def _dio_alignments(libc: ctypes.CDLL, descriptor: int) -> tuple[int, int] | None:
    """STATX_DIOALIGN's memory and offset alignments; zeros: no direct I/O; None: the kernel does not say."""
    statx = getattr(libc, "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    if not struct.unpack_from("=I", answer.raw)[0] & _STATX_DIOALIGN:
        return None
    in_memory, in_file = struct.unpack_from("=II", answer.raw, _DIO_ALIGN_AT)
    return in_memory, in_file
