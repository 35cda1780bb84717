"""The memory of the host tier, and who uses it."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import TracebackType
from typing import Self
from warnings import warn

import numpy as np

from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.host_cache.headroom import Headroom, headroom
from splitzip_aio.host_cache.replacement import Replacement
from splitzip_aio.memory import map_anonymous, page_lock, page_unlock
from splitzip_aio.telemetry import HostCacheStatistics
from splitzip_aio.units import parse_bytes

__all__ = ["HostCache", "HostHold"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_RESERVE = 20  # this part of all memory is left alone: the tier shrinks to leave it, and grows only if twice it is left


class HostCache:
    """Compressed extents in memory, shared by the transports of one process that are given it.

    ::

        with HostCache("8GiB") as host:
            async with open_transport("cache/", host_cache=host) as transport:
                ...
            async with open_transport("cache/", host_cache=host) as transport:
                ...  # finds what the first one left

    Extents are found by the file they are of (device, inode, size, times) and their place in it, so transports share
    them as far as they cut reads alike: with equal ``ring_bytes`` and ``layer_of``, on one kind of device.

    An extent's bytes are written once, before anyone can find it, and it does not go while anyone holds it. Its
    checksums are verified each time it is decoded; one that is found to be wrong is dropped, and read anew.

    It takes memory as extents come in. Four times a second, at most, it looks at what is left (``MemAvailable``, and
    the limits of control groups). Where that is less than a twentieth of all memory, it gives back what was not asked
    for the longest, until a twentieth is free; it grows only while a tenth is.

    May be used from several threads. Close it, or leave its ``with`` block, after the transports that use it.

    Args:
        capacity_bytes: how much memory to use at most, room for decode tables included.
        pinned: page-lock the memory, so that a GPU copies from it at full speed; by default if there is a GPU. Where
            CUDA refuses, the tier works without, says so in the log once, and in its statistics.

    Raises:
        InvalidArgumentError: the capacity is no positive size.
    """

    def __init__(self, capacity_bytes: int | str, *, pinned: bool | None = None) -> None:
        capacity = parse_bytes(capacity_bytes, name="host_cache_bytes")
        if not capacity:
            raise InvalidArgumentError("host_cache_bytes: a host cache needs more than no bytes")
        self._replacement = Replacement(capacity)
        self._pinned = _cuda_available() if pinned is None else pinned
        self._fallback: str | None = None
        self._lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}
        self._doomed: list[_Entry] = []  # nobody finds or holds them; still in memory
        self._bytes = 0
        self._closed = False
        self._look_at_s = 0.0
        self._left = Headroom(0, 0)
        self._hits = self._misses = self._admissions = self._evictions = self._shrunk = 0

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def swept(self) -> bool:
        """Whether nothing waits for ``sweep``."""
        return not self._doomed

    def find(self, key: Hashable, nbytes: int) -> HostHold | None:
        """Hold the extent of this key, of ``nbytes`` bytes, if it is here; counts as a hit or a miss."""
        with self._lock:
            self._look()
            self._replacement.ask(key, nbytes)
            entry = self._entries.get(key)
            if entry is None or not entry.filled or entry.spoilt:
                self._misses += 1
                return None
            self._hits += 1
            entry.holds += 1
            return HostHold(self, entry)

    def reserve(self, key: Hashable, nbytes: int, *, table_bytes: int) -> HostHold | None:
        """Room for an extent that was just not found, to be filled; None if it is not worth keeping.

        Args:
            key: what to find it by.
            nbytes: how long it is.
            table_bytes: room to keep behind it for a decode table.
        """
        size = -(-(nbytes + table_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._closed or key in self._entries:
                return None
            growth = max(0, self._left.available_bytes - 2 * self._reserve_bytes)
            limit = self._replacement.used_bytes + growth
            victims = self._replacement.admit(key, size, idle=self._idle, limit_bytes=limit)
            if victims is None:
                return None
            for victim in victims:
                self._evict(victim)
            entry = self._entries[key] = _Entry(key, nbytes, size)
            entry.holds = 1
            self._admissions += 1
            if not victims:
                self._left = Headroom(self._left.available_bytes - size, self._left.total_bytes)
            return HostHold(self, entry, claimed=True)

    def extents(self) -> list[memoryview]:
        """The bytes of every extent, the oldest first. For measurements, while nothing is evicted."""
        with self._lock:
            memories = [(entry.memory, entry.nbytes) for entry in self._entries.values() if entry.filled]
        return [memory[:nbytes] for memory, nbytes in memories if memory is not None]

    def sweep(self) -> None:
        """Give back the memory of what was evicted. Takes milliseconds, so it is for a worker thread."""
        with self._sweeping:
            with self._lock:
                doomed, self._doomed = self._doomed, []
            for entry in doomed:
                entry.free()
                with self._lock:
                    self._bytes -= entry.size

    def statistics(self) -> HostCacheStatistics:
        """A snapshot of contents and counters."""
        with self._lock:
            return HostCacheStatistics(
                capacity_bytes=self._replacement.capacity_bytes,
                bytes=self._bytes,
                entries=sum(entry.filled for entry in self._entries.values()),
                held=sum(entry.holds > 0 for entry in self._entries.values()),
                pinned=self._pinned and self._fallback is None,
                fallback=self._fallback,
                hits=self._hits,
                misses=self._misses,
                admissions=self._admissions,
                evictions=self._evictions,
                shrunk=self._shrunk,
            )

    def close(self) -> None:
        """Give back all memory; that of extents which are held, when they are let go. Idempotent."""
        with self._lock:
            self._closed = True
            for entry in list(self._entries.values()):
                if not entry.holds:
                    self._drop(entry)
        self.sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warn("a host cache was never closed; use 'with'", ResourceWarning, source=self, stacklevel=2)
            self.close()

    @property
    def _reserve_bytes(self) -> int:
        return self._left.total_bytes // _RESERVE

    def _look(self) -> None:
        """See how much memory is left, and shrink if that is too little."""
        now = time.monotonic()
        if now < self._look_at_s:
            return
        self._look_at_s = now + _LOOK_EVERY_S
        self._left = headroom()
        missing = self._reserve_bytes - self._left.available_bytes - sum(entry.size for entry in self._doomed)
        for key in self._replacement.coldest():
            if missing <= 0:
                return
            if self._idle(key):
                missing -= self._replacement.remove(key)
                self._evict(key)
                self._shrunk += 1

    def _idle(self, key: Hashable) -> bool:
        return not self._entries[key].holds

    def _evict(self, key: Hashable) -> None:
        """Take out what the policy has let go already."""
        self._doomed.append(self._entries.pop(key))
        self._evictions += 1

    def _drop(self, entry: _Entry) -> None:
        """Take out what the policy would keep."""
        del self._entries[entry.key]
        self._replacement.remove(entry.key)
        if entry.memory is not None:
            self._doomed.append(entry)

    def _fill(self, entry: _Entry, payload: memoryview) -> bool:
        self.sweep()  # what this takes the place of
        with self._lock:
            self._replacement.settle(entry.key, entry.size)
        try:
            entry.map()
        except InvalidArgumentError as exc:
            logger.warning("an extent of %d bytes is not kept: %s", entry.nbytes, exc)
            return False
        with self._lock:
            self._bytes += entry.size
        if self._pinned and self._fallback is None:
            self._note(entry.lock())
        entry.write(payload)
        entry.filled = True
        return True

    def _note(self, refusal: str | None) -> None:
        if refusal is not None and self._fallback is None:
            self._fallback = refusal
            logger.warning("the host cache is not pinned, so copies are slower: %s", refusal)

    def _let_go(self, entry: _Entry, *, claimed: bool) -> None:
        with self._lock:
            entry.holds -= 1
            entry.claimed = entry.claimed and not claimed
            if not entry.holds and (self._closed or entry.spoilt or not entry.filled):
                self._drop(entry)
        if self._closed:
            self.sweep()

    def _spoil(self, entry: _Entry) -> None:
        with self._lock:
            entry.spoilt = True
            if not entry.holds and self._entries.get(entry.key) is entry:
                self._drop(entry)


class HostHold:
    """A hold on an extent, which stays where it is until ``release``.

    Attributes:
        on_release: called with the hold when it is released.
    """

    __slots__ = ("_cache", "_claimed", "_entry", "_released", "on_release")

    def __init__(self, cache: HostCache, entry: _Entry, *, claimed: bool = False) -> None:
        self._cache = cache
        self._entry = entry
        self._claimed = claimed
        self._released = False
        self.on_release: Callable[[HostHold], None] | None = None

    @property
    def memory(self) -> memoryview:
        """The extent, and the room behind it, which belongs to whoever ``claim`` lets have it."""
        assert self._entry.memory is not None
        return self._entry.memory

    def claim(self, table_bytes: int) -> bool:
        """Take the room behind the extent for a decode table; False if another hold has it, or it is too small."""
        with self._cache._lock:
            if self._entry.claimed or self._entry.size < self._entry.nbytes + table_bytes:
                return False
            self._claimed = self._entry.claimed = True
            return True

    def fill(self, payload: memoryview) -> bool:
        """Copy the extent in, after which others find it; False if there is no memory. For a worker thread."""
        return self._cache._fill(self._entry, payload)

    def spoil(self) -> None:
        """The extent turned out to be wrong: nobody is to find it again. May be called after ``release``."""
        self._cache._spoil(self._entry)

    def release(self) -> None:
        """Let the extent go. Idempotent."""
        if not self._released:
            self._released = True
            if self.on_release is not None:
                self.on_release(self)
            self._cache._let_go(self._entry, claimed=self._claimed)


class _Entry:
    """An extent and its memory.

    ``holds`` counts who uses it, ``claimed`` says that one of them has the room behind it, ``filled`` that it can be
    found, ``spoilt`` that it no longer can.
    """

    __slots__ = ("claimed", "filled", "holds", "key", "locked", "mapping", "memory", "nbytes", "size", "spoilt")

    def __init__(self, key: Hashable, nbytes: int, size: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.size = size
        self.holds = 0
        self.claimed = True  # by who fills it
        self.filled = self.spoilt = self.locked = False
        self.mapping: mmap.mmap | None = None
        self.memory: memoryview | None = None

    def map(self) -> None:
        self.mapping = map_anonymous(self.size, option="host_cache_bytes")
        self.memory = memoryview(self.mapping)

    def lock(self) -> str | None:
        """Page-lock the memory; why not, if CUDA refuses."""
        assert self.memory is not None
        refusal = page_lock(self.memory)
        self.locked = refusal is None
        return refusal

    def write(self, payload: memoryview) -> None:
        """Copy the extent in; numpy does it without the GIL."""
        assert self.memory is not None
        np.copyto(np.frombuffer(self.memory, np.uint8, count=self.nbytes), np.frombuffer(payload, np.uint8))

    def free(self) -> None:
        assert self.memory is not None
        assert self.mapping is not None
        if self.locked:
            page_unlock(self.memory)
        with suppress(BufferError):  # someone still looks at it: unmapped with the last view
            self.memory.release()
            self.mapping.close()


def _cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()
