"""What each stage of a stream did and when, slot by slot: for Perfetto, as a picture, and in NVTX ranges."""

from __future__ import annotations

import enum
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitzip_aio.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Slice", "Stage", "Timeline"]


class Stage(enum.Enum):
    """A stage of a stream, and the track it has in a timeline."""

    READ = "read"
    COPY = "copy"
    DECODE = "decode"
    LEASE = "lease"


_COLORS = {Stage.READ: "#4c78a8", Stage.COPY: "#f58518", Stage.DECODE: "#54a24b", Stage.LEASE: "#b279a2"}


@dataclass(frozen=True, slots=True)
class Slice:
    """One slot in one stage, or one lease of a layer.

    Attributes:
        stage: which stage.
        begin_s: when it began, in seconds of ``time.perf_counter``.
        end_s: when it ended.
        layer: the layer it was for.
        slot: index of the staging slot; None for a lease.
        nbytes: bytes that were read or copied, the bytes they decoded to, or the bytes of the layer.
    """

    stage: Stage
    begin_s: float
    end_s: float
    layer: str
    slot: int | None
    nbytes: int


class Timeline:
    """Records a transport when it is given to ``splitzip_aio.open_transport``, and is looked at afterwards.

    ::

        timeline = Timeline()
        async with open_transport("cache/", timeline=timeline) as transport:
            ...
        timeline.save("trace.json")  # for ui.perfetto.dev or chrome://tracing
        timeline.plot("trace.png")

    A read's slice lasts from when the driver was asked until it had filled the slot, a lease's from when the layer was
    handed out until it was released. On a GPU, slices of copies and decodes are what CUDA events on their streams say,
    placed on the host's clock to within some microseconds; on the CPU, a slot's decode lasts from the first segment's
    start until the last one's end.

    Args:
        max_slices: how many slices to keep; of more, the latest are kept.
        nvtx: mark the stages as NVTX ranges as well, for Nsight Systems: as the host sees them, so a copy lasts until
            the host learned of its end.

    Raises:
        InvalidArgumentError: ``max_slices`` is less than 1.
        UnsupportedError: NVTX was asked for, and this build of torch has none.
    """

    def __init__(self, *, max_slices: int = 1 << 16, nvtx: bool = False) -> None:
        if max_slices < 1:
            raise InvalidArgumentError(f"max_slices: expected 1 or more, found {max_slices}")
        self._slices: deque[Slice] = deque(maxlen=max_slices)
        self._added = 0
        self._nvtx = _nvtx() if nvtx else None
        self._made_s = time.perf_counter()

    @property
    def slices(self) -> Sequence[Slice]:
        """What was recorded, in the order in which it ended."""
        return tuple(self._slices)

    @property
    def dropped(self) -> int:
        """How many slices were recorded and not kept."""
        return self._added - len(self._slices)

    def add(self, recorded: Slice) -> None:
        """Record a slice; the pipeline does."""
        self._slices.append(recorded)
        self._added += 1

    def clear(self) -> None:
        """Forget what was recorded, as after a warm-up."""
        self._slices.clear()
        self._added = 0
        self._made_s = time.perf_counter()

    def begin_range(self, stage: Stage, layer: str) -> int | None:
        """Open an NVTX range; the pipeline does. None if they were not asked for."""
        return None if self._nvtx is None else int(self._nvtx.range_start(f"{stage.value} {layer}"))

    def end_range(self, handle: int | None) -> None:
        """Close an NVTX range."""
        if self._nvtx is not None and handle is not None:
            self._nvtx.range_end(handle)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the slices as JSON in Chrome's trace format, which Perfetto reads.

        Each stage is a process; slices that overlap in it are on threads of their own. Times count in microseconds
        from when the timeline was made, or cleared.

        Raises:
            OSError: the file cannot be written.
        """
        events = [event for group in self._tracks() for event in _events(*group, self._made_s)]
        document = {"displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}, "traceEvents": events}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"))

    def plot(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Draw the slices, a row for each stage, as a PNG.

        Raises:
            UnsupportedError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise UnsupportedError(f"drawing needs matplotlib ({exc}); pip install 'splitzip-aio[plot]'") from exc
        tracks = list(self._tracks())
        figure = Figure(figsize=(14, 1.2 + 0.9 * max(len(tracks), 1)), layout="constrained")
        axes = figure.add_subplot()
        start_s = min((lane[0].begin_s for _, lanes in tracks for lane in lanes), default=0.0)
        for row, (stage, lanes) in enumerate(tracks):
            _draw(axes, row, stage, lanes, start_s)
        axes.set_yticks(range(len(tracks)), [stage.value for stage, _ in tracks])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(title)
        axes.margins(x=0)
        figure.savefig(path, dpi=120, format="png")

    def _tracks(self) -> Iterator[tuple[Stage, list[list[Slice]]]]:
        """Stages that have slices, each with its slices in lanes."""
        for stage in Stage:
            lanes = _lanes(each for each in self._slices if each.stage is stage)
            if lanes:
                yield stage, lanes


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices in as few sequences as overlap at once, each in order of time."""
    lanes: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: each.begin_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= each.begin_s), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return lanes


def _events(stage: Stage, lanes: Sequence[Sequence[Slice]], start_s: float) -> Iterator[dict[str, object]]:
    """A track's trace events: what it is called, then its slices as complete events."""
    process = list(Stage).index(stage) + 1
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": stage.value}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, lane in enumerate(lanes):
        yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": stage.value}}
        for each in lane:
            yield {
                "ph": "X",
                "pid": process,
                "tid": thread,
                "cat": stage.value,
                "name": each.layer,
                "ts": round((each.begin_s - start_s) * 1e6, 3),
                "dur": round((each.end_s - each.begin_s) * 1e6, 3),
                "args": {"bytes": each.nbytes} | ({} if each.slot is None else {"slot": each.slot}),
            }


def _draw(axes: Axes, row: int, stage: Stage, lanes: Sequence[Sequence[Slice]], start_s: float) -> None:
    height = 0.84 / len(lanes)
    for place, lane in enumerate(lanes):
        axes.broken_barh(
            [((each.begin_s - start_s) * 1e3, (each.end_s - each.begin_s) * 1e3) for each in lane],
            (row - 0.42 + place * height, height),
            facecolors=_COLORS[stage],
            edgecolors="black",
            linewidth=0.3,
        )


def _nvtx() -> Any:
    """``torch.cuda.nvtx``, tried out."""
    try:
        from torch.cuda import nvtx

        nvtx.mark("splitzip_aio")
    except (ImportError, RuntimeError) as exc:
        raise UnsupportedError(f"nvtx: this build of torch has no NVTX ({exc})") from exc
    return nvtx
