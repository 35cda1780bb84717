"""The few calls of CUDA's driver API that are made for every slot.

torch has them all, behind tensors, guards and the current stream, which cost the event loop more than the driver does.
None of these waits, so they keep the interpreter's lock: who lets go of it in the middle of a slot, beside a
thread that computes in Python, has it back milliseconds later.
"""

from __future__ import annotations

import ctypes
from types import TracebackType

from splitzip_aio.errors import UnsupportedError

__all__ = ["CudaDriver", "host_address"]

_LIBRARY = "libcuda.so.1"


class CudaDriver:
    """Copies of one device; a ``with`` block makes the device current for whatever is in it, in any thread.

    Made while the device is the current one, and has been used by this process.

    Raises:
        UnsupportedError: there is no CUDA driver.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.PyDLL(_LIBRARY)
        except OSError as exc:
            raise UnsupportedError(f"streaming to a GPU needs NVIDIA's driver ({exc}); use device='cpu' here") from exc
        self._error_name = library.cuGetErrorName
        self._to_device = library.cuMemcpyHtoDAsync_v2
        self._to_device.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._to_host = library.cuMemcpyDtoHAsync_v2
        self._to_host.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._on_device = library.cuMemcpyDtoDAsync_v2
        self._on_device.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._wait = library.cuStreamWaitEvent
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        self._push = library.cuCtxPushCurrent_v2
        self._pop = library.cuCtxPopCurrent_v2
        self._context = ctypes.c_void_p()
        self._check(library.cuCtxGetCurrent(ctypes.byref(self._context)), "cuCtxGetCurrent")
        self._popped = ctypes.byref(ctypes.c_void_p())

    def __enter__(self) -> None:
        self._check(self._push(self._context), "cuCtxPushCurrent")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pop(self._popped)

    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` from host memory at ``source``, in a stream; at once if that memory is not page-locked.

        Raises:
            RuntimeError: the device failed.
        """
        self._check(self._to_device(destination, source, nbytes, stream), "cuMemcpyHtoDAsync")

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` to page-locked host memory at ``destination``, in a stream.

        Raises:
            RuntimeError: the device failed.
        """
        self._check(self._to_host(destination, source, nbytes, stream), "cuMemcpyDtoHAsync")

    def copy_on_device(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` within the device's memory, in a stream.

        Raises:
            RuntimeError: the device failed.
        """
        self._check(self._on_device(destination, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def wait(self, event: int, stream: int) -> None:
        """Have a stream wait for an event that was recorded.

        Raises:
            RuntimeError: the device failed.
        """
        self._check(self._wait(stream, event, 0), "cuStreamWaitEvent")

    def _check(self, status: int, call: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self._error_name(status, ctypes.byref(name))
            text = (name.value or b"").decode().removeprefix("CUDA_ERROR_").replace("_", " ").lower()
            raise RuntimeError(f"{call} failed: {text or 'error'} ({status})")


def host_address(memory: memoryview) -> int:
    """Where writable memory is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
