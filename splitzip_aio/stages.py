"""The clock of a stream: which stage it waits for, at each instant, and slices for the timeline if there is one.

At any time several stages are at work. What the stream waits for is the bottleneck among them, the furthest one
downstream that has a backlog: two slots or more in it, or one and nothing that comes behind it. A slot that is decoded
while others are still read costs nothing, so the stream waits for the disk; once slots pile up before the decoder, it
waits for decoding, however many reads are in flight.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from functools import partial
from typing import Self

from splitzip_aio.telemetry import TimeStatistics
from splitzip_aio.timeline import Slice, Stage, Timeline

__all__ = ["StageClock", "Upload"]


class _Place(enum.IntEnum):
    """Where work can be, upstream first."""

    SLOT = 0
    DISK = 1
    COPY = 2
    DECODE = 3


_CONSUMER = len(_Place)
_SLOT, _DISK, _COPY, _DECODE = (int(place) for place in _Place)


class StageClock:
    """Counts the work in each stage, and adds up the time for which each was what the stream waited for.

    All methods are for the event loop of the transport.

    Args:
        timeline: where slices go; None records none.
        now: seconds that only grow, of the clock that slices are in.
    """

    def __init__(self, timeline: Timeline | None = None, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._timeline = timeline
        self._now = now
        self._counts = [0] * len(_Place)
        self._seconds = [0.0] * (len(_Place) + 1)
        self._waited_for: int = _CONSUMER
        self._since = now()
        self._stopped = False

    def slot_wait(self) -> Callable[[], None]:
        """Reads are queued, and one waits for a slot; call what is returned when it has one, or is given up."""
        self._change(_Place.SLOT, 1)
        return partial(self._change, _Place.SLOT, -1)

    def read(self, layer: str, slot: int, nbytes: int) -> Callable[[], None]:
        """A slot is being filled; call what is returned when it is full, or given up."""
        self._change(_Place.DISK, 1)
        end = self._begin(Stage.READ, layer, slot, nbytes)

        def ended() -> None:
            self._change(_Place.DISK, -1)
            end()

        return ended

    def upload(self, layer: str, slot: int, nbytes: int, decoded_bytes: int, *, in_place: bool) -> Upload:
        """A slot is copied and decoded, or decoded ``in_place``; ``end`` what is returned, or leave its block."""
        return Upload(self, self._timeline, layer, slot, nbytes, decoded_bytes, in_place=in_place)

    def lease(self, layer: str, nbytes: int) -> Callable[[], None]:
        """A layer is handed out; call what is returned when it comes back."""
        return self._begin(Stage.LEASE, layer, None, nbytes)

    def stop(self) -> None:
        """The stream is over: count no further."""
        self._account()
        self._stopped = True

    def statistics(self) -> TimeStatistics:
        """A snapshot of the times so far."""
        self._account()
        slot, disk, copy, decode, consumer = self._seconds
        return TimeStatistics(disk_s=disk, slot_s=slot, copy_s=copy, decode_s=decode, consumer_s=consumer)

    def move(self, source: _Place | None, target: _Place | None) -> None:
        """Work goes from one stage to the next; None is outside."""
        if source is not None:
            self._counts[source] -= 1
        if target is not None:
            self._counts[target] += 1
        self._account()

    def _change(self, place: _Place, by: int) -> None:
        self._counts[place] += by
        self._account()

    def _account(self) -> None:
        """Book the time since the last change on what was waited for, and find what is waited for now."""
        now = self._now()
        if not self._stopped:
            self._seconds[self._waited_for] += now - self._since
        self._since = now
        self._waited_for = self._bottleneck()

    def _bottleneck(self) -> int:
        slot, disk, copy, decode = self._counts
        if decode > 1 or (decode and not (copy or disk or slot)):
            return _DECODE
        if copy > 1 or (copy and not (disk or slot)):
            return _COPY
        if disk > 1 or (disk and not slot):
            return _DISK
        return _SLOT if slot else _CONSUMER

    def _begin(self, stage: Stage, layer: str, slot: int | None, nbytes: int) -> Callable[[], None]:
        if self._timeline is None:
            return _nothing
        handle = self._timeline.begin_range(stage, layer)
        return partial(self._end, self._timeline, handle, stage, self._now(), layer, slot, nbytes)

    def _end(
        self,
        timeline: Timeline,
        handle: int | None,
        stage: Stage,
        begin_s: float,
        layer: str,
        slot: int | None,
        nbytes: int,
    ) -> None:
        timeline.add(Slice(stage, begin_s, self._now(), layer, slot, nbytes))
        timeline.end_range(handle)


class Upload:
    """A slot on its way through the arena, as the dispatcher sees it.

    Attributes:
        trace: what the arena is to call with the times of each stage; None if nobody wants to know.
    """

    def __init__(
        self,
        clock: StageClock,
        timeline: Timeline | None,
        layer: str,
        slot: int,
        nbytes: int,
        decoded_bytes: int,
        *,
        in_place: bool,
    ) -> None:
        self._clock = clock
        self._timeline = timeline
        self._layer = layer
        self._slot = slot
        self._nbytes = {Stage.COPY: nbytes, Stage.DECODE: decoded_bytes}
        self._place: _Place | None = None
        self._range: int | None = None
        self.trace = None if timeline is None else self._record
        self._enter(_Place.DECODE if in_place else _Place.COPY)

    def drained(self) -> None:
        """The slot is free again: what was copied is now decoded, what was decoded in place is done."""
        self._enter(_Place.DECODE if self._place is _Place.COPY else None)

    def end(self) -> None:
        """It is over, however it went. Idempotent."""
        self._enter(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _enter(self, place: _Place | None) -> None:
        if place is self._place:
            return
        self._clock.move(self._place, place)
        self._place = place
        if self._timeline is not None:
            self._timeline.end_range(self._range)
            self._range = None if place is None else self._timeline.begin_range(_STAGE[place], self._layer)

    def _record(self, stage: Stage, begin_s: float, end_s: float) -> None:
        if self._timeline is not None:
            self._timeline.add(Slice(stage, begin_s, end_s, self._layer, self._slot, self._nbytes[stage]))


_STAGE = {_Place.COPY: Stage.COPY, _Place.DECODE: Stage.DECODE}


def _nothing() -> None:
    """The end of a slice that nobody records."""
