"""Which rung is taken, and what is said about those that were not."""

from __future__ import annotations

import errno
import logging
import mmap
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.abc import ReadDriver
from splitzip_aio.drivers import open_driver, uring
from splitzip_aio.drivers.rings import Ring, kernel, open_ring, trial
from splitzip_aio.errors import DriverUnavailableError, InvalidArgumentError


@pytest.fixture
def buffers() -> list[memoryview]:
    return [memoryview(mmap.mmap(-1, 1 << 12))]


def close(driver: Any) -> None:
    anyio.run(driver.aclose)


def open_or_skip(buffers: list[memoryview]) -> ReadDriver:
    try:
        return open_driver("uring", buffers=buffers)
    except DriverUnavailableError as exc:
        pytest.skip(str(exc))


@pytest.mark.parametrize(
    ("code", "setting", "message"),
    [
        (errno.EPERM, "2", r"kernel\.io_uring_disabled is 2; set it to 0"),
        (errno.EPERM, "", "seccomp"),
        (errno.ENOSYS, "", "without io_uring"),
        (errno.ENOMEM, "", "RLIMIT_MEMLOCK"),
        (errno.EINVAL, "", "too old"),
        (errno.EMFILE, "", "EMFILE"),
    ],
)
def test_forbidden_io_uring(code: int, setting: str, message: str, buffers: Any, monkeypatch: Any, caplog: Any) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(kernel, "setup", refuse)
    monkeypatch.setattr(uring, "_io_uring_disabled", lambda: setting)
    with caplog.at_level(logging.WARNING, "splitzip_aio"):
        driver = open_driver("auto", buffers=buffers)
    statistics = driver.statistics()
    assert (statistics.name, statistics.fixed_buffers) == ("threads", False)
    (reason,) = statistics.fallbacks
    assert reason.startswith("uring: io_uring cannot be set up")
    assert [record.getMessage() for record in caplog.records] == [f"threads driver: fell back, {reason}"]
    with pytest.raises(DriverUnavailableError, match=message):
        open_driver("uring", buffers=buffers)
    close(driver)


@pytest.mark.parametrize(
    ("status", "stderr", "message"),
    [
        (-signal.SIGILL, "", "liburing .* was built for another CPU.*AVX-512"),
        (
            1,
            "Traceback\nAssertionError: unknown layout of Iovec\n",
            "status 1, AssertionError: unknown layout of Iovec",
        ),
        (1, "", "no message"),
    ],
)
def test_liburing_that_cannot_be_used_is_replaced(
    status: int, stderr: str, message: str, buffers: Any, monkeypatch: Any, caplog: Any
) -> None:
    pytest.importorskip("liburing")
    done = subprocess.CompletedProcess([], status, stdout="", stderr=stderr)
    monkeypatch.setattr(trial, "_run", lambda *_: done)
    fault = trial.liburing_fault.__wrapped__()
    assert re.search(message, fault)
    monkeypatch.setattr(trial, "liburing_fault", lambda: fault)
    monkeypatch.setattr(kernel, "supports", lambda *_: True)
    with caplog.at_level(logging.WARNING, "splitzip_aio"):
        driver = open_or_skip(buffers)
    statistics = driver.statistics()
    assert (statistics.binding, statistics.binding_reason) == ("system calls", fault)
    assert statistics.fallbacks == ()
    assert not caplog.records
    close(driver)


def test_liburing_that_is_not_there(monkeypatch: Any) -> None:
    monkeypatch.setattr(trial, "find_spec", lambda name: None)
    assert trial.liburing_fault.__wrapped__() == "liburing is not installed"


def test_kernel_on_which_liburing_would_lose_fixed_buffers(buffers: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel, "supports", lambda descriptor, operation: operation != kernel.OP_READV_FIXED)
    monkeypatch.setattr(trial, "liburing_fault", lambda: None)
    driver = open_or_skip(buffers)
    statistics = driver.statistics()
    assert statistics.binding == "system calls"
    assert "Linux 6.15" in (statistics.binding_reason or "")
    close(driver)


