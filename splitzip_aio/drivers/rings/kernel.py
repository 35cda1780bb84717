"""The three system calls of io_uring, and the part of their stable binary interface that reading needs."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

__all__ = [
    "COMPLETION",
    "ENTER_GETEVENTS",
    "FEAT_RW_CUR_POS",
    "FEAT_SINGLE_MMAP",
    "OFF_SQES",
    "OP_NOP",
    "OP_READ",
    "OP_READV_FIXED",
    "OP_READ_FIXED",
    "READ_ENTRY",
    "REGISTER_BUFFERS",
    "REGISTER_EVENTFD",
    "REGISTER_FILES",
    "REGISTER_FILES_UPDATE",
    "REGISTER_PROBE",
    "SETUP_COOP_TASKRUN",
    "SQE_ASYNC",
    "SQE_BYTES",
    "SQE_FIXED_FILE",
    "UNREGISTER_BUFFERS",
    "UNREGISTER_FILES",
    "Layout",
    "address_of",
    "enter",
    "register",
    "setup",
    "supports",
]

# One number on x86-64, aarch64 and every architecture that joined Linux before io_uring, but for alpha.
_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427

SETUP_COOP_TASKRUN = 1 << 8
FEAT_SINGLE_MMAP = 1 << 0
FEAT_RW_CUR_POS = 1 << 3
OFF_SQES = 0x10000000
ENTER_GETEVENTS = 1 << 0

OP_NOP = 0
OP_READ_FIXED = 4
OP_READ = 22
OP_READV_FIXED = 59
SQE_FIXED_FILE = 1 << 0
SQE_ASYNC = 1 << 4

REGISTER_BUFFERS = 0
UNREGISTER_BUFFERS = 1
REGISTER_FILES = 2
UNREGISTER_FILES = 3
REGISTER_EVENTFD = 4
REGISTER_FILES_UPDATE = 6
REGISTER_PROBE = 8

SQE_BYTES = 64
READ_ENTRY = struct.Struct("=BBHiQQIIQH")
"""opcode, flags, ioprio, fd, offset, address, length, rw_flags, user_data, buf_index; the rest of it stays zero."""
COMPLETION = struct.Struct("=QiI")
"""user_data, result, flags."""

_PARAMETERS = struct.Struct("=30I")
_PROBED_OPS = 256
_PROBE_HEAD_BYTES, _PROBE_OP_BYTES = 16, 8
_OP_SUPPORTED = 1 << 0


class Layout(NamedTuple):
    """What the kernel made of a request for rings; the fields from ``sq_head`` on are bytes into their mapping."""

    descriptor: int
    features: int
    sq_entries: int
    cq_entries: int
    sq_head: int
    sq_tail: int
    sq_array: int
    cq_head: int
    cq_tail: int
    cq_entry: int

    @property
    def ring_bytes(self) -> int:
        """Size of the mapping that holds both rings."""
        return max(self.sq_array + 4 * self.sq_entries, self.cq_entry + COMPLETION.size * self.cq_entries)


def setup(entries: int, flags: int) -> Layout:
    """Make a ring of at least ``entries``; the caller closes its descriptor. Raises OSError."""
    parameters = bytearray(_PARAMETERS.pack(0, 0, flags, *[0] * 27))
    descriptor = _call(_SYS_SETUP, entries, address_of(parameters))
    words = _PARAMETERS.unpack(parameters)
    return Layout(
        descriptor=descriptor,
        features=words[5],
        sq_entries=words[0],
        cq_entries=words[1],
        sq_head=words[10],
        sq_tail=words[11],
        sq_array=words[16],
        cq_head=words[20],
        cq_tail=words[21],
        cq_entry=words[25],
    )


def enter(descriptor: int, to_submit: int, min_complete: int = 0, flags: int = 0) -> int:
    """Submit entries and wait for completions; how many entries the kernel took. Raises OSError."""
    return _call(_SYS_ENTER, descriptor, to_submit, min_complete, flags)


def register(descriptor: int, operation: int, argument: bytearray | None, count: int) -> None:
    """Register or unregister something with a ring. Raises OSError."""
    _call(_SYS_REGISTER, descriptor, operation, address_of(argument) if argument else 0, count)


def supports(descriptor: int, operation: int) -> bool:
    """Whether the kernel knows an operation (an ``OP_`` number). Raises OSError."""
    probe = bytearray(_PROBE_HEAD_BYTES + _PROBE_OP_BYTES * _PROBED_OPS)
    register(descriptor, REGISTER_PROBE, probe, _PROBED_OPS)
    (flags,) = struct.unpack_from("=H", probe, _PROBE_HEAD_BYTES + _PROBE_OP_BYTES * operation + 2)
    return bool(flags & _OP_SUPPORTED)


def address_of(buffer: bytearray) -> int:
    """Where a buffer's bytes are, which the caller keeps alive while the kernel is told of them."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _call(number: int, first: int, second: int, third: int = 0, fourth: int = 0) -> int:
    result = _syscall()(number, first, second, third, fourth, 0, 0)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _syscall() -> Callable[..., int]:
    """libc's ``syscall``. It gives up the GIL, since taking a direct read can take the kernel long."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long,) * 7
    return function
