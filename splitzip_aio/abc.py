"""What a back end must do: the contracts that the pipeline is written against."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self, TypeAlias

from splitzip_aio.errors import SplitZipError
from splitzip_aio.planned import PlannedRead, PlannedSegment
from splitzip_aio.timeline import Stage

if TYPE_CHECKING:
    import torch

__all__ = [
    "Arena",
    "ArenaStatistics",
    "DriverStatistics",
    "Fence",
    "FileHandle",
    "Hold",
    "IOMode",
    "PlannedRead",
    "PlannedSegment",
    "ReadDriver",
    "StageTrace",
]

IOMode: TypeAlias = Literal["auto", "direct", "buffered"]
"""How a file is read: past the page cache, through it, or the first of the two that works."""

StageTrace: TypeAlias = Callable[[Stage, float, float], None]
"""Called with a stage that a slot went through, and when that began and ended, in seconds of ``time.perf_counter``."""


@dataclass(frozen=True, slots=True)
class DriverStatistics:
    """A snapshot of what a ``ReadDriver`` has done since it was opened.

    Attributes:
        name: ``"uring"`` or ``"threads"``.
        binding: how io_uring is called, ``"liburing 2026.3.30"`` or ``"system calls"``; None for threads.
        binding_reason: why the binding is what it is; None for threads.
        fixed_buffers: the slots are registered with the kernel, which then pins no pages per read.
        copy_threads: threads of the driver's own that copy from the page cache; 0 until that is worth their start.
        queue_depth: reads that the kernel (or the worker pool) is given at once, at most.
        fallbacks: for each better rung that could not be used, its name and the reason; empty if none.
        reads: calls of ``ReadDriver.read`` that returned.
        bytes_read: bytes those calls returned.
        direct_bytes_read: how many of ``bytes_read`` came past the page cache.
        short_reads: completions that brought less than was asked before the end of the file.
        retries: attempts repeated after EINTR, EAGAIN, or a direct read demoted to buffered.
        in_flight: chunks the kernel (or a worker) is working on now.
        queued: chunks waiting for room in the queue now.
        open_files: file handles not yet closed.
    """

    name: str
    binding: str | None
    binding_reason: str | None
    fixed_buffers: bool
    copy_threads: int
    queue_depth: int
    fallbacks: tuple[str, ...]
    reads: int
    bytes_read: int
    direct_bytes_read: int
    short_reads: int
    retries: int
    in_flight: int
    queued: int
    open_files: int


class FileHandle(ABC):
    """A file opened by a ``ReadDriver``, and readable by that driver only.

    Attributes:
        path: the path it was opened by.
        size: the file's size in bytes when it was opened.
        direct: reads bypass the page cache.
        reason: why ``direct`` is what it is, in words.
        memory_alignment: bytes; buffer addresses must be multiples of it (1 when buffered).
        offset_alignment: bytes; offsets and lengths must be multiples of it (1 when buffered).
        cached: whoever reads knows that the page cache has what is read. Set it so that such reads, which are copies
            and keep a core busy each, leave some cores to others.
    """

    path: str
    size: int
    direct: bool
    reason: str
    memory_alignment: int
    offset_alignment: int
    cached: bool = False

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    @abstractmethod
    def close(self) -> None:
        """Refuse further reads, and release the descriptor once those in flight are done. Idempotent."""


class ReadDriver(ABC):
    """Reads extents of files into fixed slots of memory, many at a time.

    A driver belongs to the event loop of its first ``read``. Make one with
    ``splitzip_aio.drivers.open_driver``; it is an asynchronous context manager::

        async with open_driver("auto", buffers=slots, queue_depth=16) as driver:
            file = driver.open("packs/00000.szp")
            count = await driver.read(file, 0, 0, offset=0, nbytes=1 << 20)
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Which back end this is: ``"uring"`` or ``"threads"``."""

    @property
    @abstractmethod
    def buffers(self) -> Sequence[memoryview]:
        """The slots, as writable memoryviews of bytes."""

    @property
    def may_be_bypassed(self) -> bool:
        """Whether a transport may take what the page cache has from a mapping of the file, and not have it read here.

        False, unless a driver says otherwise: so whoever wants to see every read, or let some fail, does.
        """
        return False

    @abstractmethod
    def open(self, path: str | os.PathLike[str], *, io: IOMode = "auto") -> FileHandle:
        """Open a regular file for reading.

        Args:
            path: the file.
            io: ``"direct"`` and ``"buffered"`` are orders; ``"auto"`` takes direct where the file
                system has it, records the reason where not, and demotes a file whose first direct
                read is refused.

        Raises:
            ReadError: the file cannot be opened, or is not a regular file.
            UnsupportedError: ``io="direct"`` on a file that has no direct I/O.
            ClosedError: the driver is closed.
        """

    @abstractmethod
    async def read(
        self, file: FileHandle, slot: int, buffer_offset: int, *, offset: int, nbytes: int, urgent: bool = False
    ) -> int:
        """Read ``[offset, offset + nbytes)`` of ``file`` into ``buffers[slot][buffer_offset:]``.

        For a direct file ``offset``, ``nbytes`` and the address of the destination must be multiples of
        the file's alignments; the caller rounds outward, past the end of the file where need be.
        Bytes of the destination beyond the returned count, within ``nbytes``, may have been written.

        The buffer is the kernel's until this returns or raises, and the caller's afterwards, also when
        it is cancelled: cancellation takes effect after what the kernel had begun is done.

        An ``urgent`` read goes before all that is queued and not urgent: what is needed now overtakes what is
        read ahead.

        Returns:
            ``nbytes``, or less where the file ends first; never less for another reason.

        Raises:
            ReadError: the operating system failed the read, or the file has become shorter than it was
                when opened; ``errno`` and ``filename`` are set.
            InvalidArgumentError: a slot or range that does not exist, or a misaligned one.
            ClosedError: the driver or the file is closed.
            WrongEventLoopError: awaited in another event loop or process than the first read.
        """

    @abstractmethod
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
        """``read`` without a task that waits: ``done`` is called with what that would return or raise, in ``reap``.

        A task for each read costs more than the read. Nothing cancels it but ``aclose``. What is wrong with the call
        itself is raised at once.
        """

    @abstractmethod
    async def reap(self) -> None:
        """Return once no read that was given to ``submit`` is under way."""

    @abstractmethod
    def statistics(self) -> DriverStatistics:
        """A snapshot of the counters."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close files and driver once nothing is in flight; queued reads get ClosedError. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """A snapshot of an arena's memory.

    Attributes:
        capacity_bytes: all of it.
        used_bytes: in ranges that are allocated now.
        peak_bytes: the most that ``used_bytes`` has been.
        ranges: ranges allocated now.
        largest_free_bytes: the largest range that could be allocated now.
    """

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    ranges: int
    largest_free_bytes: int


class Hold(Protocol):
    """Memory outside of the slots that has an extent already, and keeps it until ``release``."""

    @property
    def memory(self) -> memoryview:
        """The extent, and room behind it for whoever needs a table there.

        Raises:
            ReadError: it is not there any more.
        """

    def spoil(self) -> None:
        """The extent turned out to be wrong: nobody is to find it again. May be called after ``release``."""

    def release(self) -> None:
        """Let the extent go. Idempotent."""


class Fence(Protocol):
    """A point in the work of a GPU stream; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the work has got there."""

    def wait(self) -> None:
        """Make the caller's current stream wait until it has."""


