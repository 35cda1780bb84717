"""Trying in a child process what might end this one: a fatal signal cannot be caught."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = ["liburing_fault", "sandbox_fault"]

_SYSTEM_CALL = """
import ctypes
ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120))
"""

_LIBURING = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import liburing as u
ring, cqe, page = u.Ring(), u.Cqe(), bytearray(4096)
iovec = u.Iovec([page])
count, array = (ctypes.c_size_t * 2).from_address(id(iovec) + object.__basicsize__)
assert count == 1, "unknown layout of Iovec"
base, length = (ctypes.c_size_t * 2).from_address(array)
assert (base, length) == (ctypes.addressof(ctypes.c_char.from_buffer(page)), 4096), "unknown layout of Iovec"
try:
    u.io_uring_queue_init(1, ring, 0)
    sqe = u.io_uring_get_sqe(ring)
    u.io_uring_prep_readv(sqe, 0, iovec, 0)
    u.io_uring_submit_and_wait(ring, 1)
    u.io_uring_peek_cqe(ring, cqe)
    cqe[0].res
    u.io_uring_cqe_seen(ring, cqe[0])
    assert ring.ring_fd >= 0
    u.io_uring_queue_exit(ring)
except (OSError, RuntimeError):
    pass
"""


@cache
def sandbox_fault() -> str | None:
    """Why a process that sets up io_uring is killed here, and what to do; None if it is not.

    Only a seccomp filter kills, and most refuse instead; processes without one are not tried. Asked once.
    """
    if not _filtered():
        return None
    try:
        done = _run(_SYSTEM_CALL)
    except OSError as exc:
        return f"a seccomp filter is on, and no child process can be made to try what it does ({exc.strerror})"
    if done.returncode == -signal.SIGSYS:
        return "a seccomp filter kills processes that use io_uring; allow the container its system calls"
    return None


@cache
def liburing_fault() -> str | None:
    """Why liburing cannot be used in this process; None if it can. Asked once, without importing it.

    A liburing wheel built for its maker's CPU dies of SIGILL on any without AVX-512. Errors that can be caught
    are left for the caller to meet and explain.
    """
    spec = find_spec("liburing")
    if spec is None or spec.origin is None:
        return "liburing is not installed"
    try:
        done = _run(_LIBURING, str(Path(spec.origin).resolve().parent.parent))
    except OSError as exc:
        return f"liburing must be tried in a child process, and none can be made ({exc.strerror})"
    if done.returncode == 0:
        return None
    version = metadata.version("liburing")
    if done.returncode == -signal.SIGILL:
        return (
            f"liburing {version} was built for another CPU and dies of an illegal instruction here; "
            "its wheels have needed AVX-512"
        )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"liburing {version} does not work here: exit status {done.returncode}, {last}"


def _filtered() -> bool:
    """Whether a seccomp filter is on this process; True where that is unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Seccomp:"):
                return line.split()[1] != "0"
    return True


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
