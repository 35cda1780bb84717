"""Machines that offer less: each falls to the next rung, says so once, and ``doctor`` names cause and remedy.

uring with registered buffers ▶ uring ▶ threads, and direct ▶ buffered. Whatever the rung, the bytes are right.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from splitzip_aio.cache import build_cache
from splitzip_aio.cache.layers import layer_name
from splitzip_aio.drivers.files import direct_support
from tests.cache.samples import write_checkpoint
from tests.environments import seccomp
from tests.environments.child import unshare_mounts
from tests.faults.seeded import make_sample
from tests.faults.test_seeded import skip_without_uring
from tests.transport.samples import Sample, ten_layers

ROOT = Path(__file__).parents[2]
NOBODY = 65534
RING_BYTES = 1 << 20


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    """A cache that anyone may read, which those under pytest's own directory are not."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        sample = make_sample(Path(directory))
        if os.geteuid() == 0:
            for path in sample.root.rglob("*"):
                os.chown(path, NOBODY, NOBODY)
        yield sample


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that anyone may write to."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


def digest_of(sample: Sample) -> str:
    """What the child computes if every byte is right."""
    digest = hashlib.sha256()
    layers = dict.fromkeys(layer_name(name) for name in sample.tensors)
    for layer in layers:
        for name in sorted(name for name in sample.tensors if layer_name(name) == layer):
            digest.update(name.encode() + sample.tensors[name][2])
    return digest.hexdigest()


