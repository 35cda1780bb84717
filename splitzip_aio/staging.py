"""The staging ring: page-aligned, page-locked slots that reads land in and copies start from.

A slot has one owner at a time, and its state says who::

    FREE ──acquire──▶ READING ──mark_ready──▶ READY ──mark_copying──▶ COPYING ──release──▶ FREE
                         │                      │
                         └───────release────────┘      a read that failed, a layer that nobody wants any more

READING belongs to the driver, which gives the slot back only after the kernel did; COPYING belongs to the arena,
which gives it back only after the copy's event fired. Neither is cut short by cancellation, so a FREE slot is never
written behind anyone's back. The ring is the pipeline's only buffer: whoever is slow lets slots run out, and reading
waits.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, TracebackType
from typing import Self

from splitzip_aio.errors import BusyError, ClosedError, InvalidArgumentError, LayerTooLargeError
from splitzip_aio.memory import map_anonymous, page_lock, page_unlock
from splitzip_aio.telemetry import RingStatistics

__all__ = ["PAGE_BYTES", "Slot", "SlotState", "StagingRing", "split_ring"]

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Slots start at multiples of this, and direct reads are rounded to it."""

_LEAST_FAST_BYTES = 16 << 20  # from there on copies run at the link's full speed
_MOST_BYTES = 64 << 20  # the event loop spends as long on a slot of any size: a quarter as often as on the least fast
_LEAST_SLOTS = 3  # one being filled, one being copied, one in between
_ENOUGH_SLOTS = 4  # two to fill and two to copy; more and smaller ones would cost the event loop more than they bring


class SlotState(enum.Enum):
    """Who owns a slot."""

    FREE = "free"
    READING = "reading"
    READY = "ready"
    COPYING = "copying"

    __hash__ = object.__hash__  # members are what they are; Enum's own is written in Python, and slots move often


_NEXT: Mapping[SlotState, frozenset[SlotState]] = MappingProxyType(
    {
        SlotState.FREE: frozenset({SlotState.READING}),
        SlotState.READING: frozenset({SlotState.READY, SlotState.FREE}),
        SlotState.READY: frozenset({SlotState.COPYING, SlotState.FREE}),
        SlotState.COPYING: frozenset({SlotState.FREE}),
    }
)


class Slot:
    """One slot of a staging ring.

    Attributes:
        index: its place in the ring, and its number among the buffers that a driver registers.
        memory: all of it, a writable memoryview of bytes.
        payload: the part that reads may fill; what follows is room for a decode table.
    """

    __slots__ = ("_state", "index", "memory", "payload")

    def __init__(self, index: int, memory: memoryview, payload_bytes: int) -> None:
        self.index = index
        self.memory = memory
        self.payload = memory[:payload_bytes]
        self._state = SlotState.FREE

    @property
    def state(self) -> SlotState:
        """Who owns the slot now."""
        return self._state

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self._state.value}, {len(self.memory)} bytes>"


