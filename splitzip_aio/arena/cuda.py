"""The arena in GPU memory, with a landing zone in front of it.

A slot is copied to a landing buffer on the *copy stream*, and decoded from there to its place in the arena on the
*upload stream*::

    copy stream      wait(landing buffer is read) ▶ copy slot ▶ record(copied)          copied: the slot is free
    upload stream    wait(copied) ▶ decode, one launch ▶ copy checksums back ▶ record(ready)

So the next slot is copied while this one is decoded. Both events are asked for whenever a slot is submitted, and else
about as often as a slot comes by. Then the checksums are compared, and only then is anything handed out. A thread that
waited for events would have to get the interpreter's lock back before it could tell anyone; asking costs a microsecond,
and the events of a stream come in order.

What a read's headers say is checked when it comes by for the first time, and the decode table made of it is kept. Later
on the device goes by that table: whatever the slot then holds, nothing is read or written out of range, and wrong bytes
fail their checksum.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np
import torch

from splitzip_aio.abc import Fence, PlannedRead, StageTrace
from splitzip_aio.arena.base import BufferArena, checked_capacity
from splitzip_aio.arena.cuda_driver import CudaDriver, host_address
from splitzip_aio.codec.gpu import GpuSplitZipDecoder, PreparedDecode
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.slot_table import MAX_SLOT_SEGMENTS, SlotTable, table_capacity
from splitzip_aio.errors import (
    ClosedError,
    CorruptDataError,
    InvalidArgumentError,
    SplitZipError,
    TransportError,
    UnsupportedError,
)
from splitzip_aio.timeline import Stage
from splitzip_aio.waiting import Ticker, Watch

__all__ = ["CudaArena"]

_LANDING_BUFFERS = 3  # one being written, one being read, one between them
_VERDICTS = 16  # made with the arena, so that no slot of the usual rings waits for one
_DESTINATION_ALIGN = 16
_ASK_EVERY_S = 0.00025  # at most: for smaller slots than these it would be too often
_ASK_BYTES_S = 64 << 30  # as often as a slot comes by on a link of this speed, which is a fast one
_TURN_S = 0.0005  # of the event loop at a time, as long as there is more to be told


class _Landing:
    """A device buffer of a slot's size, and the event after which it may be written again."""

    __slots__ = ("address", "buffer", "read")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.address = buffer.data_ptr()
        self.read: torch.cuda.Event | None = None


