"""What the arena on a GPU makes of a device that fails, and when it looks, without one: streams are stand-ins."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace

import anyio
import pytest
import torch

from splitzip_aio.abc import PlannedRead, PlannedSegment
from splitzip_aio.arena import CudaArena
from splitzip_aio.errors import TransportError
from splitzip_aio.waiting import Ticker

READ = PlannedRead(0, "a.szp", 4096, 100, (PlannedSegment(64, 36, 0, 72, "w"),))


class Stream:
    """A stream that notes when somebody waits for it."""

    def __init__(self, events: list[object]) -> None:
        self._events = events

    def synchronize(self) -> None:
        self._events.append("synchronized")


class Failing(CudaArena):
    """An arena whose uploads fail with ``error``; ``events`` is what happened, in order."""

    def __init__(self, error: RuntimeError) -> None:
        self.events: list[object] = []
        self._error = error
        self._device = torch.device("cuda", 3)
        self._copy_stream = self._upload_stream = Stream(self.events)
        self._copying, self._decoding, self._settling = deque(), deque(), False

    def _prepared(self, *_: object) -> None:
        return None

    def _begin(self, *_: object) -> None:
        raise self._error

    def upload(self) -> list[object]:
        self.submit(memoryview(b""), READ, 0, drained=lambda: self.events.append("drained"), done=self.events.append)
        return self.events


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_out_of_memory_is_the_layers_error_once_the_streams_are_done(error: RuntimeError) -> None:
    *before, said = Failing(error).upload()
    assert before == ["synchronized", "synchronized", "drained"]
    assert isinstance(said, TransportError)
    assert said.__cause__ is error
    assert "'w', a.szp at offset 4160: cuda:3 ran out of memory while this was uploaded; free some" in str(said)


def test_any_other_failure_is_not_taken_for_it() -> None:
    arena = Failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        arena.upload()
    assert arena.events == []


@pytest.mark.parametrize(("copied", "ready", "due"), [(0, 0, False), (1, 0, True), (0, 1, True), (1, 1, True)])
def test_a_decode_that_is_done_does_not_wait_for_the_copy_of_another_slot(copied: int, ready: int, due: bool) -> None:
    arena = Failing(RuntimeError())
    arena._copying.append(SimpleNamespace(copied=SimpleNamespace(query=lambda: bool(copied))))
    arena._decoding.append(SimpleNamespace(ready=SimpleNamespace(query=lambda: bool(ready))))
    assert arena._nothing_due() is not due
    arena._copying.clear()
    assert arena._nothing_due() is not bool(ready)


class Arriving(Failing):
    """An arena whose uploads are done once ``arrived`` is true."""

    def __init__(self) -> None:
        super().__init__(RuntimeError())
        self.arrived = False
        self._ticker = Ticker(0.00025)

    def _begin(self, *arguments: object) -> SimpleNamespace:  # type: ignore[override]
        event = SimpleNamespace(query=lambda: self.arrived)
        return SimpleNamespace(copied=event, ready=event, drained=arguments[4], done=arguments[5], trace=None)

    def _check(self, _: object) -> None:
        return None


@pytest.mark.anyio
async def test_whoever_reaps_returns_when_a_later_upload_found_all_done() -> None:
    """What is uploaded looks at once, also at what was before it: small layers are there by then."""
    arena = Arriving()
    arena.upload()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(arena.reap)
            await anyio.sleep(0.02)
            assert arena.events == []
            arena.arrived = True
            assert len(arena.upload()) == 4  # each was drained and done
    arena._ticker.close()


@pytest.mark.anyio
async def test_slots_that_are_done_as_soon_as_they_are_given_leave_others_their_turn() -> None:
    """Each slot that is copied makes room for another, and a host slower than the link always finds one more."""
    arena, count = Arriving(), 0
    arena.arrived = True

    def give() -> None:
        arena.submit(memoryview(b""), READ, 0, drained=again, done=arena.events.append)

    def again() -> None:
        nonlocal count
        count += 1
        time.sleep(0.0002)
        if count < 200:
            give()

    give()
    assert count < 20
    with anyio.fail_after(20):
        await arena.reap()
    assert count == len(arena.events) == 200
    arena._ticker.close()
