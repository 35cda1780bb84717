"""io_uring: fixed buffers, registered files, one eventfd. The only module that imports liburing."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import liburing

from splitzip_aio.drivers.completion import Engine
from splitzip_aio.drivers.files import OpenFile
from splitzip_aio.drivers.operation import Extent, Slots
from splitzip_aio.errors import DriverUnavailableError, ReadError

__all__ = ["UringEngine", "liburing_fault"]

REGISTERED_FILES = 64
NOT_NOW = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})

_TRIAL = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import liburing as u
ring, cqe, page = u.Ring(), u.Cqe(), bytearray(4096)
iovec = u.Iovec([page])
count, array = (ctypes.c_size_t * 2).from_address(id(iovec) + object.__basicsize__)
assert count == 1, "unknown layout of Iovec"
base, length = (ctypes.c_size_t * 2).from_address(array)
assert (base, length) == (ctypes.addressof(ctypes.c_char.from_buffer(page)), 4096), "unknown layout of Iovec"
u.probe()
try:
    u.io_uring_queue_init(1, ring, 0)
    sqe = u.io_uring_get_sqe(ring)
    u.io_uring_prep_readv(sqe, 0, iovec, 0)
    u.io_uring_submit_and_wait(ring, 1)
    u.io_uring_peek_cqe(ring, cqe)
    cqe[0].res
    u.io_uring_cqe_seen(ring, cqe[0])
    u.io_uring_queue_exit(ring)
except (OSError, RuntimeError):
    pass
"""


class _Iovecs:
    """An array of iovecs that can be pointed at any memory, again and again.

    ``liburing.Iovec`` takes memoryviews but never lets go of them: each would leak, and with it the slot's
    mapping. So it is made over bytearrays, of which it keeps no more than the address, and the addresses are
    then overwritten. An Iovec is an object header, a count, and a pointer to the array; :data:`_TRIAL` checks.
    """

    def __init__(self, count: int) -> None:
        self.native = liburing.Iovec([bytearray(1)] * count)
        self._words = (ctypes.c_size_t * (2 * count)).from_address(
            ctypes.c_size_t.from_address(id(self.native) + object.__basicsize__ + ctypes.sizeof(ctypes.c_size_t)).value
        )

    def point(self, index: int, address: int, nbytes: int) -> None:
        """Make one iovec describe ``nbytes`` of memory at ``address``."""
        self._words[2 * index] = address
        self._words[2 * index + 1] = nbytes


