"""Waiting: what cancellation does not cut short, and what would cost an event loop much if done the usual way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

__all__ = ["HasFileno", "call_when_readable", "finish_whatever_comes", "wait_whatever_comes"]


class HasFileno(Protocol):
    """Something with a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


async def wait_whatever_comes(event: anyio.Event) -> None:
    """Wait for an event, and let a cancellation through only then."""
    await finish_whatever_comes(event.wait)


async def finish_whatever_comes(wait: Callable[[], Awaitable[None]]) -> None:
    """Await what ``wait`` returns until it ends by itself, and let a cancellation through only then.

    asyncio's own ``Task.cancel`` reaches through the shield of an anyio scope, once for each call; then ``wait`` is
    called again.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while True:
            try:
                await wait()
                break
            except anyio.get_cancelled_exc_class() as exc:
                cancelled = exc
    if cancelled is not None:
        raise cancelled


async def call_when_readable(source: HasFileno, call: Callable[[], None], wanted: Callable[[], bool]) -> None:
    """Call ``call`` each time that ``source`` is readable, until ``wanted`` is false after one; raises what it raises.

    ``call`` may run outside of any task, and should do no more than collect what is there.

    The same as ``anyio.wait_readable`` in a loop. asyncio can watch a descriptor for as long as it takes, where that
    registers it anew and runs a task for each time, at ten times the cost.
    """
    if _in_asyncio():
        watch = _Watch(source, call, wanted)
        try:
            await watch.over
        finally:
            watch.end()
        return
    while True:
        await anyio.wait_readable(source)
        call()
        if not wanted():
            return


def _in_asyncio() -> bool:
    """Whether the caller is a task of asyncio; trio as its guest has none."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


class _Watch:
    """A descriptor that an asyncio loop watches until ``over`` is done."""

    def __init__(self, source: HasFileno, call: Callable[[], None], wanted: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = source.fileno()
        self._call = call
        self._wanted = wanted
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._readable)

    def end(self) -> None:
        """Watch no longer."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)

    def _readable(self) -> None:
        if self.over.done():  # and whoever waits for it has yet to wake
            return
        try:
            self._call()
            if not self._wanted():
                self.over.set_result(None)
        except BaseException as exc:  # noqa: BLE001 - raised where this is waited for
            self.over.set_exception(exc)