def test_sandbox_that_kills(buffers: Any, monkeypatch: Any) -> None:
    killed = subprocess.CompletedProcess([], -signal.SIGSYS, stdout="", stderr="")
    monkeypatch.setattr(trial, "_run", lambda *_: killed)
    monkeypatch.setattr(trial, "_filtered", lambda: False)
    assert trial.sandbox_fault.__wrapped__() is None
    monkeypatch.setattr(trial, "_filtered", lambda: True)
    fault = trial.sandbox_fault.__wrapped__()
    monkeypatch.setattr(trial, "sandbox_fault", lambda: fault)
    monkeypatch.setattr(kernel, "setup", lambda *_: pytest.fail("this would have been the end"))
    with pytest.raises(DriverUnavailableError, match="a seccomp filter kills"):
        open_driver("uring", buffers=buffers)
    driver = open_driver("auto", buffers=buffers)
    assert driver.statistics().fallbacks == (f"uring: {fault}",)
    assert driver.statistics().binding is None
    close(driver)


def test_no_child_process_can_be_made(monkeypatch: Any) -> None:
    """What cannot be tried is not used: an embedded interpreter may know no executable, a filter may forbid exec."""
    monkeypatch.setattr(trial.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(trial, "_filtered", lambda: True)
    assert "no child process can be made" in trial.sandbox_fault.__wrapped__()
    if find_spec("liburing"):
        assert "none can be made" in trial.liburing_fault.__wrapped__()


def test_trial_of_the_system_call_survives_here(monkeypatch: Any) -> None:
    """The child really makes the call; where a filter refuses it, or nothing does, that is no fault."""
    monkeypatch.setattr(trial, "_filtered", lambda: True)
    ran: list[int] = []
    run = trial._run

    def record(*arguments: str) -> Any:
        done = run(*arguments)
        ran.append(done.returncode)
        return done

    monkeypatch.setattr(trial, "_run", record)
    if trial.sandbox_fault.__wrapped__() is None:
        assert ran == [0]


def test_ring_is_closed_when_choosing_a_binding_fails(monkeypatch: Any, no_leaked_descriptors: Any) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.EPERM, "refused")

    monkeypatch.setattr(kernel, "supports", refuse)
    with no_leaked_descriptors(), pytest.raises(OSError, match=r"refused|Operation not permitted|not implemented"):
        open_ring(4)


def test_refused_registration_leaves_uring_without_fixed_buffers(
    driver_name: str, make_slots: Any, monkeypatch: Any, big_file: Path, content: bytes
) -> None:
    if driver_name != "uring":
        pytest.skip("only a uring registers buffers")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Ring, "register_buffers", refuse)
    monkeypatch.setattr(Ring, "register_files", refuse)
    slots = make_slots(1)

    async def main() -> None:
        async with open_driver("auto", buffers=slots.views) as driver:
            file = driver.open(big_file)
            assert await driver.read(file, 0, 0, offset=0, nbytes=3 << 20) == 3 << 20
            statistics = driver.statistics()
            assert (statistics.name, statistics.fixed_buffers) == ("uring", False)
            assert len(statistics.fallbacks) == 2
            assert f"{3 << 20} bytes in 1 slots exceed RLIMIT_MEMLOCK" in statistics.fallbacks[0]
        assert slots.peek(0, 0, 3 << 20) == content[: 3 << 20]

    anyio.run(main)


def test_threads_when_asked_for_is_no_fallback(buffers: Any, caplog: Any) -> None:
    driver = open_driver("threads", buffers=buffers)
    assert driver.name == driver.statistics().name == "threads"
    assert driver.statistics().fallbacks == ()
    assert not caplog.records
    close(driver)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"driver": "magic"}, "expected auto, uring or threads, found 'magic'"),
        ({"queue_depth": 0}, "queue_depth: expected 1 to 4096, found 0"),
        ({"queue_depth": 4097}, "queue_depth"),
        ({"buffers": []}, "at least one"),
        ({"buffers": [memoryview(b"readonly")]}, r"buffers\[0\]: expected writable"),
        ({"buffers": [memoryview(bytearray())]}, r"buffers\[0\]: expected writable memory of at least a byte"),
        ({"buffers": [memoryview(bytearray(8))[::2]]}, r"buffers\[0\]: expected contiguous"),
    ],
)
def test_impossible_options(arguments: dict[str, Any], message: str, buffers: Any) -> None:
    options = {"driver": "threads", "buffers": buffers} | arguments
    with pytest.raises(InvalidArgumentError, match=message):
        open_driver(options.pop("driver"), **options)
