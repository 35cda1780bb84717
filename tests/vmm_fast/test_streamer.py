"""When groups are asked for, held and given back, seen from the transport below."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitzip_aio.vmm_fast.catalog import Groups
from splitzip_aio.vmm_fast.streamer import Piece, Streamer, _runs

SIZE = 1024


class Pending:
    """A group that was asked for; everything that happens to it is noted."""

    def __init__(self, transport: Transport, group: str) -> None:
        self.transport = transport
        self.group = group
        self.done = transport.quick

    def wait(self) -> Any:
        self.transport.note("wait", self.group)
        if self.group in self.transport.broken:
            raise OSError(self.group)
        return SimpleNamespace(
            wait=lambda: None,
            copy_to=lambda target, offset: target.fill_(1 + offset),
            offsets={self.group[0]: 0},
            release=lambda: self.transport.note("release", self.group),
        )

    def cancel(self) -> None:
        self.transport.note("cancel", self.group)


class Transport:
    def __init__(self, arena_bytes: int, *, quick: bool = True) -> None:
        self.log: list[str] = []
        self.quick = quick
        self.broken: set[str] = set()
        self.statistics = lambda: SimpleNamespace(arena=SimpleNamespace(capacity_bytes=arena_bytes))

    def note(self, what: str, group: str) -> None:
        self.log.append(f"{what} {group[0]}")

    def begin(self, group: str) -> Pending:
        self.note("begin", group)
        return Pending(self, group)

    def close(self) -> None:
        self.log.append("close")

    def take_log(self) -> list[str]:
        log, self.log = self.log, []
        return log


class Harness:
    """Groups ``a`` to ``e`` of ``SIZE`` bytes each, and an arena that keeps those in ``kept``."""

    def __init__(self, arena: int, *, quick: bool = True, kept: str = "") -> None:
        entries = [SimpleNamespace(name=name, nbytes=SIZE, pack=0, offset=0) for name in "abcde"]
        self.groups = Groups.of([(entry.name, [entry]) for entry in entries], group_bytes=SIZE)  # type: ignore[list-item]
        self.transport = Transport(arena, quick=quick)
        self.memory = torch.zeros(SIZE, dtype=torch.uint8)
        self.streamer = Streamer(self.transport, self.groups, lambda *_: self.memory)  # type: ignore[arg-type]
        self.native = SimpleNamespace(peek_range_signature=lambda offset, _: 1 if "abcde"[offset] in kept else None)

    def pieces(self, names: str) -> list[Piece]:
        found = [
            (SimpleNamespace(offset="abcde".index(name), nbytes=SIZE, signature=1), SimpleNamespace(name=name))
            for name in names
        ]
        return self.streamer.pieces(found)  # type: ignore[arg-type]

    def upload(self, names: str) -> list[str]:
        self.streamer.upload(self.pieces(names), self.native, None)
        return self.transport.take_log()


def test_the_next_piece_is_asked_for_before_this_one_is_waited_for() -> None:
    assert Harness(100 * SIZE).upload("ab") == ["begin a", "begin b", "wait a", "release a", "wait b", "release b"]


def test_but_not_where_it_could_take_the_room() -> None:
    expected = ["begin a", "wait a", "release a", "begin b", "wait b", "release b"]
    assert Harness(3 * SIZE - 1).upload("ba") == expected


def test_after_the_first_round_the_next_one_is_begun() -> None:
    harness = Harness(100 * SIZE, kept="bd")
    harness.upload("ab")
    harness.upload("ba")
    harness.upload("c")
    assert harness.upload("de")[-3:] == ["begin a", "begin c", "begin e"]
    assert harness.upload("a") == ["wait a", "release a"]
    assert harness.upload("cb") == ["begin b", "wait b", "release b", "wait c", "release c"]
    assert harness.upload("a") == ["cancel e", "begin a", "wait a", "release a"]
    harness.upload("de")
    assert harness.upload("abcde")[-1] == "release e", "only once"


def test_what_is_held_makes_way_for_what_is_waited_for() -> None:
    harness = Harness(5 * SIZE, quick=False)
    harness.streamer.hold(harness.pieces("abcd"), "owner")
    assert harness.transport.take_log() == ["begin a", "begin b", "begin c", "begin d"]
    assert harness.upload("e") == ["begin e", "cancel d", "cancel c", "wait e", "release e"]
    harness.streamer.let_go("another")
    harness.streamer.let_go("owner")
    assert harness.transport.take_log() == ["cancel a", "cancel b"]


def test_only_what_fits_is_held() -> None:
    harness = Harness(3 * SIZE)
    harness.streamer.hold(harness.pieces("abcd"), "owner")
    harness.streamer.hold(harness.pieces("ae"), "another")
    assert harness.transport.take_log() == ["begin a", "begin b"]
    harness.streamer.close()
    assert harness.transport.take_log() == ["cancel a", "cancel b", "close"]


def test_a_group_is_held_once() -> None:
    harness = Harness(100 * SIZE)
    harness.streamer.hold(harness.pieces("ab"), "owner")
    harness.streamer.hold(harness.pieces("bc"), "another")
    assert harness.transport.take_log() == ["begin a", "begin b", "begin c"]
    harness.streamer.let_go("another")
    harness.streamer.let_go("owner")
    assert harness.transport.take_log() == ["cancel c", "cancel a", "cancel b"]


def test_weights_that_follow_each_other_in_both_places_are_copied_at_once() -> None:
    offsets = {"a": 0, "b": 512, "c": 1024, "gap": 1792, "d": 2048}
    places = {"d": (2048, 256), "b": (4608, 512), "a": (4096, 512), "c": (5120, 500), "gap": (5888, 256)}
    wanted = [
        (SimpleNamespace(offset=offset, nbytes=nbytes), SimpleNamespace(name=name))
        for name, (offset, nbytes) in places.items()
    ]
    assert _runs(wanted, offsets) == [(0, 4096, 1524), (1792, 5888, 256), (2048, 2048, 256)]  # type: ignore[arg-type]


def test_after_a_failure_nothing_stays_asked_for() -> None:
    harness = Harness(100 * SIZE)
    harness.transport.broken.add(harness.groups.layer_of("a"))
    with pytest.raises(OSError, match="a"):
        harness.streamer.upload(harness.pieces("abc"), harness.native, None)
    assert harness.transport.take_log() == ["begin a", "begin b", "wait a", "cancel b"]
    assert not harness.memory.any()
    assert harness.streamer.counters.uploads == 0
