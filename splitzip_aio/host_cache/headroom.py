"""How much memory is left: to the machine, and to the control groups that this process is in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from splitzip_aio.errors import InvalidArgumentError

__all__ = ["Headroom", "check_room", "group_headroom", "headroom"]

_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 has a number for it, and a larger one


@dataclass(frozen=True, slots=True)
class Headroom:
    """Bytes that can be had without swapping or being killed, and bytes there are in all."""

    available_bytes: int
    total_bytes: int


def headroom(root: Path = Path("/")) -> Headroom:
    """The tightest of MemAvailable and the limits of control groups; where nothing is known, more than there can be."""
    return min(_limits(root), key=lambda each: each.available_bytes, default=Headroom(sys.maxsize, 0))


def group_headroom(root: Path = Path("/")) -> Headroom | None:
    """The tightest limit of the control groups that this process is in, as a container has one; None without any."""
    return min(_group_limits(root), key=lambda each: each.available_bytes, default=None)


def check_room(nbytes: int, *, option: str) -> None:
    """See whether a control group lets so much be used: the kernel gives it away, and kills who uses it.

    Args:
        nbytes: how much is to be taken.
        option: the option that asked for it, for the error.

    Raises:
        InvalidArgumentError: it is more than is left.
    """
    room = group_headroom()
    if room is not None and nbytes > room.available_bytes:
        raise InvalidArgumentError(
            f"{option}: {nbytes} bytes are asked for, and of the memory limit of this process's control group (its "
            f"container), {room.total_bytes} bytes, {room.available_bytes} are left; give less, or raise the limit"
        )


def _limits(root: Path) -> Iterator[Headroom]:
    with suppress(OSError, KeyError, ValueError):
        memory = _fields(root / "proc/meminfo")
        yield Headroom(memory["MemAvailable:"] << 10, memory["MemTotal:"] << 10)
    yield from _group_limits(root)


def _group_limits(root: Path) -> Iterator[Headroom]:
    unified, memory = root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"
    for group in _groups(root, unified, lambda controllers: not controllers):
        yield from _limit(group, "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
    for group in _groups(root, memory, lambda controllers: "memory" in controllers.split(",")):
        names = ("total_active_file", "total_inactive_file")
        yield from _limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes", names)


def _groups(root: Path, mount: Path, ours: Callable[[str], bool]) -> Iterator[Path]:
    """The directory of this process's group in one hierarchy, and those above it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if ours(controllers):
                group = mount / path.removeprefix("/")
                yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _limit(group: Path, limit_name: str, usage_name: str, reclaimable: Sequence[str]) -> Iterator[Headroom]:
    """What a group may use and has not. The page cache that is charged to it is taken back when it is needed."""
    with suppress(OSError, ValueError):  # ValueError: "max", no limit at this level
        limit = int((group / limit_name).read_text())
        used = int((group / usage_name).read_text())
        if limit < _NO_LIMIT_BYTES:
            statistics = _fields(group / "memory.stat")
            spare = sum(statistics.get(name, 0) for name in reclaimable)
            yield Headroom(min(limit, max(0, limit - used + spare)), limit)


def _fields(path: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each a line."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