class StagingRing:
    """Slots of equal size in one anonymous mapping.

    Args:
        slots: how many.
        payload_bytes: bytes of a slot that reads may fill; a multiple of 4096.
        table_bytes: bytes after them for a decode table, rounded up to a multiple of 4096.
        pinned: page-lock the slots and make them known to CUDA. Where CUDA refuses, the ring works without, says so
            in the log once, and in its statistics.

    Raises:
        InvalidArgumentError: no slots, or a size that is not a positive multiple of 4096.
    """

    def __init__(self, slots: int, payload_bytes: int, *, table_bytes: int = 0, pinned: bool = False) -> None:
        if slots < 1:
            raise InvalidArgumentError(f"a staging ring needs at least one slot, found {slots}")
        if payload_bytes < PAGE_BYTES or payload_bytes % PAGE_BYTES or table_bytes < 0:
            raise InvalidArgumentError(
                f"slots hold a positive multiple of {PAGE_BYTES} bytes, found {payload_bytes} and {table_bytes}"
            )
        self._slot_bytes = payload_bytes + _whole_pages(table_bytes)
        self._mapping = map_anonymous(slots * self._slot_bytes, option="ring_bytes")
        self._memory = memoryview(self._mapping)
        self._slots = tuple(
            Slot(index, self._memory[start : start + self._slot_bytes], payload_bytes)
            for index, start in enumerate(range(0, slots * self._slot_bytes, self._slot_bytes))
        )
        self._free = deque(self._slots)
        self._acquired = 0
        self._closed = False
        self._fallback = page_lock(self._memory) if pinned else None
        if self._fallback is not None:
            logger.warning("the staging ring is not pinned, so copies are slower: %s", self._fallback)
        self._pinned = pinned and self._fallback is None

    @property
    def slots(self) -> Sequence[Slot]:
        """All slots, by index."""
        return self._slots

    @property
    def payload_bytes(self) -> int:
        """Bytes of a slot that reads may fill."""
        return len(self._slots[0].payload)

    def acquire(self) -> Slot | None:
        """Take a free slot, which is READING then; None while there is none.

        Raises:
            ClosedError: the ring is closed.
        """
        if self._closed:
            raise ClosedError("the staging ring is closed")
        if not self._free:
            return None
        slot = self._free.popleft()
        self._move(slot, SlotState.READING)
        self._acquired += 1
        return slot

    def mark_ready(self, slot: Slot) -> None:
        """READING ▶ READY: the read is complete."""
        self._move(slot, SlotState.READY)

    def mark_copying(self, slot: Slot) -> None:
        """READY ▶ COPYING: the arena takes the slot over."""
        self._move(slot, SlotState.COPYING)

    def release(self, slot: Slot) -> None:
        """Any state but FREE ▶ FREE."""
        self._move(slot, SlotState.FREE)
        self._free.append(slot)

    def release_all(self) -> None:
        """Release every slot in use; for when all tasks that used one have ended, however they ended."""
        for slot in self._slots:
            if slot.state is not SlotState.FREE:
                self.release(slot)

    def statistics(self) -> RingStatistics:
        """A snapshot of states and counters."""
        counts = dict.fromkeys(SlotState, 0)
        for slot in self._slots:
            counts[slot.state] += 1
        return RingStatistics(
            slots=len(self._slots),
            slot_bytes=self._slot_bytes,
            pinned=self._pinned,
            fallback=self._fallback,
            free=counts[SlotState.FREE],
            reading=counts[SlotState.READING],
            ready=counts[SlotState.READY],
            copying=counts[SlotState.COPYING],
            acquired=self._acquired,
        )

    def close(self) -> None:
        """Unlock and unmap the memory. Idempotent.

        Raises:
            BusyError: a slot is in use: the kernel or the GPU may still write to it.
        """
        if self._closed:
            return
        busy = [slot for slot in self._slots if slot.state is not SlotState.FREE]
        if busy:
            raise BusyError(f"a staging ring cannot close while slots are in use: {busy}")
        self._closed = True
        if self._pinned:
            page_unlock(self._memory)
        with suppress(BufferError):  # someone still looks at it: unmapped with the last view
            for slot in self._slots:
                slot.payload.release()
                slot.memory.release()
            self._memory.release()
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _move(self, slot: Slot, to: SlotState) -> None:
        """The one place where a slot changes its state."""
        if to not in _NEXT[slot._state]:
            raise RuntimeError(f"{slot!r} cannot become {to.value}")
        slot._state = to


def split_ring(ring_bytes: int, *, largest_read_bytes: int, table_bytes: Callable[[int], int]) -> tuple[int, int]:
    """Divide a ring of ``ring_bytes`` bytes: how many slots, and how many bytes of each are payload.

    A ring has four slots of 16 to 64 MiB, or more of 64. A smaller one has three of 16 MiB, but three smaller
    ones if they can hold ``largest_read_bytes``, the largest segment rounded outward to whole pages; else two or one.
    ``table_bytes`` says how many bytes to keep behind a payload of so many.

    Raises:
        LayerTooLargeError: the ring cannot hold one such slot.
    """
    payload = _whole_pages(max(largest_read_bytes, 1))
    least = payload + _whole_pages(table_bytes(payload))
    if ring_bytes < least:
        raise LayerTooLargeError(
            f"ring_bytes: the cache's largest segment needs a slot of {least} bytes, and the ring has {ring_bytes}; "
            f"give at least {least} bytes"
        )
    fast = max(_LEAST_FAST_BYTES, min(_MOST_BYTES, ring_bytes // _ENOUGH_SLOTS))
    slot_bytes = min(fast, ring_bytes // _LEAST_SLOTS) // PAGE_BYTES * PAGE_BYTES
    spare = slot_bytes - _whole_pages(table_bytes(slot_bytes))
    if spare > payload:
        return ring_bytes // slot_bytes, spare
    return ring_bytes // least, payload


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
