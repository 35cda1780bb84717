"""A seccomp filter for this process, as a container's profile would have it: some system calls fail."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
FCNTL = {"x86_64": 72, "aarch64": 25}.get(platform.machine(), -1)

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARGUMENTS_AT = 0, 16


@dataclass(frozen=True)
class Refusal:
    """A system call that fails with ``errno``: always, or if one argument has a value and another has a bit."""

    call: int
    errno: int
    equal: tuple[int, int] | None = None
    has_bit: tuple[int, int] | None = None

    def program(self) -> list[tuple[int, int, int, int]]:
        """Code, jump if so, jump if not, and operand of each instruction; falls through if this is not the call."""
        tests = [(_NUMBER_AT, _JUMP_EQUAL, self.call)]
        for kind, condition in ((_JUMP_EQUAL, self.equal), (_JUMP_SET, self.has_bit)):
            if condition is not None:
                argument, value = condition
                tests.append((_ARGUMENTS_AT + 8 * argument, kind, value))
        code: list[tuple[int, int, int, int]] = []
        for place, (offset, kind, value) in enumerate(tests):
            left = 2 * (len(tests) - place - 1) + 1  # instructions to the end of this refusal
            code += [(_LOAD, 0, 0, offset), (kind, 0, left, value)]
        return [*code, (_RETURN, 0, 0, _ERRNO | self.errno)]


def refuse(refusals: Sequence[Refusal]) -> None:
    """Have the kernel refuse these calls to this process and its children from now on."""
    code = [line for refusal in refusals for line in refusal.program()] + [(_RETURN, 0, 0, _ALLOW)]
    packed = b"".join(
        operation.to_bytes(2, "little") + bytes([true, false]) + operand.to_bytes(4, "little")
        for operation, true, false, operand in code
    )
    program = ctypes.create_string_buffer(packed)
    header = (ctypes.c_size_t * 2)(len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    no, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
    for arguments in ((_SET_NO_NEW_PRIVS, one, no), (_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), header)):
        if libc.prctl(*arguments, no, no) != 0:
            code_ = ctypes.get_errno()
            raise OSError(code_, os.strerror(code_))
