"""An engine that leaves what the page cache has to threads of its own, and the rest to another engine.

A thread gives the other engine's signal, so that whoever waits for that engine hears of both.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from splitzip_aio.drivers.copier import CopyThreads, code_is_loaded
from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.operation import Extent, Slots
from splitzip_aio.drivers.surrounding import SurroundingEngine

__all__ = ["CopyingEngine"]

# From the page cache: who reads so much most likely reads it again, and numba takes half a second to import.
_WORTH_IT_BYTES = 2 << 30
# At a time: some to copy while the loop sees to others, few for an urgent one to wait for.
_SLOTS_AHEAD = 4
_AHEAD_BYTES = 2 << 20  # for each thread, if that is more slots
_WHOLE = 1 << 62


class CopyingEngine(SurroundingEngine):
    """Another engine, relieved of what the page cache has: at once where that costs nothing, else once it is much.

    Until the threads have started, and where they cannot, the other engine reads everything. It also reads again what
    they could not read, and says why.
    """

    def __init__(self, inner: Engine, slots: Slots) -> None:
        super().__init__(inner)
        self._slots = slots
        self._process = os.getpid()
        self._threads: CopyThreads | None = None
        self._jobs: dict[int, Extent] = {}
        self._cached_bytes = 0
        self._copies = inner.copies
        self._ahead = max(_SLOTS_AHEAD, -(-_AHEAD_BYTES * self._copies // len(slots.views[0])))
        self._closed = False

    @property
    def copies(self) -> int:
        """Extents that the page cache serves, to be given at once."""
        return self._ahead if self._copying else self._copies

    @property
    def copy_threads(self) -> int:
        """How many there are, once they have started."""
        return self._threads.count if self._threads is not None and self._copying else 0

    @property
    def copy_bytes(self) -> int:
        """The longest of them: all of a read, which the threads share."""
        return _WHOLE if self._copying else self._inner.copy_bytes

    @property
    def in_flight(self) -> int:
        """Extents begun and not yet collected."""
        return self._inner.in_flight + len(self._jobs)

    def begin(self, extents: Sequence[Extent]) -> None:
        """Give the threads what the page cache has, and the other engine the rest."""
        rest = [extent for extent in extents if not (extent.copies and self._copy(extent))]
        if rest:
            self._inner.begin(rest)

    def collect(self) -> list[tuple[Extent, int]]:
        """What either has completed."""
        completions = self._inner.collect()
        if self._jobs and self._threads is not None:
            for job, count in self._threads.collect():
                extent = self._jobs.pop(job)
                if count or self._closed:
                    completions.append((extent, count))
                else:
                    self._inner.begin([extent])
        return completions

    def close(self) -> None:
        """Wait for both, and close them. Idempotent; no-op in a forked child."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self._threads is not None:
            self._threads.close()
            self._threads.collect()
            self._jobs.clear()
        self._inner.close()

    @property
    def _copying(self) -> bool:
        return self._threads is not None and self._threads.ready

    def _copy(self, extent: Extent) -> bool:
        """Whether the threads take it."""
        nbytes = extent.expected - extent.done
        if self._threads is None:
            self._cached_bytes += nbytes
            if code_is_loaded() or self._cached_bytes >= _WORTH_IT_BYTES:
                self._threads = CopyThreads(self._copies, self.signal)
        if self._threads is None or not self._threads.room or nbytes <= 0:
            return False
        address = self._slots.addresses[extent.slot] + extent.position + extent.done
        job = self._threads.give(extent.file.descriptor, extent.offset + extent.done, address, nbytes)
        self._jobs[job] = extent
        return True
