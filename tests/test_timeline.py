"""The timeline: what it keeps, what Perfetto gets to read, and the picture."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from splitzip_aio import InvalidArgumentError, UnsupportedError
from splitzip_aio.timeline import Slice, Stage, Timeline

PNG = b"\x89PNG\r\n\x1a\n"


def recorded(timeline: Timeline, *slices: tuple[Stage, float, float]) -> Timeline:
    start_s = timeline._made_s
    for slot, (stage, begin_s, end_s) in enumerate(slices):
        place = None if stage is Stage.LEASE else slot
        timeline.add(Slice(stage, start_s + begin_s, start_s + end_s, f"blocks.{slot}", place, 4096))
    return timeline


def saved(timeline: Timeline, path: Path) -> dict[str, Any]:
    timeline.save(path / "trace.json")
    document = json.loads((path / "trace.json").read_text())
    assert isinstance(document, dict)
    return document


def test_events_have_what_the_trace_format_asks_for(tmp_path: Path) -> None:
    timeline = recorded(Timeline(), (Stage.READ, 0.001, 0.003), (Stage.COPY, 0.003, 0.0035), (Stage.LEASE, 1, 2))
    document = saved(timeline, tmp_path)
    assert document.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    named = {
        event["pid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [named[event["pid"]] for event in slices] == ["read", "copy", "lease"]
    for event in slices:
        assert event.keys() == {"ph", "pid", "tid", "cat", "name", "ts", "dur", "args"}
    assert slices[0]["ts"] == pytest.approx(1000, abs=0.01)
    assert slices[0]["dur"] == pytest.approx(2000, abs=0.01)
    assert slices[0]["args"] == {"bytes": 4096, "slot": 0}
    assert slices[2]["args"] == {"bytes": 4096}
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X"}


def test_slices_of_one_thread_never_overlap(tmp_path: Path) -> None:
    """Complete events of a thread must nest, or viewers draw nonsense."""
    timeline = recorded(Timeline(), *[(Stage.READ, 0.1 * i, 0.1 * i + 0.35) for i in range(20)])
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in saved(timeline, tmp_path)["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault(event["tid"], []).append(event)
    assert len(threads) == 4
    for events in threads.values():
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in itertools.pairwise(events))
    assert sum(map(len, threads.values())) == 20


def test_it_is_bounded_and_keeps_the_latest(tmp_path: Path) -> None:
    timeline = recorded(Timeline(max_slices=3), *[(Stage.READ, i, i + 1) for i in range(5)])
    assert [each.slot for each in timeline.slices] == [2, 3, 4]
    assert timeline.dropped == 2
    assert saved(timeline, tmp_path)["otherData"] == {"dropped": 2}
    timeline.clear()
    assert (timeline.slices, timeline.dropped) == ((), 0)
    with pytest.raises(InvalidArgumentError, match="max_slices"):
        Timeline(max_slices=0)


@pytest.mark.parametrize("slices", [[], [(stage, 0.1, 0.2) for stage in Stage]])
def test_plot(tmp_path: Path, slices: list[tuple[Stage, float, float]]) -> None:
    pytest.importorskip("matplotlib")
    recorded(Timeline(), *slices).plot(tmp_path / "trace.png", title="a pass")
    assert (tmp_path / "trace.png").read_bytes().startswith(PNG)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'splitzip-aio\[plot\]'"):
        Timeline().plot(tmp_path / "trace.png")
    assert not (tmp_path / "trace.png").exists()


class FakeNvtx:
    """Records ranges; ends are by handle, in any order."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.seen: list[str] = []

    def mark(self, _: str) -> None: ...

    def range_start(self, message: str) -> int:
        self.seen.append(message)
        self.open[len(self.seen)] = message
        return len(self.seen)

    def range_end(self, handle: int) -> None:
        del self.open[handle]


def test_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    timeline = Timeline(nvtx=True)
    one, two = timeline.begin_range(Stage.READ, "blocks.0"), timeline.begin_range(Stage.COPY, "blocks.0")
    timeline.end_range(one)
    timeline.end_range(two)
    assert nvtx.seen == ["read blocks.0", "copy blocks.0"]
    assert not nvtx.open


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_nvtx_where_there_is_none() -> None:
    with pytest.raises(UnsupportedError, match="nvtx"):
        Timeline(nvtx=True)
