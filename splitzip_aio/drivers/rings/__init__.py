"""Two bindings of io_uring behind one class: liburing where it can be used, the bare system calls elsewhere."""

from __future__ import annotations

import os

from splitzip_aio.drivers.rings import kernel, trial
from splitzip_aio.drivers.rings.base import Ring
from splitzip_aio.drivers.rings.syscall_ring import SyscallRing
from splitzip_aio.errors import DriverUnavailableError

__all__ = ["Ring", "open_ring"]


def open_ring(entries: int) -> tuple[Ring, str]:
    """Make a ring of at least ``entries``, and say why it has the binding that it has.

    liburing comes first where it takes nothing away: it must survive on this CPU, and the kernel must read into
    registered buffers in the one way that liburing's Python objects allow. The system calls need neither.

    Raises:
        DriverUnavailableError: using io_uring would end the process.
        OSError: the kernel sets up no ring; ``errno`` tells.
    """
    fault = trial.sandbox_fault()
    if fault is not None:
        raise DriverUnavailableError(fault)
    ring = SyscallRing(entries)
    try:
        hindrance = _liburing_hindrance(ring)
    except BaseException:
        ring.close()
        raise
    if hindrance is not None:
        return ring, hindrance
    ring.close()
    from splitzip_aio.drivers.rings.liburing_ring import LiburingRing

    return LiburingRing(entries), "liburing works here"


def _liburing_hindrance(ring: Ring) -> str | None:
    if not kernel.supports(ring.descriptor, kernel.OP_READV_FIXED):
        return f"liburing needs vectored reads into registered buffers (Linux 6.15); this is {os.uname().release}"
    return trial.liburing_fault()
