"""The arena in GPU memory, with a landing zone in front of it.

A slot is copied to a landing buffer on the *copy stream*, and decoded from there to its place in the arena on the
*upload stream*::

    copy stream      wait(landing buffer is read) ▶ copy slot ▶ record(copied)          copied: the slot is free
    upload stream    wait(copied) ▶ decode, one launch ▶ copy checksums back ▶ record(ready)

So the next slot is copied while this one is decoded. The host waits for both events off the event loop, compares
the checksums, and only then is anything handed out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.abc import Fence, SegmentPlacement, StageTrace
from splitzip_aio.arena.base import BufferArena, checked_capacity
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.slot_table import MAX_SLOT_SEGMENTS, SlotTable, table_capacity
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError, UnsupportedError
from splitzip_aio.timeline import Stage

__all__ = ["CudaArena"]

_LANDING_BUFFERS = 3  # one being written, one being read, one between them
_DESTINATION_ALIGN = 16


@dataclass(slots=True)
class _Landing:
    """A device buffer of a slot's size, and the event after which it may be written again."""

    buffer: torch.Tensor
    read: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _Upload:
    """A slot on its way: its table, and the checksums that the device found, valid after ``ready``.

    ``starts`` are those of copy and decode, where someone wants to know the times.
    """

    table: SlotTable
    verdict: torch.Tensor
    copied: torch.cuda.Event
    ready: torch.cuda.Event
    starts: tuple[torch.cuda.Event, torch.cuda.Event] | None


class CudaArena(BufferArena):
    """An arena on a CUDA device, with two streams of its own and a few landing buffers beside ``capacity_bytes``.

    Args:
        capacity_bytes: its size.
        device: a CUDA device, with its index.
        slot_bytes: bytes of the slots that are uploaded, their table included; the size of a landing buffer.

    Raises:
        InvalidArgumentError: the capacity is under 256 bytes, or more than the device has.
        UnsupportedError: Triton is not installed.
    """

    max_segments = MAX_SLOT_SEGMENTS

    def __init__(self, capacity_bytes: int, *, device: torch.device, slot_bytes: int) -> None:
        from splitzip_aio.codec.gpu import GpuSplitZipDecoder

        super().__init__(_device_bytes(checked_capacity(capacity_bytes), device, "arena_bytes"))
        self._landing = [_Landing(_device_bytes(slot_bytes, device, "ring_bytes")) for _ in range(_LANDING_BUFFERS)]
        self._next_landing = 0
        self._decoder = GpuSplitZipDecoder()
        self._copy_stream = torch.cuda.Stream(device)
        self._upload_stream = torch.cuda.Stream(device)
        # torch's allocator hands out memory that earlier work of the current stream may still use.
        for stream in (self._copy_stream, self._upload_stream):
            stream.wait_stream(torch.cuda.current_stream(device))
        self._verdicts: list[torch.Tensor] = []
        self._clock: _DeviceClock | None = None
        # One thread for each stream, and not anyio's: user code that fills those must not stop streaming.
        self._limiter = anyio.CapacityLimiter(2)
        self._copies = anyio.Lock()
        self._decodes = anyio.Lock()

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        """Bytes to keep free behind a payload of at most ``payload_bytes``."""
        return table_capacity(payload_bytes)

    async def upload(
        self,
        memory: memoryview,
        payload_bytes: int,
        segments: Sequence[SegmentPlacement],
        *,
        drained: Callable[[], None],
        trace: StageTrace | None = None,
    ) -> Fence | None:
        """Decode the segments of a slot into the arena and check them; see ``splitzip_aio.abc.Arena.upload``."""
        try:
            upload = self._begin(memory, payload_bytes, segments, timed=trace is not None)
            await self._reach(upload.copied, self._copies)
        finally:
            drained()
        await self._reach(upload.ready, self._decodes)
        if trace is not None:
            self._report(upload, trace)
        found = upload.verdict[: len(segments)].numpy().view(np.uint64).copy()
        self._verdicts.append(upload.verdict)
        for place in upload.table.failures(found):
            raise CorruptDataError(
                f"{segments[place].where}: decoded bytes have checksum {found[place]:016x}, expected "
                f"{upload.table.checksums[place]:016x}; rebuild the cache"
            )
        return upload.ready

    def fence(self) -> Fence | None:
        """The end of what the caller's current stream has been given so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    async def aclose(self) -> None:
        """Let go of the memory once both streams are done; views that callers still hold stay valid. Idempotent."""
        if self._buffer is None:
            return
        with anyio.CancelScope(shield=True):
            for stream in (self._copy_stream, self._upload_stream):
                await anyio.to_thread.run_sync(stream.synchronize, limiter=self._limiter)
        self._buffer = None
        self._landing.clear()
        self._verdicts.clear()

    def _begin(
        self, memory: memoryview, payload_bytes: int, segments: Sequence[SegmentPlacement], *, timed: bool
    ) -> _Upload:
        """Check the headers, complete the slot by its table, and give copy and decode to the streams."""
        if timed and self._clock is None:
            self._clock = _DeviceClock(self._copy_stream)
        destinations = np.array([segment.destination for segment in segments])
        headers = _checked_headers(memory[:payload_bytes], segments, destinations)
        sources = [segment.source for segment in segments]
        table = SlotTable.build(headers, sources, self.buffer.data_ptr() + destinations, memory[payload_bytes:])
        landing = self._landing[self._next_landing]
        self._next_landing = (self._next_landing + 1) % len(self._landing)
        copy_start, copied = self._copy(landing, memory[: payload_bytes + table.nbytes], timed=timed)
        verdict = self._verdicts.pop() if self._verdicts else _new_verdict()
        with torch.cuda.stream(self._upload_stream):
            copied.wait()
            decode_start = _start(timed=timed)
            results = self._decoder.decode_slot(landing.buffer, payload_bytes, table)
            verdict[: len(segments)].copy_(results, non_blocking=True)
            landing.read = torch.cuda.Event(blocking=True, enable_timing=timed)
            landing.read.record()
        starts = None if copy_start is None or decode_start is None else (copy_start, decode_start)
        return _Upload(table, verdict, copied, landing.read, starts)

    def _copy(
        self, landing: _Landing, memory: memoryview, *, timed: bool
    ) -> tuple[torch.cuda.Event | None, torch.cuda.Event]:
        source = torch.frombuffer(memory, dtype=torch.uint8)
        copied = torch.cuda.Event(blocking=True, enable_timing=timed)
        with torch.cuda.stream(self._copy_stream):
            if landing.read is not None:
                landing.read.wait()
            start = _start(timed=timed)
            landing.buffer[: len(memory)].copy_(source, non_blocking=True)
            copied.record()
        return start, copied

    def _report(self, upload: _Upload, trace: StageTrace) -> None:
        """Say when a finished upload was copied and decoded."""
        if self._clock is not None and upload.starts is not None:
            copy_start, decode_start = upload.starts
            trace(Stage.COPY, self._clock.seconds(copy_start), self._clock.seconds(upload.copied))
            trace(Stage.DECODE, self._clock.seconds(decode_start), self._clock.seconds(upload.ready))

    async def _reach(self, event: torch.cuda.Event, turn: anyio.Lock) -> None:
        """Wait until the device gets to ``event``, whatever comes: it uses the slot, or its verdict is not known.

        Events of a stream fire in order, so one task at a time waits in a thread; those behind it mostly find theirs
        fired when their turn comes.
        """
        with anyio.CancelScope(shield=True):
            async with turn:
                if not event.query():
                    await anyio.to_thread.run_sync(event.synchronize, limiter=self._limiter)

    def _wait_before_reuse(self, fences: Iterable[Fence]) -> None:
        with torch.cuda.stream(self._upload_stream):
            for fence in fences:
                fence.wait()


class _DeviceClock:
    """Puts events on the clock of the host, ``time.perf_counter``: as exactly as the host learns of one event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(stream)
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        return self._base_s + float(self._base.elapsed_time(event)) / 1e3


