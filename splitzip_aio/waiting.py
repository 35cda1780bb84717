"""Waiting that cancellation does not cut short."""

from __future__ import annotations

import anyio

__all__ = ["wait_whatever_comes"]


async def wait_whatever_comes(event: anyio.Event) -> None:
    """Wait for an event, and let a cancellation through only then.

    asyncio's own ``Task.cancel`` reaches through the shield of an anyio scope, once for each call.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except anyio.get_cancelled_exc_class() as exc:
                cancelled = exc
    if cancelled is not None:
        raise cancelled
