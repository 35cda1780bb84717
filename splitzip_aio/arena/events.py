"""Waiting for CUDA events without a thread.

A thread that waits for an event has to get the interpreter's lock back before it can tell anyone, and every slot has
two events. Asking an event costs half a microsecond, so the event loop asks.
"""

from __future__ import annotations

from collections import deque

import anyio
import torch

__all__ = ["EventPoller"]

_INTERVAL_S = 0.0005
"""Less than a slot of 16 MiB takes on any link; asyncio makes a millisecond of it."""


class EventPoller:
    """Lets tasks wait for events: one of them asks for all, and hands that on when its own event has fired."""

    def __init__(self) -> None:
        self._led = False
        self._waiting: deque[tuple[torch.cuda.Event, anyio.Event]] = deque()

    async def reach(self, event: torch.cuda.Event) -> None:
        """Return once the device got to ``event``; whoever calls this shields it from cancellation."""
        while not event.query():
            if self._led:
                wake = anyio.Event()
                self._waiting.append((event, wake))
                await wake.wait()
            else:
                await self._lead(event)
        self._hand_over()

    async def _lead(self, event: torch.cuda.Event) -> None:
        self._led = True
        try:
            while not event.query():
                await anyio.sleep(_INTERVAL_S)
                self._wake_fired()
        finally:
            self._led = False

    def _hand_over(self) -> None:
        """Wake one that waits if nobody asks; it asks, or its event has fired and it wakes the next."""
        if not self._led and self._waiting:
            self._waiting.popleft()[1].set()

    def _wake_fired(self) -> None:
        for _ in range(len(self._waiting)):
            event, wake = self._waiting.popleft()
            if event.query():
                wake.set()
            else:
                self._waiting.append((event, wake))
