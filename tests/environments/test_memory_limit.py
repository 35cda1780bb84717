"""A container's memory limit: nothing is killed for want of a word, and what cannot fit is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.environments.test_environments import check_stream, child, sample
from tests.transport.samples import Sample

__all__ = ["sample"]

CGROUP = Path("/sys/fs/cgroup")
LIMIT_BYTES = 400 << 20  # from when on the process is in it


@contextmanager
def memory_limit(nbytes: int) -> Iterator[str]:
    """The directory of a control group of so much memory, for a process to enter."""
    for mount, limit in ((CGROUP / "memory", "memory.limit_in_bytes"), (CGROUP, "memory.max")):
        group = mount / f"splitzip-{os.getpid()}"
        made = False
        with suppress(OSError):  # not there, not root's, or read only
            group.mkdir()
            made = True
            (group / limit).write_text(f"{nbytes}\n")
            break
        if made:
            group.rmdir()
    else:
        pytest.skip(f"no control group with a memory limit can be made beneath {CGROUP}")
    try:
        yield str(group)
    finally:
        group.rmdir()


def test_what_fits_comes_and_doctor_tells_of_the_limit(sample: Sample, tmp_path: Path) -> None:
    with memory_limit(LIMIT_BYTES) as group:
        options = {"driver": "threads", "host_cache_bytes": "4GiB"}
        found = child(sample.root, group=group, doctor=str(tmp_path), options=options)
    check_stream(sample, found, "threads")
    check = found["doctor"]["memory"]
    assert check["status"] == "warn"
    assert "a control group (a container) limits this process to 419.4 MB" in check["detail"]
    assert "raise the container's memory limit, or pass smaller ring_bytes" in check["remedy"]


def test_what_does_not_fit_is_refused_and_not_killed(sample: Sample) -> None:
    with memory_limit(LIMIT_BYTES) as group:
        found = child(sample.root, group=group, options={"driver": "threads", "ring_bytes": "1GiB"})
    assert found["error"] == "InvalidArgumentError"
    assert found["message"].startswith("ring_bytes: 1073741824 bytes are asked for")
    assert f"control group (its container), {LIMIT_BYTES} bytes" in found["message"]
    assert found["message"].endswith("are left; give less, or raise the limit")
