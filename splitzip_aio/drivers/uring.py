"""io_uring: fixed buffers, registered files, one eventfd. The only module that imports liburing."""

from __future__ import annotations

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
from splitzip_aio.drivers.operation import Extent
from splitzip_aio.errors import DriverUnavailableError, ReadError

__all__ = ["UringEngine", "liburing_fault"]

REGISTERED_FILES = 64
NOT_NOW = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})

_TRIAL = """
import sys
sys.path.insert(0, sys.argv[1])
import liburing as u
ring, cqe, page = u.Ring(), u.Cqe(), memoryview(bytearray(4096))
iovec = u.Iovec([page])
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

    The kernel copies an iovec when it takes the request, but pages are only safe while something refers to
    them: an entry of ``_owned`` keeps the extent, its iovec and its view until the completion was collected.
    """

    name = "uring"

    def __init__(self, buffers: Sequence[memoryview], queue_depth: int) -> None:
        self._buffers = buffers
        self._process = os.getpid()
        self._owned: dict[int, tuple[Extent, Any, memoryview]] = {}
        self._next_token = 0
        self._closed = False
        self._cqe = liburing.Cqe()
        self._ring = _new_ring(queue_depth)
        try:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            liburing.io_uring_register_eventfd(self._ring, self._event)
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
            index = self._free_indices.pop()
            liburing.io_uring_register_files_update(self._ring, liburing.FileIndex([file.descriptor]), index)
            file.registered_index = index

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
        view = self._buffers[extent.slot][extent.position + extent.done : extent.position + extent.nbytes]
        iovec = liburing.Iovec([view])
        sqe = liburing.io_uring_get_sqe(self._ring)
        target = file.descriptor if file.registered_index is None else file.registered_index
        if self.fixed_buffers:
            liburing.io_uring_prep_readv_fixed(sqe, target, iovec, extent.slot, extent.offset + extent.done)
        else:
            liburing.io_uring_prep_readv(sqe, target, iovec, extent.offset + extent.done)
        # A read that the page cache can serve is a memcpy on the submitting thread, which is the event loop's;
        # IOSQE_ASYNC gives it to kernel workers, which copy in parallel.
        sqe.flags = (0 if file.direct else liburing.IOSQE_ASYNC) | (
            0 if file.registered_index is None else liburing.IOSQE_FIXED_FILE
        )
        sqe.user_data = self._next_token
        self._owned[self._next_token] = (extent, iovec, view)
        self._next_token += 1

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
            extent, _, _ = self._owned.pop(token)
            completions.append((extent, result))
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
        try:
            liburing.io_uring_register_buffers(self._ring, liburing.Iovec(list(self._buffers)))
        except (OSError, ValueError) as exc:
            self.refusals.append(f"fixed buffers: {_registration_reason(exc, self._buffers)}")
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


def _registration_reason(exc: OSError | ValueError, buffers: Sequence[memoryview]) -> str:
    if isinstance(exc, ValueError):
        return f"{len(buffers)} slots are more than liburing can register"
    total = sum(len(buffer) for buffer in buffers)
    if exc.errno == errno.ENOMEM:
        return f"ENOMEM, {total} bytes exceed RLIMIT_MEMLOCK ({_memlock()}); raise it (ulimit -l)"
    return f"{errno.errorcode.get(exc.errno or 0, 'error')} for {total} bytes, {exc.strerror}"


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _io_uring_disabled() -> str:
    with suppress(OSError):
        setting = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        return "" if setting == "0" else setting
    return ""
