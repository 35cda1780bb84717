"""How much memory is left: to the machine, and to the control groups that this process is in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Headroom", "headroom"]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that can be had without swapping or being killed, and bytes there are in all."""

    available_bytes: int
    total_bytes: int


def headroom(root: Path = Path("/")) -> Headroom:
    """The tightest of MemAvailable and the limits of cgroup v2; where nothing is known, more than there can be."""
    return min(_limits(root), key=lambda each: each.available_bytes, default=Headroom(sys.maxsize, 0))


def _limits(root: Path) -> Iterator[Headroom]:
    with suppress(OSError, KeyError, ValueError):
        memory = _fields(root / "proc/meminfo")
        yield Headroom(memory["MemAvailable:"] << 10, memory["MemTotal:"] << 10)
    for group in _groups(root):
        with suppress(OSError, ValueError):  # ValueError: "max", no limit at this level
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            yield Headroom(max(0, limit - used + _reclaimable(group)), limit)


def _groups(root: Path) -> Iterator[Path]:
    """The directory of this process's group in the unified hierarchy, and those above it."""
    mount = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                group = mount / line.removeprefix("0::/")
                yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _reclaimable(group: Path) -> int:
    """Bytes that are charged to a group and that the kernel takes back when they are needed: its page cache."""
    statistics = _fields(group / "memory.stat")
    return sum(statistics.get(name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))


def _fields(path: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each a line."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
