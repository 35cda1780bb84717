"""A transport's way to the host tier: what it holds there, and the work that must not be done on the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import anyio
import anyio.to_thread
import numpy as np
import torch

from splitzip_aio.host_cache.cache import HostCache, HostHold

__all__ = ["HostTier"]

_COPIES_AT_ONCE = 4  # pinning a page and filling it takes longer than the kernel takes to read it from its cache

_Result = TypeVar("_Result")


class HostTier:
    """Brings extents from a host cache, and what is not there into it.

    Args:
        cache: maybe shared with other transports, in other event loops.
        table_bytes: bytes to keep behind an extent of so many, for the transport's arena.
        device: whose driver pins the memory.

    Attributes:
        hit_bytes: bytes that came from the cache.
    """

    def __init__(self, cache: HostCache, *, table_bytes: Callable[[int], int], device: torch.device) -> None:
        self.cache = cache
        self.hit_bytes = 0
        self._table_bytes = table_bytes
        self._device = device
        self._limiter = anyio.CapacityLimiter(_COPIES_AT_ONCE)
        self._holds: set[HostHold] = set()

    def find(self, key: Hashable, nbytes: int) -> HostHold | None:
        """A hold, to be released, on an extent of ``nbytes`` bytes; None if the cache does not have it."""
        hold = self.cache.find(key, nbytes)
        if hold is not None:
            self._own(hold)
            self.hit_bytes += nbytes
        return hold

    def at_hand(self, hold: HostHold, nbytes: int) -> bool:
        """Whether the room for a table behind the extent is the caller's from now on, and nothing else is to be done.

        If not, ``bring`` the extent.
        """
        return self.cache.swept and hold.claim(self._table_bytes(nbytes))

    async def bring(
        self, key: Hashable, payload: memoryview, hold: HostHold | None, read: Callable[[], Awaitable[None]]
    ) -> HostHold | None:
        """Bring an extent: one that was found by a ``hold``, else by ``read``, which fills ``payload``.

        Returns:
            A hold, to be released, on memory with the extent and room for a table; None if it is in ``payload``.
        """
        if not self.cache.swept:
            await self._in_thread(self.cache.sweep)
        if hold is None:
            await read()
            return await self._keep(key, payload)
        if hold.claim(self._table_bytes(len(payload))):
            return hold
        try:
            await self._in_thread(lambda: _copy(payload, hold.memory))
        finally:
            hold.release()
        return None

    def close(self) -> None:
        """Release every hold; for when all tasks that used one have ended, however they ended."""
        for hold in list(self._holds):
            hold.release()

    def _own(self, hold: HostHold) -> None:
        self._holds.add(hold)
        hold.on_release = self._holds.discard

    async def _keep(self, key: Hashable, payload: memoryview) -> HostHold | None:
        """Copy what was read into the cache, if it is worth keeping."""
        hold = self.cache.reserve(key, len(payload), table_bytes=self._table_bytes(len(payload)))
        if hold is None:
            return None
        self._own(hold)
        filled = False
        try:
            filled = await self._in_thread(lambda: hold.fill(payload))
        finally:
            if not filled:
                hold.release()
        return hold if filled else None

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        def run() -> _Result:
            with self._current_device():  # the current device is a thread's own
                return work()

        return await anyio.to_thread.run_sync(run, limiter=self._limiter)

    def _current_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _copy(payload: memoryview, memory: memoryview) -> None:
    np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(memory, np.uint8, count=len(payload)))
