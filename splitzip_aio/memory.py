"""Anonymous memory from the kernel: page-aligned, zeroed, committed as it is written to, and page-locked for CUDA."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from splitzip_aio.errors import InvalidArgumentError

__all__ = ["map_anonymous", "page_lock", "page_unlock"]

_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable


def map_anonymous(nbytes: int, *, option: str) -> mmap.mmap:
    """Map ``nbytes`` bytes, in huge pages where the kernel has them.

    Args:
        nbytes: a positive number of bytes.
        option: the option that asked for them, for the error.

    Raises:
        InvalidArgumentError: the kernel refuses so much.
    """
    try:
        # Private, not mmap's default of shared: shared anonymous memory is a file in tmpfs, without huge pages.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise InvalidArgumentError(f"{option}: the kernel refused {nbytes} bytes ({exc}); give less") from exc
    with suppress(OSError):  # a kernel without huge pages: only a little slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def page_lock(memory: memoryview) -> str | None:
    """Page-lock memory, and make it known to CUDA on all devices; the reason if CUDA refuses."""
    import torch

    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(_address(memory), len(memory), _FOR_ALL_CONTEXTS)
    if status == runtime.cudaError.success:
        return None
    with suppress(RuntimeError):  # CUDA keeps the error, for the next kernel launch to report
        torch.zeros(1, device="cuda")
    return f"cudaHostRegister of {len(memory)} bytes failed: {runtime.cudaGetErrorString(status)}"


def page_unlock(memory: memoryview) -> None:
    """Undo ``page_lock``; nothing may be copied to or from it any more."""
    import torch

    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(_address(memory)))


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data
