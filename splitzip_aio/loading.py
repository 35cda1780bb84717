"""A layer on its way: what prefetcher and dispatcher hand each other, and nothing of either."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from splitzip_aio.abc import Fence, Hold, PlannedRead
from splitzip_aio.errors import SplitZipError
from splitzip_aio.plan import LayerPlan
from splitzip_aio.staging import Slot

__all__ = ["FilledSlot", "Load"]


class Load:
    """The reads of one layer, and how far they are.

    A read is queued, then in flight from ``take`` to ``settle``. The first error, or ``cancel``, drops
    what is still queued; what is in flight is waited for, since it writes to slots and to the layer's range. Once
    nothing is queued or in flight, ``settled`` is called, once, and the range may be used or freed.

    Attributes:
        plan: the layer.
        base: offset of its range in the arena.
        urgent: someone waits for it; it overtakes what is only read ahead.
        error: the first error, if any.
        fence: what a stream must wait for before it uses the layer; None if nothing.
    """

    def __init__(self, plan: LayerPlan, base: int, *, urgent: bool, settled: Callable[[Load], None]) -> None:
        self.plan = plan
        self.base = base
        self.urgent = urgent
        self.error: SplitZipError | None = None
        self.fence: Fence | None = None
        self._queued = deque(plan.reads)
        self._in_flight = 0
        self._cancelled = False
        self._settled = settled

    @property
    def queued(self) -> bool:
        """Whether there is a read to take."""
        return bool(self._queued)

    @property
    def wanted(self) -> bool:
        """Whether anyone can still use what is in flight."""
        return self.error is None and not self._cancelled

    def start(self) -> None:
        """Settle at once if there is nothing to read: a layer of empty tensors."""
        self._settle_if_done()

    def take(self) -> PlannedRead:
        """The next read, now in flight. Raises IndexError if none is queued."""
        read = self._queued.popleft()
        self._in_flight += 1
        return read

    def settle(self, *, fence: Fence | None = None, error: SplitZipError | None = None) -> None:
        """A read is done, decoded or given up: nothing writes on its behalf any more."""
        self._in_flight -= 1
        if fence is not None:  # which stands for those before it
            self.fence = fence
        if error is not None and self.error is None:
            self.error = error
            self._queued.clear()
        self._settle_if_done()

    def cancel(self) -> None:
        """Nobody wants the layer any more: read no further."""
        self._cancelled = True
        if self._queued:
            self._queued.clear()
            self._settle_if_done()

    def _settle_if_done(self) -> None:
        if not self._queued and not self._in_flight:
            self._settled(self)


@dataclass(frozen=True, slots=True)
class FilledSlot:
    """A read that is done, on its way from the prefetcher to the dispatcher.

    Attributes:
        slot: the slot it was made with; each that is under way has one.
        read: what was read.
        load: the load it is part of.
        hold: where it is instead, if the host tier or a mapping has it: what is there is not copied to the slot.
    """

    slot: Slot
    read: PlannedRead
    load: Load
    hold: Hold | None = None

    @property
    def memory(self) -> memoryview:
        """What was read, and the room behind it.

        Raises:
            ReadError: what was held is not there any more.
        """
        return self.slot.memory if self.hold is None else self.hold.memory
