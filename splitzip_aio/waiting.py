"""Waiting: what cancellation does not cut short, and what would cost an event loop much if done the usual way."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, Self

import anyio

__all__ = ["HasFileno", "Ticker", "Watch", "finish_whatever_comes", "wait_whatever_comes"]


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


class Watch:
    """A descriptor to wait for again and again, from the first time to the end of a ``with`` block, by one task.

    The same as ``anyio.wait_readable`` in a loop. asyncio can watch a descriptor for as long as it takes, where that
    registers it anew and runs a task for each time, at ten times the cost.
    """

    def __init__(self, source: HasFileno) -> None:
        self._source = source
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = -1
        self._over: asyncio.Future[None] | None = None
        self._call: Callable[[], object] = _nothing
        self._wanted: Callable[[], bool] = _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)

    async def call(self, call: Callable[[], None], wanted: Callable[[], bool]) -> None:
        """Call ``call`` each time that it is readable, until ``wanted`` is false after one; raises what it raises.

        ``call`` may run outside of any task, and should do no more than collect what is there.
        """
        if self._loop is None and _in_asyncio():
            self._loop = asyncio.get_running_loop()
            self._descriptor = self._source.fileno()
            self._loop.add_reader(self._descriptor, self._readable)
        if self._loop is not None:
            self._call, self._wanted, self._over = call, wanted, self._loop.create_future()
            try:
                await self._over
            finally:
                self._over = None
            return
        while True:
            await anyio.wait_readable(self._source)
            call()
            if not wanted():
                return

    def _readable(self) -> None:
        over = self._over
        if over is None or over.done():  # and whoever waits for it has yet to wake
            return
        try:
            self._call()
            if not self._wanted():
                over.set_result(None)
        except BaseException as exc:  # noqa: BLE001 - raised where this is waited for
            over.set_exception(exc)


def _in_asyncio() -> bool:
    """Whether the caller is a task of asyncio; trio as its guest has none."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _nothing() -> bool:
    return False


class Ticker:
    """A clock that ticks by a descriptor, for who has nothing better to wait for than the next look.

    An event loop's own timers are no finer than a millisecond, and each costs a task its turn. With
    ``Watch`` a tick costs a call, and a turn only if there is something to see.

    Args:
        every_s: seconds between ticks.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        """The timer's descriptor, readable once it has ticked."""
        return self._descriptor

    def start(self) -> None:
        """Tick from now on."""
        self._set(self._every_s)

    def stop(self) -> None:
        """Tick no longer."""
        self._set(0.0)

    def seen(self) -> None:
        """Take note of the ticks there were: readable again with the next."""
        with suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._finalizer()

    def _set(self, seconds: float) -> None:
        each = int(seconds * 1e9)
        interval_and_first = (ctypes.c_long * 4)(0, each, 0, each)  # struct itimerspec: twice seconds, nanoseconds
        self._libc.timerfd_settime(self._descriptor, 0, interval_and_first, None)
