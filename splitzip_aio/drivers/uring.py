"""The engine of the uring driver: fixed buffers, registered files, one eventfd."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.files import OpenFile
from splitzip_aio.drivers.operation import Extent, Slots
from splitzip_aio.drivers.rings import Ring, open_ring
from splitzip_aio.drivers.rings.kernel import SQE_ASYNC, SQE_FIXED_FILE
from splitzip_aio.errors import DriverUnavailableError, ReadError

__all__ = ["UringEngine"]

REGISTERED_FILES = 64
NOT_NOW = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})


class UringEngine(Engine):
    """One ring, and the memory that the kernel may be writing to.

    That memory is only safe while the slots live, so the engine keeps them, and ``_owned`` tells which extents
    the kernel still has.
    """

    name = "uring"

    def __init__(self, slots: Slots, queue_depth: int, *, registering: Callable[[], None] | None = None) -> None:
        self._slots = slots
        self._registering = registering
        self._process = os.getpid()
        self._owned: dict[int, Extent] = {}
        self._free_tokens = list(range(queue_depth))
        self._submitted = True
        self._closed = False
        self._ring, self.binding_reason = _new_ring(queue_depth)
        self.binding = self._ring.binding
        try:
            self._event = self._ring.register_event()
        except OSError as exc:
            self._ring.close()
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

    @property
    def signal(self) -> int:
        """The same eventfd."""
        return self._event

    def adopt(self, file: OpenFile) -> None:
        """Register the descriptor while there is room in the table; plain descriptors work too."""
        if self._free_indices:
            index = self._free_indices[-1]
            try:
                self._ring.update_file(index, file.descriptor)
            except OSError as exc:
                raise ReadError(exc.errno, f"io_uring cannot register it: {exc.strerror}", file.path) from exc
            file.registered_index = self._free_indices.pop()

    def disown(self, file: OpenFile) -> None:
        """Take the descriptor out of the table, which would else keep the file open."""
        index, file.registered_index = file.registered_index, None
        if index is not None and not self._closed and os.getpid() == self._process:
            self._ring.update_file(index, -1)
            self._free_indices.append(index)

    def begin(self, extents: Sequence[Extent]) -> None:
        """Queue a read of the rest of each extent and submit them with one system call."""
        for extent in extents:
            self._prepare(extent)
        self._submitted = False
        self.flush()

    def _prepare(self, extent: Extent) -> None:
        file, done = extent.operation.file, extent.done
        token = self._free_tokens.pop()
        # A read that the page cache can serve is a memcpy on the submitting thread, which is the event loop's;
        # SQE_ASYNC gives it to kernel workers, which copy in parallel.
        flags = 0 if file.direct else SQE_ASYNC
        target = file.registered_index
        if target is None:
            target = file.descriptor
        else:
            flags |= SQE_FIXED_FILE
        self._ring.prepare_read(
            token,
            target,
            flags,
            self._slots.addresses[extent.slot] + extent.position + done,
            extent.nbytes - done,
            extent.offset + done,
            extent.slot if self.fixed_buffers else None,
        )
        self._owned[token] = extent

    def flush(self) -> bool:
        """Submit what is prepared. EAGAIN and EBUSY mean later: the entries stay in the submission queue."""
        if self._submitted:
            return True
        try:
            self._ring.submit()
        except OSError as exc:
            if exc.errno in NOT_NOW:
                return False
            raise ReadError(exc.errno, f"io_uring takes no more requests: {exc.strerror}") from exc
        self._submitted = True
        return True

    def collect(self) -> list[tuple[Extent, int]]:
        """Reset the eventfd first, so that a completion arriving in between signals it again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        completions = []
        for token, result in self._ring.completions():
            completions.append((self._owned.pop(token), result))
            self._free_tokens.append(token)
        return completions

    def close(self) -> None:
        """Wait for what the kernel still has, then take the ring down and let go of the buffers."""
        if self._closed or os.getpid() != self._process:
            return
        while self._owned:
            with suppress(InterruptedError, BlockingIOError):
                self._ring.wait()
            self.collect()
        self._closed = True
        self._ring.close()
        os.close(self._event)

    def _register_buffers(self) -> bool:
        """Have the slots pinned once instead of for every read; a refusal is recorded, not raised."""
        slots = self._slots
        try:
            if self._registering is not None:
                self._registering()
            self._ring.register_buffers(
                [(address, len(view)) for address, view in zip(slots.addresses, slots.views, strict=True)]
            )
        except OSError as exc:
            self.refusals.append(f"fixed buffers: {_registration_reason(exc, slots)}")
            return False
        return True

    def _register_files(self) -> list[int]:
        try:
            self._ring.register_files(REGISTERED_FILES)
        except OSError as exc:
            self.refusals.append(f"registered files: {exc.strerror}")
            return []
        return list(range(REGISTERED_FILES))


def _new_ring(queue_depth: int) -> tuple[Ring, str]:
    try:
        return open_ring(queue_depth)
    except OSError as exc:
        raise DriverUnavailableError(f"io_uring cannot be set up: {_setup_reason(exc)}") from exc


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


def _registration_reason(exc: OSError, slots: Slots) -> str:
    what = f"{slots.total_bytes} bytes in {len(slots.views)} slots"
    if exc.errno == errno.ENOMEM:
        return f"ENOMEM, {what} exceed RLIMIT_MEMLOCK ({_memlock()}); raise it (ulimit -l)"
    return f"{errno.errorcode.get(exc.errno or 0, 'error')} for {what}, {exc.strerror}"


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _io_uring_disabled() -> str:
    with suppress(OSError):
        setting = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        return "" if setting == "0" else setting
    return ""
