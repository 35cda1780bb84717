"""The GPU's arena without a GPU: its own code but for the device. Streams are a clock, and the CPU decodes.

What is to be seen with it is the host's side: who looks when, who is called, and who waits for what. Memory is moved
when the device would move it, so that a slot that is given back too early has wrong bytes.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from splitzip_aio.abc import Arena, Fence, PlannedRead, StageTrace
from splitzip_aio.arena import cuda
from splitzip_aio.arena.base import BufferArena, checked_capacity
from splitzip_aio.codec.cpu import decode_segment
from splitzip_aio.codec.slot_table import MAX_SLOT_SEGMENTS
from splitzip_aio.errors import CorruptDataError
from splitzip_aio.timeline import Stage
from splitzip_aio.waiting import Ticker

__all__ = ["SimulatedCudaArena"]

_DELAYS_S = (0.0, 0.0, 0.0001, 0.0005, 0.002)  # many are over before anyone looks, as small slots are


class _Moment:
    """An event of a stream: from its time on, what is due then is done by whoever asks."""

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s = at_s
        self._act: Callable[[], None] | None = act

    def query(self) -> bool:
        if self._act is not None and time.perf_counter() >= self.at_s:
            act, self._act = self._act, None
            act()
        return self._act is None

    def wait(self, *_: object) -> None:
        """On the host only what has happened is waited for."""
        assert self._act is None


class SimulatedCudaArena(cuda.CudaArena):
    """As ``CudaArena``, in memory of the host.

    Attributes:
        moves: bytes are copied and decoded, not only waited for.
    """

    moves = True

    def __init__(self, capacity_bytes: int) -> None:
        BufferArena.__init__(self, torch.empty(checked_capacity(capacity_bytes), dtype=torch.uint8))
        self._chance = random.Random(capacity_bytes)
        self._busy_until_s = 0.0
        self._copy_stream = self._upload_stream = SimpleNamespace(synchronize=self._finish)  # type: ignore[assignment]
        self._decoder: Any = SimpleNamespace(prepare=lambda _, table: SimpleNamespace(table=table))
        self._landing: deque[Any] = deque()
        self._verdicts: list[Any] = []
        self._decodes = {}
        self._copying, self._decoding, self._settling = deque(), deque(), False
        self._address = 0
        self._ticker = Ticker(0.00025)

    copy_to = Arena.copy_to

    def fence(self) -> Fence | None:
        """None: work on the host is done when it returns."""
        return None

    def _stages(self, read: PlannedRead) -> tuple[float, float]:
        """How long copy and decode take, in seconds; begins at this moment if the device is idle."""
        return self._chance.choice(_DELAYS_S), self._chance.choice(_DELAYS_S)

    def _begin(
        self,
        memory: memoryview,
        read: PlannedRead,
        base: int,
        decode: Any,
        drained: Callable[[], None],
        done: Callable[[Any], None],
        trace: StageTrace | None,
    ) -> Any:
        decode.table.write(memory[read.nbytes :], self._address + base)
        verdict = self._verdicts.pop() if self._verdicts else cuda._Verdict(_verdict_memory())
        landing = bytearray(read.nbytes if self.moves else 0)
        target = self.buffer.numpy()[base:]

        def copy() -> None:
            landing[:] = memory[: len(landing)]

        def work() -> None:
            copied.at_s = 0.0
            copied.query()
            verdict.found[: len(read.segments)] = decode.table.checksums
            for place in _wrong(read, np.frombuffer(landing, np.uint8), target) if landing else ():
                verdict.found[place] += np.uint64(1)

        copy_s, decode_s = self._stages(read)
        begun = max(time.perf_counter(), self._busy_until_s)
        copied = _Moment(begun + copy_s, copy)
        ready = _Moment(copied.at_s + decode_s, work)
        self._busy_until_s = copied.at_s
        if self._decoding:  # events of a stream fire in order
            ready.at_s = max(ready.at_s, self._decoding[-1].ready.at_s)  # type: ignore[attr-defined]
        starts = (_Moment(begun, lambda: None), _Moment(copied.at_s, lambda: None))
        times = (begun, copied.at_s, ready.at_s)
        return SimpleNamespace(
            read=read,
            decode=decode,
            verdict=verdict,
            copied=copied,
            ready=ready,
            starts=starts,
            times=times,
            drained=drained,
            done=done,
            trace=trace,
        )

    def _report(self, upload: Any, trace: StageTrace) -> None:
        begun, copied, ready = upload.times
        trace(Stage.COPY, begun, copied)
        trace(Stage.DECODE, copied, ready)

    def _wait_before_reuse(self, fences: Iterable[Fence]) -> None:
        for fence in fences:
            fence.wait()

    def _finish(self) -> None:
        """All that the device was given is over."""
        for upload in self._decoding:
            upload.ready.at_s = 0.0  # type: ignore[attr-defined]
            upload.ready.query()


def _verdict_memory() -> torch.Tensor:
    return torch.empty(MAX_SLOT_SEGMENTS, dtype=torch.int64)


def _wrong(read: PlannedRead, payload: np.ndarray[Any, np.dtype[np.uint8]], target: Any) -> Iterable[int]:
    """Decode; the segments whose checksums are not theirs."""
    for place, segment in enumerate(read.segments):
        source = payload[segment.source : segment.source + segment.nbytes]
        out = target[segment.destination : segment.destination + segment.decoded_bytes]
        try:
            decode_segment(source, out, where=read.where(place))
        except CorruptDataError:
            yield place