class _Verdict:
    """Page-locked room for the checksums of a slot as the device found them."""

    __slots__ = ("address", "found", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.found = memory.numpy().view(np.uint64)

    @classmethod
    def make(cls, count: int) -> list[_Verdict]:
        """So many, page-locked at once, since that takes a millisecond."""
        memory = torch.empty((count, MAX_SLOT_SEGMENTS), dtype=torch.int64, pin_memory=True)
        return [cls(row) for row in memory]


@dataclass(frozen=True, slots=True, eq=False)
class _Upload:
    """A slot on its way.

    Attributes:
        read: what is in it.
        decode: how it is decoded.
        verdict: the checksums that the device found, valid after ``ready``.
        copied, ready: the ends of copy and decode.
        starts: those of copy and decode, where someone wants to know the times.
        drained, done, trace: what ``submit`` was given.
    """

    read: PlannedRead
    decode: PreparedDecode
    verdict: _Verdict
    copied: torch.cuda.Event
    ready: torch.cuda.Event
    starts: tuple[torch.cuda.Event, torch.cuda.Event] | None
    drained: Callable[[], None]
    done: Callable[[Fence | SplitZipError | None], None]
    trace: StageTrace | None


class CudaArena(BufferArena):
    """An arena on a CUDA device, with two streams of its own and a few landing buffers beside ``capacity_bytes``.

    Args:
        capacity_bytes: its size.
        device: a CUDA device, with its index.
        slot_bytes: bytes of the slots that are uploaded, their table included; the size of a landing buffer.

    Raises:
        InvalidArgumentError: the capacity is under 256 bytes, or more than the device has.
        UnsupportedError: Triton is not installed, or NVIDIA's driver is not.
        TransportError: there is no descriptor left for a timer.
    """

    max_segments = MAX_SLOT_SEGMENTS

    def __init__(self, capacity_bytes: int, *, device: torch.device, slot_bytes: int) -> None:
        super().__init__(_device_bytes(checked_capacity(capacity_bytes), device, "arena_bytes"))
        self._landing = deque(
            _Landing(_device_bytes(slot_bytes, device, "ring_bytes")) for _ in range(_LANDING_BUFFERS)
        )
        self._decoder = GpuSplitZipDecoder()
        self._copy_stream = torch.cuda.Stream(device)
        self._upload_stream = torch.cuda.Stream(device)
        # torch's allocator hands out memory that earlier work of the current stream may still use.
        for stream in (self._copy_stream, self._upload_stream):
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device):
            self._driver = CudaDriver()
        self._verdicts = _Verdict.make(_VERDICTS)
        self._clock: _DeviceClock | None = None
        self._address = self.buffer.data_ptr()
        self._decodes: dict[PlannedRead, PreparedDecode] = {}  # a read's headers are examined once
        self._copying: deque[_Upload] = deque()
        self._decoding: deque[_Upload] = deque()
        self._settling = False
        try:
            self._ticker = Ticker(max(_ASK_EVERY_S, slot_bytes / _ASK_BYTES_S))
        except OSError as exc:
            raise TransportError(
                f"no descriptor for a timer ({exc}); raise the limit on open files (ulimit -n)"
            ) from exc

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        """Bytes to keep free behind a payload of at most ``payload_bytes``."""
        return table_capacity(payload_bytes)

    def submit(
        self,
        memory: memoryview,
        read: PlannedRead,
        base: int,
        *,
        drained: Callable[[], None],
        done: Callable[[Fence | SplitZipError | None], None],
        trace: StageTrace | None = None,
    ) -> None:
        """Begin to decode the segments of a slot into the arena; see ``splitzip_aio.abc.Arena.submit``."""
        try:
            decode = self._prepared(memory, read)
        except SplitZipError as error:  # the device has been given nothing
            drained()
            done(error)
        else:
            try:
                upload = self._begin(memory, read, base, decode, drained, done, trace)
            except RuntimeError as exc:  # torch's OutOfMemoryError is one, and what Triton raises
                failure = self._out_of_memory(read, exc)
                drained()
                done(failure)
            else:
                self._copying.append(upload)
                self._decoding.append(upload)
        self._settle()

    async def reap(self) -> None:
        """Return once nothing that was submitted is under way."""
        if not self._decoding:
            return
        self._ticker.start()
        try:
            with Watch(self._ticker) as watch:
                while self._decoding:
                    await watch.call(self._ticker.seen, self._nothing_due)
                    self._settle()
        finally:
            self._ticker.stop()

    def copy_to(self, target: torch.Tensor, offset: int) -> None:
        """Copy the bytes there to ``target``; see ``splitzip_aio.abc.Arena.copy_to``."""
        if self._buffer is None:
            raise ClosedError("the arena is closed")
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._driver:
            self._driver.copy_on_device(target.data_ptr(), self._address + offset, target.numel(), stream)

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
            limiter = anyio.CapacityLimiter(1)  # user code that fills anyio's default one must not stop this
            for stream in (self._copy_stream, self._upload_stream):
                await anyio.to_thread.run_sync(stream.synchronize, limiter=limiter)
        self._let_go()
        self._landing.clear()
        self._verdicts.clear()
        self._decodes.clear()
        self._ticker.close()

    def _prepared(self, memory: memoryview, read: PlannedRead) -> PreparedDecode:
        """How a read is decoded, found out when it comes by for the first time."""
        decode = self._decodes.get(read)
        if decode is None:
            table = _table(memory[: read.nbytes], read)
            decode = self._decodes[read] = self._decoder.prepare(read.nbytes, table)
        return decode

    def _begin(
        self,
        memory: memoryview,
        read: PlannedRead,
        base: int,
        decode: PreparedDecode,
        drained: Callable[[], None],
        done: Callable[[Fence | SplitZipError | None], None],
        trace: StageTrace | None,
    ) -> _Upload:
        """Complete the slot by its table, and give copy and decode to the streams."""
        timed = trace is not None
        if timed and self._clock is None:
            self._clock = _DeviceClock(self._copy_stream)
        table = decode.table
        table.write(memory[read.nbytes :], self._address + base)
        landing = self._landing[0]
        self._landing.rotate(-1)
        verdict = self._verdicts.pop() if self._verdicts else _Verdict.make(1)[0]
        copied, ready = torch.cuda.Event(enable_timing=timed), torch.cuda.Event(enable_timing=timed)
        starts = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if timed else None
        copy_stream, upload_stream = self._copy_stream, self._upload_stream
        with self._driver:
            if landing.read is not None:
                self._driver.wait(landing.read.cuda_event, copy_stream.cuda_stream)
            if starts is not None:
                starts[0].record(copy_stream)
            self._driver.copy_to_device(
                landing.address, host_address(memory), read.nbytes + table.nbytes, copy_stream.cuda_stream
            )
            copied.record(copy_stream)
            self._driver.wait(copied.cuda_event, upload_stream.cuda_stream)
            if starts is not None:
                starts[1].record(upload_stream)
            decode.launch(landing.buffer, landing.address, upload_stream)
            results = landing.address + read.nbytes + table.results
            self._driver.copy_to_host(verdict.address, results, 8 * len(read.segments), upload_stream.cuda_stream)
            ready.record(upload_stream)
        landing.read = ready
        return _Upload(read, decode, verdict, copied, ready, starts, drained, done, trace)

    def _out_of_memory(self, read: PlannedRead, cause: RuntimeError) -> TransportError:
        """What to say of an upload that failed for want of memory. What it had begun is over when this returns.

        Raises:
            RuntimeError: the cause, if it is anything else.
        """
        if "out of memory" not in str(cause).lower():
            raise cause
        for stream in (self._copy_stream, self._upload_stream):  # the slot and its landing buffer may be in use
            stream.synchronize()
        error = TransportError(
            f"{read.where(0)}: {self._device} ran out of memory while this was uploaded; free some, and ask for the "
            "layer again"
        )
        error.__cause__ = cause.with_traceback(None)  # whose frames look at the slot
        return error

    def _nothing_due(self) -> bool:
        """Whether there is something under way, and no call to be made now.

        Events of a stream fire in order, so the first of each is enough. Nothing is under way any more once a
        ``submit`` has found it all done.
        """
        copied = bool(self._copying) and self._copying[0].copied.query()
        return bool(self._decoding) and not copied and not self._decoding[0].ready.query()

    def _settle(self) -> None:
        """Make the calls that are due, for half a millisecond or so: the next look goes on after other tasks' turn.

        A call may submit a slot that was waiting for room. If the host is slower than the link, another is copied by
        then, and so on.
        """
        if self._settling:  # whoever began sees to it
            return
        self._settling = True
        until = time.perf_counter() + _TURN_S
        try:
            while self._settle_next() and time.perf_counter() < until:
                pass
        finally:
            self._settling = False

    def _settle_next(self) -> bool:
        """Make the calls of the next slot that was copied, and of the next that was decoded; whether there was one."""
        copied = bool(self._copying) and self._copying[0].copied.query()
        if copied:
            self._copying.popleft().drained()
        if not (self._decoding and self._decoding[0].ready.query()):
            return copied
        upload = self._decoding.popleft()
        if self._copying and self._copying[0] is upload:  # was copied since it was asked
            self._copying.popleft().drained()
        error = self._check(upload)
        if error is None and upload.trace is not None:
            self._report(upload, upload.trace)
        upload.done(upload.ready if error is None else error)
        return True

    def _check(self, upload: _Upload) -> CorruptDataError | None:
        table, found = upload.decode.table, upload.verdict.found[: len(upload.read.segments)]
        error = None
        if not (found == table.checksums).all():
            place = table.failures(found)[0]
            error = CorruptDataError(
                f"{upload.read.where(place)}: decoded bytes have checksum {found[place]:016x}, expected "
                f"{table.checksums[place]:016x}; rebuild the cache"
            )
        self._verdicts.append(upload.verdict)
        return error

    def _report(self, upload: _Upload, trace: StageTrace) -> None:
        """Say when a finished upload was copied and decoded."""
        if self._clock is not None and upload.starts is not None:
            copy_start, decode_start = upload.starts
            trace(Stage.COPY, self._clock.seconds(copy_start), self._clock.seconds(upload.copied))
            trace(Stage.DECODE, self._clock.seconds(decode_start), self._clock.seconds(upload.ready))

    def _wait_before_reuse(self, fences: Iterable[Fence]) -> None:
        fences = list(fences)
        if fences:
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


