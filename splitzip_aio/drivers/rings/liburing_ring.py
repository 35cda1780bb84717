"""io_uring through liburing. The only module that imports it."""

from __future__ import annotations

import ctypes
import errno
from contextlib import suppress
from typing import Any

import liburing

from splitzip_aio.drivers.rings import kernel
from splitzip_aio.drivers.rings.base import Ring

__all__ = ["LiburingRing"]


class _Iovec:
    """An iovec that can be pointed at any memory, again and again.

    ``liburing.Iovec`` takes memoryviews but never lets go of them: each would leak, and with it the slot's
    mapping. So it is made over a bytearray, of which it keeps no more than the address, and the address is
    then overwritten. An Iovec is an object header, a count, and a pointer to the array; the trial checks that.
    """

    def __init__(self) -> None:
        self.native = liburing.Iovec([bytearray(1)])
        array_at = id(self.native) + object.__basicsize__ + ctypes.sizeof(ctypes.c_size_t)
        self._words = (ctypes.c_size_t * 2).from_address(ctypes.c_size_t.from_address(array_at).value)

    def point(self, address: int, nbytes: int) -> None:
        """Make it describe ``nbytes`` of memory at ``address``."""
        self._words[0] = address
        self._words[1] = nbytes


class LiburingRing(Ring):
    """liburing's own queues.

    Its ``prep_read`` and ``prep_read_fixed`` accept bytearrays only, so reads are vectored, of one iovec each;
    the kernel copies that when it takes the request. Vectored reads into registered buffers came with 6.15.
    """

    def __init__(self, entries: int) -> None:
        """Raises OSError."""
        self.binding = f"liburing {liburing.__version__}"
        self._vectors = [_Iovec() for _ in range(entries)]
        self._cqe = liburing.Cqe()
        self._ring: Any = liburing.Ring()
        liburing.io_uring_queue_init(entries, self._ring, kernel.SETUP_COOP_TASKRUN)
        self.descriptor = self._ring.ring_fd
        # A child process that inherited the queues would consume this process's completions.
        with suppress(OSError):
            liburing.io_uring_ring_dontfork(self._ring)

    def prepare_read(
        self, token: int, target: int, flags: int, address: int, nbytes: int, offset: int, buffer: int | None
    ) -> None:
        """Write a read into the submission queue; see ``Ring.prepare_read``."""
        vector = self._vectors[token]
        vector.point(address, nbytes)
        sqe = liburing.io_uring_get_sqe(self._ring)
        if buffer is None:
            liburing.io_uring_prep_readv(sqe, target, vector.native, offset)
        else:
            liburing.io_uring_prep_readv_fixed(sqe, target, vector.native, buffer, offset)
        sqe.flags = flags
        sqe.user_data = token

    def submit(self) -> None:
        """Hand what is prepared to the kernel; after an error the rest stays prepared."""
        while liburing.io_uring_sq_ready(self._ring):
            liburing.io_uring_submit(self._ring)

    def completions(self) -> list[tuple[int, int]]:
        """Token and result of each read completed since the last call."""
        found = []
        while liburing.io_uring_cq_ready(self._ring):
            liburing.io_uring_peek_cqe(self._ring, self._cqe)
            entry = self._cqe[0]
            token = entry.user_data
            try:
                result = entry.res
            except OSError as exc:
                result = -(exc.errno or errno.EIO)
            liburing.io_uring_cqe_seen(self._ring, entry)
            found.append((token, result))
        return found

    def wait(self) -> None:
        """Submit what is prepared, and block until there is a completion."""
        liburing.io_uring_submit_and_wait(self._ring, 1)

    def free(self) -> None:
        """Take the queues down, and with them the descriptor."""
        liburing.io_uring_queue_exit(self._ring)
