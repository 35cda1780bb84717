"""How much memory is left, read from files like the kernel's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.host_cache import headroom as module
from splitzip_aio.host_cache.headroom import Headroom, check_room, group_headroom, headroom

MEMINFO = "MemTotal:       1000 kB\nMemFree:          20 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, "proc/self/cgroup", "12:memory:/v1/group\n0::/outer/inner\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(root: Path, name: str, limit: str, current: int, statistics: str = "") -> None:
    write(root, f"sys/fs/cgroup/{name}/memory.max", limit + "\n")
    write(root, f"sys/fs/cgroup/{name}/memory.current", f"{current}\n")
    write(root, f"sys/fs/cgroup/{name}/memory.stat", statistics)


def old_group(root: Path, name: str, limit: int, usage: int, statistics: str = "") -> None:
    """One of cgroup v1."""
    write(root, f"sys/fs/cgroup/memory/{name}/memory.limit_in_bytes", f"{limit}\n")
    write(root, f"sys/fs/cgroup/memory/{name}/memory.usage_in_bytes", f"{usage}\n")
    write(root, f"sys/fs/cgroup/memory/{name}/memory.stat", statistics)


def test_the_machine_without_limits(machine: Path) -> None:
    assert headroom(machine) == Headroom(600 << 10, 1000 << 10)
    group(machine, "outer/inner", "max", 5)
    assert headroom(machine) == Headroom(600 << 10, 1000 << 10)


@pytest.mark.parametrize("name", ["outer/inner", "outer"])
def test_the_tightest_limit_counts_at_each_level(machine: Path, name: str) -> None:
    group(machine, "outer/inner", "900000", 100000)
    group(machine, name, "500000", 300000, "anon 7\nactive_file 1000\ninactive_file 20000\nslab_reclaimable 300\n")
    assert headroom(machine) == Headroom(221300, 500000)


def test_a_group_over_its_limit_has_nothing(machine: Path) -> None:
    group(machine, "outer", "100", 300)
    assert headroom(machine).available_bytes == 0


@pytest.mark.parametrize("name", ["v1/group", "v1", "."])
def test_limits_of_the_first_version_count_as_well(machine: Path, name: str) -> None:
    """In a container its group is at the top, whatever the process's path is outside."""
    old_group(machine, "v1/group", 9223372036854771712, 100)
    assert group_headroom(machine) is None
    old_group(machine, name, 500000, 300000, "active_file 1\ntotal_active_file 1000\ntotal_inactive_file 20000\n")
    assert headroom(machine) == group_headroom(machine) == Headroom(221000, 500000)


def test_never_more_is_left_than_the_limit(machine: Path) -> None:
    group(machine, "outer", "5000", 300, "inactive_file 800\n")
    assert group_headroom(machine) == Headroom(5000, 5000)


def test_more_than_a_group_has_left_is_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "group_headroom", lambda: None)
    check_room(1 << 62, option="ring_bytes")
    monkeypatch.setattr(module, "group_headroom", lambda: Headroom(700, 900))
    check_room(700, option="ring_bytes")
    with pytest.raises(InvalidArgumentError, match=r"ring_bytes: 701 bytes .* 900 bytes, 700 are left; give less"):
        check_room(701, option="ring_bytes")


def test_where_nothing_is_known_nothing_is_feared(tmp_path: Path) -> None:
    assert headroom(tmp_path) == Headroom(sys.maxsize, 0)


def test_this_machine() -> None:
    left = headroom()
    assert 0 < left.available_bytes <= left.total_bytes