def _table(memory: memoryview, read: PlannedRead) -> SlotTable:
    """The table of a slot whose headers are right, and whose segments decode to what is expected where a GPU can write.

    Destinations count from the start of the layer's range.
    """
    segments = read.segments
    sources = [segment.source for segment in segments]
    headers = SegmentHeaders.parse(memory, sources, [segment.nbytes for segment in segments], where=read.where)
    expected = np.array([segment.decoded_bytes for segment in segments])
    found = headers.fields["decoded_bytes"]
    for place in np.flatnonzero(found != expected).tolist():
        raise CorruptDataError(
            f"{read.where(place)}: segment decodes to {found[place]} bytes, expected {expected[place]}; "
            "rebuild the cache"
        )
    destinations = np.array([segment.destination for segment in segments])
    for place in np.flatnonzero(destinations % _DESTINATION_ALIGN).tolist():
        raise UnsupportedError(
            f"{read.where(place)}: a GPU decodes to multiples of {_DESTINATION_ALIGN} bytes, and this segment goes "
            f"to {destinations[place]}; rebuild the cache with segments of a multiple of {_DESTINATION_ALIGN} elements"
        )
    return SlotTable.of(headers, sources, destinations)


def _device_bytes(nbytes: int, device: torch.device, option: str) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise InvalidArgumentError(f"{option}: {device} has no {nbytes} bytes left; give less") from exc
