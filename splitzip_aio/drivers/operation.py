"""What a read has yet to do, and what each completion means for it. No event loop and no system calls here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from anyio import Event

from splitzip_aio.drivers.files import OpenFile
from splitzip_aio.errors import InvalidArgumentError, ReadError, SplitZipError

__all__ = ["Extent", "Operation", "Outcome", "Slots", "Until", "check_range", "split"]

RETRIES_WITHOUT_PROGRESS = 16
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})


@dataclass(frozen=True, slots=True)
class Slots:
    """The memory that is read into: each slot as a view of bytes, and the address of its first byte."""

    views: tuple[memoryview, ...]
    addresses: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """The size of all slots together."""
        return sum(len(view) for view in self.views)

    def release(self) -> None:
        """Let go of the memory, so that its owner can unmap it. Idempotent."""
        for view in self.views:
            view.release()


@dataclass(slots=True)
class Outcome:
    """Counts over all completions of a driver."""

    short_reads: int = 0
    retries: int = 0


@dataclass(slots=True, eq=False)
class Operation:
    """One call of ``read``: some of its extents are queued, some the kernel's, the others done.

    Attributes:
        urgent: its extents go before those of others.
        queued: extents waiting for room in the queue.
        active: extents that the kernel or a worker owns, and with them their part of the buffer.
        withdrawn: the queued ones are not wanted any more.
        failure: the first error of any extent.
        wakeup: set for the task that waits for this operation, when it should look again.
        call: called once it is done, where no task waits for it.
    """

    file: OpenFile
    urgent: bool = False
    queued: int = 0
    active: int = 0
    withdrawn: bool = False
    failure: SplitZipError | None = None
    wakeup: Event | None = None
    call: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        """Nothing of the buffer is the kernel's, and nothing more will be."""
        return self.active == 0 and self.queued == 0

    def withdraw(self, failure: SplitZipError | None = None) -> None:
        """Give up what the kernel has not begun, keeping the first reason."""
        self.withdrawn = True
        self.queued = 0
        self.failure = self.failure or failure

    def wake(self) -> None:
        """Let the waiting task look again, or make the call if it is time for that."""
        if self.wakeup is not None:
            self.wakeup.set()
        elif self.call is not None and self.done:
            call, self.call = self.call, None
            call()


class Until:
    """A task that waits for something, as ``Operation`` is one that waits for its extents.

    Attributes:
        wakeup: set for the task, when it should look again.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self.wakeup: Event | None = None

    @property
    def done(self) -> bool:
        """Whether it has waited long enough."""
        return self._over()

    def wake(self) -> None:
        """Let the task look again."""
        if self.wakeup is not None:
            self.wakeup.set()


@dataclass(slots=True, eq=False)
class Extent:
    """One contiguous part of an operation, the unit handed to the kernel, continued until it is whole.

    Attributes:
        slot, position: where its first byte goes: ``buffers[slot][position]``.
        offset: where its first byte is in the file.
        nbytes: bytes to ask for; for a direct file a multiple of the alignment, maybe past the file's end.
        expected: bytes there are, ``nbytes`` less what lies past the file's end.
        done: bytes that have arrived.
        copies: it has one of the places for reads that the page cache serves.
    """

    operation: Operation
    slot: int
    position: int
    offset: int
    nbytes: int
    expected: int
    done: int = 0
    copies: bool = False
    fruitless: int = field(default=0, repr=False)

    @property
    def file(self) -> OpenFile:
        """The file it is part of."""
        return self.operation.file

    def settle(self, result: int, outcome: Outcome) -> bool:
        """Take a completion into account.

        Args:
            result: bytes read from ``offset + done`` on, or a negated errno.
            outcome: where to count it.

        Returns:
            Whether the rest must be asked for. Otherwise the extent is whole, or the operation has failed.
        """
        if result < 0:
            return self._refused(-result, outcome)
        arrived = min(self.done + result, self.expected)
        if arrived == self.expected:
            self.done = arrived
            return False
        if result == 0:
            return self._fail(
                errno.EIO, "the file ended early; it was cut short after it was opened. Build or copy it again"
            )
        outcome.short_reads += 1
        # A direct read may only begin at a block: what came of a block beyond the last whole one is read again.
        whole = arrived - arrived % self.file.offset_alignment
        self.fruitless = 0 if whole > self.done else self.fruitless + 1
        self.done = max(self.done, whole)
        if self.fruitless > RETRIES_WITHOUT_PROGRESS:
            return self._fail(errno.EIO, "short reads without progress")
        return True

    def _refused(self, code: int, outcome: Outcome) -> bool:
        worth_it = code in _TRANSIENT or (code == errno.EINVAL and self.file.demote())
        if not worth_it or self.fruitless >= RETRIES_WITHOUT_PROGRESS:
            return self._fail(code, os.strerror(code))
        self.fruitless += 1
        outcome.retries += 1
        return True

    def _fail(self, code: int, what: str) -> bool:
        mode = "direct" if self.file.direct else "buffered"
        where = f"{mode} read of [{self.offset}, {self.offset + self.nbytes})"
        message = f"{where}: {what}; expected {self.expected} bytes, found {self.done}"
        self.operation.withdraw(ReadError(code, message, self.file.path))
        return False


def split(
    operation: Operation, *, slot: int, position: int, offset: int, nbytes: int, chunk_bytes: int
) -> list[Extent]:
    """Cut a read into extents of at most ``chunk_bytes``, leaving out those past the end of the file."""
    size = operation.file.size
    extents = []
    for start in range(0, min(nbytes, max(0, size - offset)), chunk_bytes):
        length = min(chunk_bytes, nbytes - start)
        expected = min(length, size - offset - start)
        extents.append(Extent(operation, slot, position + start, offset + start, length, expected))
    operation.queued = len(extents)
    return extents


def check_range(file: OpenFile, slots: Slots, slot: int, position: int, offset: int, nbytes: int) -> None:
    """Whether such a read is possible, in this file and into these slots.

    Raises:
        InvalidArgumentError: a slot or range that does not exist, or a misaligned one.
    """
    if not 0 <= slot < len(slots.views):
        raise InvalidArgumentError(f"slot {slot} does not exist; there are {len(slots.views)}")
    if min(position, offset, nbytes) < 0:
        raise InvalidArgumentError(
            f"{file.path}: negative buffer_offset, offset or nbytes: {position}, {offset}, {nbytes}"
        )
    size = len(slots.views[slot])
    if position + nbytes > size:
        raise InvalidArgumentError(f"{file.path}: {nbytes} bytes at {position} do not fit a slot of {size} bytes")
    if (offset | nbytes) % file.offset_alignment:
        raise InvalidArgumentError(
            f"{file.path}: a direct read needs offset and nbytes in multiples of {file.offset_alignment}, "
            f"found {offset} and {nbytes}; round outward"
        )
    address = slots.addresses[slot] + position
    if address % file.memory_alignment:
        raise InvalidArgumentError(
            f"{file.path}: a direct read needs memory at a multiple of {file.memory_alignment}; "
            f"slot {slot} + {position} is at {address:#x}"
        )
