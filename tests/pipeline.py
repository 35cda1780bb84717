"""Stand-ins for what the pipeline's parts talk to, under a test's control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import torch

from splitzip_aio.abc import (
    Arena,
    ArenaStatistics,
    DriverStatistics,
    Fence,
    FileHandle,
    PlannedRead,
    PlannedSegment,
    ReadDriver,
    StageTrace,
)
from splitzip_aio.errors import SplitZipError
from splitzip_aio.loading import Load
from splitzip_aio.plan import LayerPlan

if TYPE_CHECKING:
    from splitzip_aio.abc import IOMode


class Gate:
    """Those who reached a point, in order, each let through when the test says so."""

    def __init__(self) -> None:
        self.arrived: list[object] = []
        self.is_open = False
        self._events: list[anyio.Event] = []
        self._changed = anyio.Event()

    def let_all(self) -> None:
        """Let everybody through from now on."""
        self.is_open = True
        self._changed.set()

    def arrive(self, who: object) -> anyio.Event:
        """Note an arrival; the event is set when the test lets it through."""
        self.arrived.append(who)
        self._events.append(anyio.Event())
        return self._events[-1]

    async def change(self) -> None:
        """Wait until the test opens the gate, or lets someone through."""
        self._changed = anyio.Event()
        await self._changed.wait()

    def let(self, place: int) -> None:
        self._events[place].set()
        self._changed.set()


async def settle_waiting(gate: Gate, waiting: list[tuple[anyio.Event, Callable[[], None]]]) -> None:
    """Make each call once its event is set or the gate is open, until no call waits."""
    while waiting:
        ready = [entry for entry in waiting if gate.is_open or entry[0].is_set()]
        if not ready:
            await gate.change()
        for entry in ready:
            waiting.remove(entry)
            entry[1]()


async def upload(
    arena: Arena, memory: memoryview, read: PlannedRead, base: int, *, drained: Callable[[], None]
) -> Fence | None:
    """Submit one slot and reap it: the fence, or the error raised."""
    results: list[Fence | SplitZipError | None] = []
    arena.submit(memory, read, base, drained=drained, done=results.append)
    await arena.reap()
    (result,) = results
    if isinstance(result, SplitZipError):
        raise result
    return result


class FakeFile(FileHandle):
    """A file of so many bytes."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self.identity = path

    def handle(self, offset: int, nbytes: int) -> FileHandle:
        return self

    @property
    def closed(self) -> bool:
        return False

    def close(self) -> None:
        raise NotImplementedError


class FakeDriver(ReadDriver):
    """Reads zeros; each read waits at ``gate``, and raises what ``failures`` has for its offset."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.failures: dict[int, SplitZipError] = {}
        self.urgent: dict[int, bool] = {}
        self._waiting: list[tuple[anyio.Event, Callable[[], None]]] = []

    name = "fake"
    buffers: Sequence[memoryview] = ()

    def open(self, path: object, *, io: IOMode = "auto") -> FileHandle:
        raise NotImplementedError

    async def read(
        self, file: FileHandle, slot: int, buffer_offset: int, *, offset: int, nbytes: int, urgent: bool = False
    ) -> int:
        raise NotImplementedError

    def submit(
        self,
        file: FileHandle,
        slot: int,
        buffer_offset: int,
        *,
        offset: int,
        nbytes: int,
        urgent: bool,
        done: Callable[[int | SplitZipError], None],
    ) -> None:
        self.urgent[offset] = urgent
        result = self.failures.get(offset, max(0, min(file.size - offset, nbytes)))
        self._waiting.append((self.gate.arrive(offset), partial(done, result)))

    async def reap(self) -> None:
        await settle_waiting(self.gate, self._waiting)

    def statistics(self) -> DriverStatistics:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class FakeArena(Arena):
    """Decodes nothing; each upload waits at ``gate``, and ends with what ``failures`` has for its destination."""

    max_segments = 4
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.gate = Gate()
        self.failures: dict[int, SplitZipError] = {}
        self._waiting: list[tuple[anyio.Event, Callable[[], None]]] = []
        self.uploads: list[tuple[PlannedRead, int]] = []

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        return 0

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
        self.uploads.append((read, base))
        destination = base + read.segments[0].destination

        def settle() -> None:
            drained()
            done(self.failures.get(destination))

        self._waiting.append((self.gate.arrive(destination), settle))

    async def reap(self) -> None:
        await settle_waiting(self.gate, self._waiting)

    def fits(self, nbytes: int, *, freeing: Iterable[int] = ()) -> bool:
        raise NotImplementedError

    def allocate(self, nbytes: int) -> int | None:
        raise NotImplementedError

    def free(self, offset: int, *, after: Iterable[Fence] = ()) -> None:
        raise NotImplementedError

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def tensor(self, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        raise NotImplementedError

    def fence(self) -> Fence | None:
        return None

    def statistics(self) -> ArenaStatistics:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class Loads:
    """Loads of reads of a page each, which say when they settled."""

    def __init__(self) -> None:
        self.settled: list[str] = []

    def make(self, name: str, offsets: Sequence[int], *, pack: int = 0, base: int = 0, urgent: bool = True) -> Load:
        reads = tuple(
            PlannedRead(
                pack, "ab"[pack] + ".szp", offset, 4096, (PlannedSegment(32, 320, place * 256, 200, f"{name}.weight"),)
            )
            for place, offset in enumerate(offsets)
        )
        plan = LayerPlan(name, (), 256, reads)
        return Load(plan, base, urgent=urgent, settled=lambda load: self.settled.append(load.plan.name))