def _start(*, timed: bool) -> torch.cuda.Event | None:
    """An event on the current stream, before what comes next on it; None where nobody wants to know."""
    if not timed:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _checked_headers(
    memory: memoryview, segments: Sequence[SegmentPlacement], destinations: NDArray[np.int64]
) -> SegmentHeaders:
    """Headers of a slot's segments, which decode to what is expected, where a GPU can write."""
    headers = SegmentHeaders.parse(
        memory,
        [segment.source for segment in segments],
        [segment.nbytes for segment in segments],
        where=lambda place: segments[place].where,
    )
    expected = np.array([segment.decoded_bytes for segment in segments])
    found = headers.fields["decoded_bytes"]
    for place in np.flatnonzero(found != expected).tolist():
        raise CorruptDataError(
            f"{segments[place].where}: segment decodes to {found[place]} bytes, expected {expected[place]}; "
            "rebuild the cache"
        )
    for place in np.flatnonzero(destinations % _DESTINATION_ALIGN).tolist():
        raise UnsupportedError(
            f"{segments[place].where}: a GPU decodes to multiples of {_DESTINATION_ALIGN} bytes, and this segment goes "
            f"to {destinations[place]}; rebuild the cache with segments of a multiple of {_DESTINATION_ALIGN} elements"
        )
    return headers


def _device_bytes(nbytes: int, device: torch.device, option: str) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise InvalidArgumentError(f"{option}: {device} has no {nbytes} bytes left; give less") from exc


def _new_verdict() -> torch.Tensor:
    return torch.empty(MAX_SLOT_SEGMENTS, dtype=torch.int64, pin_memory=True)
