"""The transport for code without an event loop: its own loop, in a thread of its own.

Work on a GPU stays where the caller put it: a layer is waited for, and given back, on the stream that is current in the
calling thread. Only what is to happen next crosses over to the loop, and nothing there waits for the caller.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar
from warnings import warn

import anyio
import torch

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.errors import ClosedError, SplitZipError
from splitzip_aio.telemetry import TransportStatistics
from splitzip_aio.transport import Lease, Transport, open_transport

__all__ = ["BlockingLease", "BlockingTransport", "PendingLease"]

_Result = TypeVar("_Result")


class BlockingTransport:
    """A transport that any thread may use, and that blocks it while it waits.

    ::

        with BlockingTransport("cache/", device="cuda") as transport:
            with transport.prefetch("blocks.0") as layer:
                use(layer.tensors)

    Takes the arguments of ``open_transport`` and raises what that raises. Close it, or leave its ``with`` block; at the
    end of the interpreter it closes itself.
    """

    def __init__(self, cache: str | PathLike[str] | SplitZipShardCache, **options: Any) -> None:
        self._loop = _Loop(cache, options)
        self._finalizer = weakref.finalize(self, self._loop.stop)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in execution order."""
        return self._loop.transport.layers

    @property
    def device(self) -> torch.device:
        """Where layers are decoded to."""
        return self._loop.transport.device

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._finalizer.alive

    def prefetch(self, layer: str) -> BlockingLease:
        """Bring a layer into the arena, and hold it there; see ``Transport.prefetch``, which says what this raises."""
        return self.begin(layer).wait()

    def begin(self, layer: str) -> PendingLease:
        """Ask for a layer without waiting for it.

        Raises:
            ClosedError: the transport is closed.
        """
        return PendingLease(self._loop, layer)

    def statistics(self) -> TransportStatistics:
        """A snapshot of what the transport is doing and has done.

        Raises:
            ClosedError: the transport is closed.
        """
        return self._loop.call(self._loop.transport.statistics)

    def close(self) -> None:
        """Close the transport, once what is in flight has landed; leases end. Idempotent.

        Raises:
            TransportError: streaming had broken down, and nobody has been told.
        """
        self._finalizer()
        if self._loop.failure is not None:
            failure, self._loop.failure = self._loop.failure, None
            raise failure

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
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is not None and finalizer.alive:
            warn("a blocking transport was never closed; use 'with'", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<BlockingTransport {'closed' if self.closed else f'{len(self.layers)} layers to {self.device}'}>"


class PendingLease:
    """A layer that was asked for. Either ``wait`` for it or ``cancel`` it."""

    def __init__(self, loop: _Loop, layer: str) -> None:
        self.layer = layer
        self._loop = loop
        self._outcome: Future[Lease] = Future()
        self._withdraw: Callable[[], None] | None = None
        loop.post(self._ask)

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._outcome.done()

    def wait(self) -> BlockingLease:
        """Wait until the layer is there; may be called once. Raises what ``Transport.prefetch`` raises."""
        try:
            return BlockingLease(self._outcome.result(), self._loop)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Want the layer no more. Idempotent; no-op after an error."""
        if self._outcome.cancel():
            self._loop.post_if_open(self._give_up)
        elif not self._outcome.cancelled() and self._outcome.exception() is None:
            BlockingLease(self._outcome.result(), self._loop).release()

    def _ask(self) -> None:
        if self._outcome.cancelled():
            return
        try:
            self._withdraw = self._loop.transport.ask(self.layer, self._answer)
        except SplitZipError as error:
            self._answer(error)

    def _answer(self, result: Lease | SplitZipError) -> None:
        wanted = self._outcome.set_running_or_notify_cancel()
        if isinstance(result, SplitZipError):
            if wanted:
                self._outcome.set_exception(result)
        elif wanted:
            self._outcome.set_result(result)
        else:
            result.release()

    def _give_up(self) -> None:
        if self._withdraw is not None:
            self._withdraw()


class BlockingLease:
    """A hold on a layer: ``Lease``, with ``with`` in place of ``async with``."""

    def __init__(self, lease: Lease, loop: _Loop) -> None:
        self._lease = lease
        self._loop = loop

    @property
    def layer(self) -> str:
        """The layer's name."""
        return self._lease.layer

    @property
    def released(self) -> bool:
        """Whether the tensors may have been overwritten: after ``release``, or once the transport is closed."""
        return self._lease.released

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The layer's tensors by name; see ``Lease.tensors``."""
        return self._lease.tensors

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each tensor begins in the layer; see ``Lease.offsets``."""
        return self._lease.offsets

    def copy_to(self, target: torch.Tensor, offset: int) -> None:
        """Copy bytes of the layer on the calling thread's current stream; see ``Lease.copy_to``."""
        self._lease.copy_to(target, offset)

    def wait(self) -> None:
        """Make the calling thread's current CUDA stream wait until the layer is decoded; the thread does not.

        Raises:
            LeaseReleasedError: the lease was released, or the transport closed.
        """
        self._lease.wait()

    def release(self) -> None:
        """Let the layer go, once the current stream's work so far is done. Idempotent; never waits."""
        self._loop.post_if_open(self._lease.begin_release())

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return repr(self._lease).replace("Lease", "BlockingLease", 1)


class _Loop:
    """The thread with the event loop, the transport in it, and what it is to do next.

    Calls are posted, and done one after another by the task that also holds the transport open: a task for each, as
    ``anyio.from_thread`` starts, takes longer than most of them, at the cost of the thread that posted it as well.
    """

    def __init__(self, cache: str | PathLike[str] | SplitZipShardCache, options: Mapping[str, Any]) -> None:
        self.failure: BaseException | None = None
        self._opened: Future[Transport] = Future()
        self._calls: deque[Callable[[], None]] = deque()
        self._posting = threading.Lock()
        self._woken = False
        self._over = False
        self._stopping = False
        # A daemon, since the interpreter joins all others before it lets anyone close anything.
        self._thread = threading.Thread(target=self._run, args=(cache, options), name="splitzip_aio", daemon=True)
        self._thread.start()
        self.transport = self._opened.result()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the loop, and wait for what it returns. Raises ClosedError where that is over."""
        outcome: Future[_Result] = Future()

        def answer() -> None:
            try:
                outcome.set_result(function())
            except Exception as exc:  # noqa: BLE001 - raised by whoever asked
                outcome.set_exception(exc)

        self.post(answer)
        return outcome.result()

    def post(self, call: Callable[[], None]) -> None:
        """Have a function called in the loop. Raises ClosedError where that is over."""
        with self._posting:
            if self._over or self._stopping:
                raise ClosedError("the transport is closed")
            self._calls.append(call)
            if not self._woken:  # else it has yet to look, and finds this as well; waking takes a system call
                self._woken = True
                self._wake()

    def post_if_open(self, call: Callable[[], None]) -> None:
        """Have a function called in the loop, unless that is over and there is nothing left to do for it."""
        with suppress(ClosedError):
            self.post(call)

    def stop(self) -> None:
        """Close the transport, and wait for the thread's end."""
        with self._posting:
            self._stopping = True
            if not self._over:
                self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wake(self) -> None:
        self._asyncio.call_soon_threadsafe(self._posted.set)

    def _run(self, cache: str | PathLike[str] | SplitZipShardCache, options: Mapping[str, Any]) -> None:
        try:
            anyio.run(self._serve, cache, options)
        except BaseException as exc:  # noqa: BLE001 - raised where the transport is opened or closed
            if self._opened.done():
                self.failure = exc
            else:
                self._opened.set_exception(exc)

    async def _serve(self, cache: str | PathLike[str] | SplitZipShardCache, options: Mapping[str, Any]) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._posted = asyncio.Event()
        try:
            async with open_transport(cache, **options) as transport:
                self._opened.set_result(transport)
                while not self._stopping:
                    await self._posted.wait()
                    self._posted.clear()
                    self._woken = False
                    self._do_calls()
        finally:
            with self._posting:
                self._over = True
            self._do_calls()  # those that come too late hear of it

    def _do_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()