@cache
def liburing_fault() -> str | None:
    """Use liburing once in a child process, since what can go wrong first is a fatal signal.

    A liburing wheel built for its maker's CPU dies of SIGILL on any without AVX-512, and a seccomp filter
    may kill instead of refusing. Errors that can be caught are left for the parent to meet and explain.

    Returns:
        Why the child did not survive, and what to do; None if it did. Asked once in a process.
    """
    package = Path(liburing.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-I", "-c", _TRIAL, str(package)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    if done.returncode == -signal.SIGILL:
        return (
            f"liburing {liburing.__version__} was built for another CPU and dies of an illegal instruction here "
            "(its wheels have needed AVX-512); build it from source on this machine"
        )
    if done.returncode == -signal.SIGSYS:
        return "a seccomp filter kills processes that use io_uring; allow the container its system calls"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"liburing does not work here: exit status {done.returncode}, {last}"


class UringEngine(Engine):
    """One submission queue, one completion queue, and the memory that the kernel may be writing to.

    The kernel copies an iovec when it takes the request, but the memory it points at is only safe while the
    slots live, so the engine keeps them, and ``_owned`` tells which extents the kernel still has.
    """

    name = "uring"

    def __init__(self, slots: Slots, queue_depth: int) -> None:
        self._slots = slots
        self._process = os.getpid()
        self._owned: dict[int, Extent] = {}
        self._vectors = [_Iovecs(1) for _ in range(queue_depth)]
        self._free_vectors = list(range(queue_depth))
        self._closed = False
        self._cqe = liburing.Cqe()
        self._ring = _new_ring(queue_depth)
        try:
            self._event = _new_eventfd(self._ring)
        except OSError as exc:
            liburing.io_uring_queue_exit(self._ring)
            raise DriverUnavailableError(f"io_uring has no completion event: {exc.strerror}") from exc
        self.refusals: list[str] = []
        self.fixed_buffers = self._register_buffers()
        self._free_indices = self._register_files()

    @property
    def in_flight(self) -> int:
        """Extents begun and not yet collected."""
        return len(self._owned)

    def fileno(self) -> int:
        """The eventfd that the kernel signals."""
        return self._event

    def adopt(self, file: OpenFile) -> None:
        """Register the descriptor while there is room in the table; plain descriptors work too."""
        if self._free_indices:
            index = self._free_indices[-1]
            try:
                liburing.io_uring_register_files_update(self._ring, liburing.FileIndex([file.descriptor]), index)
            except OSError as exc:
                raise ReadError(exc.errno, f"io_uring cannot register it: {exc.strerror}", file.path) from exc
            file.registered_index = self._free_indices.pop()

    def disown(self, file: OpenFile) -> None:
        """Take the descriptor out of the table, which would else keep the file open."""
        index, file.registered_index = file.registered_index, None
        if index is not None and not self._closed and os.getpid() == self._process:
            liburing.io_uring_register_files_update(self._ring, liburing.FileIndex([-1]), index)
            self._free_indices.append(index)

    def begin(self, extents: Sequence[Extent]) -> None:
        """Queue a read of the rest of each extent and submit them with one system call."""
        for extent in extents:
            self._prepare(extent)
        self.flush()

    def _prepare(self, extent: Extent) -> None:
        file = extent.file
        token = self._free_vectors.pop()
        vector = self._vectors[token]
        start = extent.position + extent.done
        vector.point(0, self._slots.addresses[extent.slot] + start, extent.nbytes - extent.done)
        sqe = liburing.io_uring_get_sqe(self._ring)
        target = file.descriptor if file.registered_index is None else file.registered_index
        offset = extent.offset + extent.done
        if self.fixed_buffers:
            liburing.io_uring_prep_readv_fixed(sqe, target, vector.native, extent.slot, offset)
        else:
            liburing.io_uring_prep_readv(sqe, target, vector.native, offset)
        # A read that the page cache can serve is a memcpy on the submitting thread, which is the event loop's;
        # IOSQE_ASYNC gives it to kernel workers, which copy in parallel.
        sqe.flags = (0 if file.direct else liburing.IOSQE_ASYNC) | (
            0 if file.registered_index is None else liburing.IOSQE_FIXED_FILE
        )
        sqe.user_data = token
        self._owned[token] = extent

    def flush(self) -> bool:
        """Submit what is prepared. EAGAIN and EBUSY mean later: the entries stay in the submission queue."""
        while liburing.io_uring_sq_ready(self._ring):
            try:
                liburing.io_uring_submit(self._ring)
            except OSError as exc:
                if exc.errno in NOT_NOW:
                    return False
                raise ReadError(exc.errno, f"io_uring takes no more requests: {exc.strerror}") from exc
        return True

    def collect(self) -> list[tuple[Extent, int]]:
        """Reset the eventfd first, so that a completion arriving in between signals it again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        completions = []
        while liburing.io_uring_cq_ready(self._ring):
            liburing.io_uring_peek_cqe(self._ring, self._cqe)
            entry = self._cqe[0]
            token = entry.user_data
            try:
                result = entry.res
            except OSError as exc:
                result = -(exc.errno or errno.EIO)
            liburing.io_uring_cqe_seen(self._ring, entry)
            self._free_vectors.append(token)
            completions.append((self._owned.pop(token), result))
        return completions

    def close(self) -> None:
        """Wait for what the kernel still has, then take the rings down and let go of the buffers."""
        if self._closed or os.getpid() != self._process:
            return
        while self._owned:
            with suppress(InterruptedError, BlockingIOError):
                liburing.io_uring_submit_and_wait(self._ring, 1)
            self.collect()
        self._closed = True
        liburing.io_uring_queue_exit(self._ring)
        os.close(self._event)

    def _register_buffers(self) -> bool:
        """Have the slots pinned once instead of for every read; a refusal is recorded, not raised."""
        if not liburing.probe().get("IORING_OP_READV_FIXED"):
            self.refusals.append("fixed buffers: the kernel has no vectored fixed reads (Linux 6.15 has)")
            return False
        count = len(self._slots.views)
        if count > liburing.IOV_MAX:
            self.refusals.append(f"fixed buffers: {count} slots, but {liburing.IOV_MAX} can be registered")
            return False
        iovecs = _Iovecs(count)
        for index, (view, address) in enumerate(zip(self._slots.views, self._slots.addresses, strict=True)):
            iovecs.point(index, address, len(view))
        try:
            liburing.io_uring_register_buffers(self._ring, iovecs.native)
        except OSError as exc:
            self.refusals.append(f"fixed buffers: {_registration_reason(exc, self._slots.total_bytes)}")
            return False
        return True

    def _register_files(self) -> list[int]:
        try:
            liburing.io_uring_register_files_sparse(self._ring, REGISTERED_FILES)
        except OSError as exc:
            self.refusals.append(f"registered files: {exc.strerror}")
            return []
        return list(range(REGISTERED_FILES))


def _new_ring(queue_depth: int) -> Any:
    ring = liburing.Ring()
    try:
        liburing.io_uring_queue_init(queue_depth, ring, liburing.IORING_SETUP_COOP_TASKRUN)
    except OSError as exc:
        raise DriverUnavailableError(f"io_uring cannot be set up: {_setup_reason(exc)}") from exc
    # A child process that inherited the rings would consume this process's completions.
    with suppress(OSError):
        liburing.io_uring_ring_dontfork(ring)
    return ring


def _new_eventfd(ring: Any) -> int:
    event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        liburing.io_uring_register_eventfd(ring, event)
    except OSError:
        os.close(event)
        raise
    return event


def _setup_reason(exc: OSError) -> str:
    match exc.errno:
        case errno.EPERM | errno.EACCES:
            setting = _io_uring_disabled()
            if setting:
                return f"EPERM, the sysctl kernel.io_uring_disabled is {setting}; set it to 0"
            return "EPERM, a seccomp filter forbids it, as containers' defaults do; allow io_uring_setup"
        case errno.ENOSYS:
            return "ENOSYS, the kernel is built without io_uring or a filter hides it"
        case errno.ENOMEM:
            return f"ENOMEM, RLIMIT_MEMLOCK is {_memlock()}; raise it (ulimit -l)"
        case errno.EINVAL:
            return f"EINVAL, kernel {os.uname().release} is too old"
        case _:
            return f"{errno.errorcode.get(exc.errno or 0, 'error')}, {exc.strerror}"


def _registration_reason(exc: OSError, total_bytes: int) -> str:
    if exc.errno == errno.ENOMEM:
        return f"ENOMEM, {total_bytes} bytes exceed RLIMIT_MEMLOCK ({_memlock()}); raise it (ulimit -l)"
    return f"{errno.errorcode.get(exc.errno or 0, 'error')} for {total_bytes} bytes, {exc.strerror}"


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _io_uring_disabled() -> str:
    with suppress(OSError):
        setting = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        return "" if setting == "0" else setting
    return ""
