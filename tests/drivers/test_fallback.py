"""Which rung is taken, and what is said about those that were not."""

from __future__ import annotations

import errno
import logging
import mmap
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.drivers import open_driver
from splitzip_aio.errors import DriverUnavailableError, InvalidArgumentError

uring = pytest.importorskip("splitzip_aio.drivers.uring", reason="liburing is not installed")


@pytest.fixture
def buffers() -> list[memoryview]:
    return [memoryview(mmap.mmap(-1, 1 << 16))]


def close(driver: Any) -> None:
    anyio.run(driver.aclose)


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

    monkeypatch.setattr(uring, "liburing_fault", lambda: None)
    monkeypatch.setattr(uring.liburing, "Ring", object)
    monkeypatch.setattr(uring.liburing, "io_uring_queue_init", refuse)
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
        (-4, "", "another CPU.*AVX-512.*build it from source"),
        (-31, "", "seccomp filter kills"),
        (1, "Traceback\nAssertionError: unknown layout of Iovec\n", "unknown layout of Iovec"),
    ],
)
def test_liburing_that_kills_its_process(status: int, stderr: str, message: str, monkeypatch: Any) -> None:
    done = subprocess.CompletedProcess([], status, stdout="", stderr=stderr)
    monkeypatch.setattr(uring.subprocess, "run", lambda *_, **__: done)
    fault = uring.liburing_fault.__wrapped__()
    monkeypatch.setattr(uring, "liburing_fault", lambda: fault)
    with pytest.raises(DriverUnavailableError, match=message):
        open_driver("uring", buffers=[memoryview(bytearray(1))])


def test_refused_registration_leaves_uring_without_fixed_buffers(
    driver_name: str, make_slots: Any, monkeypatch: Any, big_file: Path, content: bytes
) -> None:
    if driver_name != "uring":
        pytest.skip("only a uring registers buffers")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(uring.liburing, "io_uring_register_buffers", refuse)
    monkeypatch.setattr(uring.liburing, "io_uring_register_files_sparse", refuse)
    slots = make_slots(1)

    async def main() -> None:
        async with open_driver("auto", buffers=slots.views) as driver:
            file = driver.open(big_file)
            assert await driver.read(file, 0, 0, offset=0, nbytes=3 << 20) == 3 << 20
            statistics = driver.statistics()
            assert (statistics.name, statistics.fixed_buffers) == ("uring", False)
            assert len(statistics.fallbacks) == 2
            assert "RLIMIT_MEMLOCK" in statistics.fallbacks[0]
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
