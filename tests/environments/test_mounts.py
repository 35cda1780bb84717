"""File systems mounted for the occasion: one that refuses O_DIRECT, and a disk image with and without direct I/O."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.environments.test_environments import can_mount, check_stream, child, place, sample
from tests.faults.test_seeded import skip_without_uring
from tests.transport.samples import Sample

__all__ = ["place", "sample"]

IMAGE_BYTES = 32 << 20


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """A directory of ``place`` with something mounted on it."""
    if not can_mount():
        pytest.skip("only root mounts file systems")
    directory = place / "mounted"
    directory.mkdir()
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine mounts no such thing: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def image(place: Path) -> str:
    """A file with an empty ext4 in it."""
    path = place / "image"
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4 here")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(path)], check=True)
    return str(path)


def test_a_file_system_that_refuses_to_open_directly(sample: Sample, place: Path) -> None:
    """The kernel's own refusal: open(O_DIRECT) on ramfs is EINVAL."""
    with mounted(place, "-t", "ramfs", "none") as directory:
        cache = shutil.copytree(sample.root, directory / "cache")
        found = child(cache, doctor=str(directory), options={"driver": "threads"})
        check_stream(sample, found, "threads", "direct I/O: buffered: ramfs is memory already")
        assert found["direct_files"] == 0
        check = found["doctor"][f"direct I/O in {directory}"]
        assert check["status"] == "warn"
        assert "ramfs is memory already; there is no cache to go past" in check["detail"]
        ordered = child(cache, options={"driver": "threads", "io": "direct"})
        assert ordered["error"] == "UnsupportedError"
        assert "direct I/O was asked for, but the file system refuses O_DIRECT (Invalid argument)" in ordered["message"]


@pytest.mark.parametrize("driver", ["uring", "threads"])
def test_a_disk_without_direct_io(sample: Sample, place: Path, driver: str) -> None:
    """ext4 that journals its data opens files with O_DIRECT, and then reads them through the page cache."""
    if driver == "uring":
        skip_without_uring()
    with mounted(place, "-o", "loop,data=journal", image(place)) as directory:
        cache = shutil.copytree(sample.root, directory / "cache")
        found = child(cache, doctor=str(directory), options={"driver": driver})
        reason = "the file system has no direct I/O for this file"
        check_stream(sample, found, driver, f"direct I/O: buffered: {reason}")
        assert found["direct_files"] == 0
        check = found["doctor"][f"direct I/O in {directory}"]
        assert (check["status"], reason in check["detail"]) == ("warn", True)
        assert "local disk (ext4, xfs, btrfs)" in check["remedy"]
        ordered = child(cache, options={"driver": driver, "io": "direct"})
        assert ordered["error"] == "UnsupportedError"
        assert f"direct I/O was asked for, but {reason}; use io='auto' or 'buffered'" in ordered["message"]


def test_a_disk_image_with_direct_io(sample: Sample, place: Path) -> None:
    skip_without_uring()
    with mounted(place, "-o", "loop", image(place)) as directory:
        cache = shutil.copytree(sample.root, directory / "cache")
        found = child(cache, doctor=str(directory), options={"driver": "uring", "io": "direct"})
        check_stream(sample, found, "uring")
        assert found["direct_files"] > 0
        assert found["doctor"][f"direct I/O in {directory}"]["status"] == "ok"