@cache
def server() -> subprocess.Popen[str]:
    """What forks the processes that are tested; it ends with this one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.environments.child"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(lambda: (process.stdin.close(), process.wait(), process.stdout.close()))  # type: ignore[union-attr]
    return process


def child(root: Path, **spec: Any) -> dict[str, Any]:
    """What a process says that was restricted in this way."""
    spec.setdefault("options", {}).setdefault("ring_bytes", RING_BYTES)
    process = server()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"cache": str(root)} | spec) + "\n")
    process.stdin.flush()
    status, out, err = json.loads(process.stdout.readline())
    assert status == 0, err[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def check_stream(sample: Sample, found: dict[str, Any], driver: str, *fallbacks: str, cached: str = "") -> None:
    """The bytes are right; each fallback is in the statistics and was said once, and nothing else was.

    ``cached`` is one more where the page cache still has the packs; other tests drop what it has.
    """
    if cached and any(cached in reason for reason in found["fallbacks"]):
        fallbacks = (*fallbacks, cached)
    assert found.get("message") is None
    assert found["digest"] == digest_of(sample)
    assert found["driver"] == driver
    assert len(found["fallbacks"]) == len(found["said"]) == len(fallbacks), found
    for part in fallbacks:
        assert sum(part in reason for reason in found["fallbacks"]) == 1, found["fallbacks"]
        assert sum(part in message for message in found["said"]) == 1, found["said"]


@pytest.mark.parametrize(
    ("code", "cause", "remedy"),
    [
        (errno.EPERM, "EPERM, a seccomp filter forbids it", "allow io_uring_setup"),
        (errno.ENOSYS, "ENOSYS, the kernel is built without io_uring or a filter hides it", "threads driver reads"),
    ],
)
def test_io_uring_refused(sample: Sample, place: Path, code: int, cause: str, remedy: str) -> None:
    calls = (seccomp.IO_URING_SETUP, seccomp.IO_URING_ENTER, seccomp.IO_URING_REGISTER)
    found = child(sample.root, refusals=[(call, code) for call in calls], doctor=str(place))
    check_stream(sample, found, "threads", f"uring: io_uring cannot be set up: {cause}")
    check = found["doctor"]["io_uring"]
    assert check["status"] == "warn"
    assert cause in check["detail"]
    assert remedy in f"{check['detail']} {check['remedy']}"


def test_io_uring_as_an_order_is_refused_with_the_cause(sample: Sample) -> None:
    found = child(sample.root, refusals=[(seccomp.IO_URING_SETUP, errno.EPERM)], options={"driver": "uring"})
    assert found["error"] == "DriverUnavailableError"
    assert "allow io_uring_setup" in found["message"]
    assert found["said"] == []


def test_kernel_too_old_for_an_operation(sample: Sample, place: Path) -> None:
    """IORING_REGISTER_PROBE is as old as the reads we make; a kernel without it has neither."""
    skip_without_uring()
    found = child(sample.root, refusals=[(seccomp.IO_URING_REGISTER, errno.EINVAL, (1, 8))], doctor=str(place))
    check_stream(sample, found, "threads", "uring: io_uring cannot be set up: EINVAL, kernel")
    assert "too old" in found["doctor"]["io_uring"]["detail"]


@pytest.mark.parametrize(("operation", "what"), [(0, "fixed buffers: EINVAL"), (2, "registered files: Invalid")])
def test_kernel_that_registers_nothing(sample: Sample, place: Path, operation: int, what: str) -> None:
    skip_without_uring()
    found = child(sample.root, refusals=[(seccomp.IO_URING_REGISTER, errno.EINVAL, (1, operation))], doctor=str(place))
    check_stream(sample, found, "uring", what)
    assert found["fixed_buffers"] == (operation != 0)
    assert what in found["doctor"]["io_uring"]["detail"]


def test_sysctl(sample: Sample, place: Path) -> None:
    """kernel.io_uring_disabled is 2, as this process sees it: the file is another, and the call fails."""
    skip_without_uring()
    setting = place / "io_uring_disabled"
    setting.write_text("2\n")
    binds = [(str(setting), "/proc/sys/kernel/io_uring_disabled")]
    if not can_mount():
        pytest.skip("only root mounts file systems")
    found = child(sample.root, refusals=[(seccomp.IO_URING_SETUP, errno.EPERM)], doctor=str(place), binds=binds)
    check_stream(sample, found, "threads", "the sysctl kernel.io_uring_disabled is 2; set it to 0")
    assert "kernel.io_uring_disabled is 2; set it to 0" in found["doctor"]["io_uring"]["detail"]


def test_64_kib_of_locked_memory(sample: Sample, place: Path) -> None:
    """RLIMIT_MEMLOCK does not bind root."""
    skip_without_uring()
    found = child(sample.root, limits={"RLIMIT_MEMLOCK": 64 << 10}, user=NOBODY, doctor=str(place))
    check_stream(
        sample,
        found,
        "uring",
        "exceed RLIMIT_MEMLOCK (65536 bytes); raise it (ulimit -l)",
        cached="of it in memory is refused: Cannot allocate memory; see ulimit -l",
    )
    assert not found["fixed_buffers"]
    check = found["doctor"]["locked memory"]
    assert check["status"] == "warn"
    assert "limit 65.5 kB" in check["detail"]
    assert "ulimit -l" in check["remedy"]


def test_file_system_that_refuses_o_direct(sample: Sample, place: Path) -> None:
    with (sample.root / "manifest.json").open("rb") as file:
        if seccomp.FCNTL < 0 or not direct_support(file.fileno()).supported:
            pytest.skip("it does so by itself, or this architecture is not known")
    refusal = (seccomp.FCNTL, errno.EINVAL, (1, fcntl.F_SETFL), (2, os.O_DIRECT))
    found = child(sample.root, refusals=[refusal], doctor=str(place), options={"driver": "threads"})
    check_stream(sample, found, "threads", "direct I/O: buffered: the file system refuses O_DIRECT (Invalid argument)")
    assert found["direct_files"] == 0
    check = found["doctor"][f"direct I/O in {place}"]
    assert (check["status"], "refuses O_DIRECT" in check["detail"]) == ("warn", True)
    assert "local disk (ext4, xfs, btrfs)" in check["remedy"]
    ordered = child(sample.root, refusals=[refusal], options={"driver": "threads", "io": "direct"})
    assert ordered["error"] == "UnsupportedError"
    assert "direct I/O was asked for, but the file system refuses O_DIRECT" in ordered["message"]


def test_tmpfs(sample: Sample) -> None:
    home = Path("/dev/shm")
    if not home.is_dir() or not os.access(home, os.W_OK):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir=home) as directory:
        cache = shutil.copytree(sample.root, Path(directory) / "cache")
        found = child(cache, doctor=directory, options={"driver": "threads"})
        check_stream(sample, found, "threads", "direct I/O: buffered: tmpfs is memory already")
        check = found["doctor"][f"direct I/O in {directory}"]
        assert "tmpfs is memory already; there is no cache to go past" in check["detail"]


def test_overlayfs(sample: Sample, place: Path) -> None:
    """As in containers: the cache is in an image, beneath a layer that is written to."""
    if not can_mount():
        pytest.skip("only root mounts file systems")
    for name in ("lower", "upper", "work", "merged"):
        (place / name).mkdir()
    shutil.copytree(sample.root, place / "lower" / "cache")
    layers = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "none", "-o", layers, str(place / "merged")], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no overlayfs here: {mounted.stderr.decode()}")
    try:
        found = child(place / "merged" / "cache", doctor=str(place / "merged"), options={"driver": "threads"})
        directly = found["doctor"][f"direct I/O in {place / 'merged'}"]["status"] == "ok"
        refusals, unmapped = () if directly else ("direct I/O: buffered",), "it cannot be mapped: its file system"
        check_stream(sample, found, "threads", *refusals, cached=unmapped)
        checkpoint = write_checkpoint(place / "model.safetensors", ten_layers())
        build_cache(
            checkpoint, place / "merged" / "cache", force=True, segment_elements=2048
        )  # replaces, across layers
        check_stream(
            sample,
            child(place / "merged" / "cache", options={"driver": "threads"}),
            "threads",
            *refusals,
            cached=unmapped,
        )
    finally:
        subprocess.run(["umount", str(place / "merged")], check=True)


def test_64_open_files(sample: Sample) -> None:
    skip_without_uring()
    check_stream(sample, child(sample.root, limits={"RLIMIT_NOFILE": 64}), "uring")


def test_more_packs_than_open_files(place: Path) -> None:
    checkpoint = write_checkpoint(place / "model.safetensors", ten_layers())
    build_cache(checkpoint, place / "cache", segment_elements=2048, pack_bytes=4096)
    assert len(list((place / "cache" / "packs").iterdir())) > 32  # and each is opened more than once
    for limit in (64, 40):  # enough for the cache, and not even that
        found = child(place / "cache", limits={"RLIMIT_NOFILE": limit}, options={"driver": "threads"})
        assert found["error"] == "ReadError"
        assert "Too many open files; raise the limit on open files (ulimit -n)" in found["message"]
        assert str(place / "cache" / "packs") in found["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ring_bytes": "1GiB"}, "ring_bytes: the kernel refused 1073741824 bytes"),
        ({"arena_bytes": "2GiB", "ring_bytes": "1MiB"}, None),
        ({"host_cache_bytes": "4GiB", "ring_bytes": "1MiB"}, None),
    ],
)
def test_little_memory(sample: Sample, options: dict[str, Any], message: str | None) -> None:
    """128 MiB more than Python and torch take: too little for what was ordered is an error."""
    found = child(sample.root, more_data_bytes=128 << 20, options={"driver": "threads"} | options)
    if message is None:
        check_stream(sample, found, "threads")
    else:
        assert found["error"] == "InvalidArgumentError"
        assert message in found["message"]
        assert "give less" in found["message"]


def can_mount() -> bool:
    """Whether a child of this process may have mounts of its own."""
    child_id = os.fork()
    if child_id == 0:
        try:
            unshare_mounts()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child_id, 0)[1] == 0