class Arena(ABC):
    """Memory on one device that layers are decoded into, in ranges of bytes.

    An arena belongs to one transport, and to its event loop; only ``reap`` and ``aclose`` wait.

    Attributes:
        max_segments: how many segments a slot may hold at most.
        decodes_in_place: slots are decoded from where they are, and not copied first.
    """

    max_segments: ClassVar[int]
    decodes_in_place: ClassVar[bool] = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the memory is."""

    @staticmethod
    @abstractmethod
    def table_bytes(payload_bytes: int) -> int:
        """Bytes to keep free behind a payload of at most ``payload_bytes`` in each slot given to ``submit``."""

    @abstractmethod
    def fits(self, nbytes: int, *, freeing: Iterable[int] = ()) -> bool:
        """Whether ``allocate`` would find ``nbytes`` bytes, were the ranges at these offsets freed before."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of ``nbytes`` bytes, a multiple of 256; None while no free range is as large."""

    @abstractmethod
    def free(self, offset: int, *, after: Iterable[Fence] = ()) -> None:
        """Take back the range at ``offset``; what is decoded there next waits for the fences ``after``."""

    @abstractmethod
    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes there, (nbytes,) uint8, sharing the arena's memory."""

    def copy_to(self, target: torch.Tensor, offset: int) -> None:
        """Copy the bytes there to ``target``, as many as it has, on the caller's current stream; in any thread.

        ``target`` is (bytes,) uint8, contiguous, and on the arena's device.
        """
        target.copy_(self.view(offset, target.numel()), non_blocking=True)

    @abstractmethod
    def tensor(self, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes there as a tensor of a safetensors dtype and shape, sharing the arena's memory.

        ``splitzip_aio.codec.dtypes.torch_view`` says what becomes of what torch has no dtype for.
        """

    @abstractmethod
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
        """Begin to decode the segments of a slot into the arena and to check them; returns at once.

        The calls are made now or later: in ``reap`` or a later ``submit``.

        Args:
            memory: the slot; its first ``read.nbytes`` bytes were read, and ``table_bytes`` more may be written.
            read: what was read: at most ``max_segments`` segments.
            base: where the layer's range starts in the arena.
            drained: called once, as soon as the slot may be filled again, and before ``done``.
            done: called once, with what a stream must wait for before it uses this result and those before it, None
                where there is nothing to wait for; or with an error: a segment is wrong, named with its pack and
                offset, or the device ran out of memory, and the range then holds anything.
            trace: called with the times of each stage before ``done``; left out where there is an error.
        """

    @abstractmethod
    async def reap(self) -> None:
        """Return once nothing that was submitted is under way. For one task at a time."""

    @abstractmethod
    def fence(self) -> Fence | None:
        """The end of what the caller's current stream has been given so far; None where work has no streams."""

    @abstractmethod
    def statistics(self) -> ArenaStatistics:
        """A snapshot of the memory's use."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of the memory once the device is done with it. Idempotent.

        Views that callers still hold stay valid.
        """
