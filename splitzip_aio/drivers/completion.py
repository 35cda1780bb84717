"""The asynchronous half of every driver: who waits, who reaps, and what cancellation may not do."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from anyio import CancelScope, Event, get_cancelled_exc_class, move_on_after, wait_readable
from anyio.lowlevel import checkpoint_if_cancelled, current_token

from splitzip_aio.abc import DriverStatistics, FileHandle, IOMode, ReadDriver
from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.files import OpenFile, open_file
from splitzip_aio.drivers.operation import Extent, Operation, Outcome, Slots, Until, check_range, split
from splitzip_aio.errors import ClosedError, InvalidArgumentError, ReadError, SplitZipError, WrongEventLoopError
from splitzip_aio.waiting import Watch

__all__ = ["CompletionDriver"]

SUBMIT_AGAIN_S = 0.01


class CompletionDriver(ReadDriver):
    """A driver made of an ``Engine``: one event loop, no background task.

    **Who reaps.** There is nothing to do for a driver while nobody waits for a read, so nobody else is
    employed to do it. Of the tasks in ``read``, one leads: it waits for the engine's descriptor, settles
    all completions, wakes whoever they belong to, and submits what was queued behind them. When its own read
    is done it hands the lead to one that still waits. A background task would need a task group, and hence an
    ``async with`` around the driver's whole life in one task; leading needs none.

    Reads that no task waits for are reaped by whoever awaits ``reap``, or by the others on the way.

    **Backpressure.** At most ``queue_depth`` extents are the kernel's. The others queue here and cost no more
    than their place in a deque; a caller waits for its extents, however many are before it. There are two such
    deques: a demand for what is needed now must not wait behind all that is read ahead, so urgent extents go
    first, and among themselves in order. What the kernel already has is not overtaken.

    Of reads that the page cache serves, which are copies, the engine says how many it is given at a time, and how long.

    **Cancellation.** A buffer is the kernel's until its completion arrived: a read of a regular file that the
    kernel has begun cannot be called back, it will write into the buffer in a moment. If ``read`` raised at
    once when cancelled, the caller would give that buffer to someone else and their bytes would be overwritten
    by ours. So a cancelled read withdraws what is still queued, waits for what was begun, shielded, and only
    then lets the cancellation through. That takes the few milliseconds of a disk read. Asking the kernel to
    cancel would not shorten it: it only drops requests that no worker and no device has taken up.
    The wait is a loop since asyncio's own ``Task.cancel`` (``asyncio.timeout``, ``wait_for``) reaches through
    the shield of an anyio scope. Only a coroutine torn down with its event loop leaves early; its extents then
    remain the engine's, which keeps the memory alive until it has seen them complete.
    """

    def __init__(
        self,
        engine: Engine,
        slots: Slots,
        *,
        queue_depth: int,
        chunk_bytes: int,
        fallbacks: tuple[str, ...],
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._depth = queue_depth
        self._chunk_bytes = chunk_bytes
        self._fallbacks = fallbacks
        self._files: set[OpenFile] = set()
        self._urgent: deque[Extent] = deque()
        self._queue: deque[Extent] = deque()
        self._operations: dict[Operation, None] = {}
        self._finished: deque[Operation] = deque()
        self._led = False
        self._closed = False
        self._submitted = 0
        self._copying = 0
        self._patient: list[Until] = []
        self._token: object = None
        self._process = os.getpid()
        self._outcome = Outcome()
        self._reads = self._bytes_read = self._direct_bytes_read = 0
        self._finalizer = weakref.finalize(self, _abandon, engine, self._files)

    @property
    def name(self) -> str:
        """Which back end this is: ``"uring"`` or ``"threads"``."""
        return self._engine.name

    @property
    def may_be_bypassed(self) -> bool:
        """Whether extents may be decoded without a read; see ``ReadDriver.may_be_bypassed``."""
        return self._engine.may_be_bypassed

    @property
    def buffers(self) -> Sequence[memoryview]:
        """The slots, as writable memoryviews of bytes."""
        return self._slots.views

    def open(self, path: str | os.PathLike[str], *, io: IOMode = "auto") -> FileHandle:
        """Open a regular file for reading; see ``ReadDriver.open``."""
        self._check_usable()
        file = open_file(path, io)
        # Bound to the set and the engine, not to the driver: an extent in flight must not keep the driver alive.
        file.on_release = partial(_forget, self._files, self._engine)
        self._files.add(file)
        try:
            self._engine.adopt(file)
        except ReadError:
            file.release()
            raise
        return file

    async def read(
        self, file: FileHandle, slot: int, buffer_offset: int, *, offset: int, nbytes: int, urgent: bool = False
    ) -> int:
        """Read an extent of a file into a slot; see ``ReadDriver.read``."""
        self._check_usable()
        self._check_loop()
        opened = self._check_file(file)
        check_range(opened, self._slots, slot, buffer_offset, offset, nbytes)
        await checkpoint_if_cancelled()
        operation = Operation(opened, urgent=urgent)
        extents = self._split(operation, slot, buffer_offset, offset, nbytes)
        await self._perform(operation, extents)
        if operation.failure is not None:
            raise operation.failure
        return self._count(opened, extents)

    def submit(
        self,
        file: FileHandle,
        slot: int,
        buffer_offset: int,
        *,
        offset: int,
        nbytes: int,
        urgent: bool,
        done: Callable[[int | SplitZipError], None],
    ) -> None:
        """Read an extent of a file into a slot, and call ``done``; see ``ReadDriver.submit``."""
        self._check_usable()
        self._check_loop()
        opened = self._check_file(file)
        check_range(opened, self._slots, slot, buffer_offset, offset, nbytes)
        operation = Operation(opened, urgent=urgent)
        extents = self._split(operation, slot, buffer_offset, offset, nbytes)
        operation.call = partial(self._finish, operation, extents, done)
        self._submitted += 1
        self._enqueue(operation, extents)
        try:
            self._pump()
        except SplitZipError as exc:
            operation.withdraw(exc)
        operation.wake()  # it may be done: there was nothing to read

    async def reap(self) -> None:
        """Return once no read that was given to ``submit`` is under way; see ``ReadDriver.reap``."""
        await self._wait_until(lambda: not self._submitted)

    def statistics(self) -> DriverStatistics:
        """A snapshot of the counters."""
        return DriverStatistics(
            name=self._engine.name,
            binding=self._engine.binding,
            binding_reason=self._engine.binding_reason,
            fixed_buffers=self._engine.fixed_buffers,
            copy_threads=self._engine.copy_threads,
            queue_depth=self._depth,
            fallbacks=self._fallbacks,
            reads=self._reads,
            bytes_read=self._bytes_read,
            direct_bytes_read=self._direct_bytes_read,
            short_reads=self._outcome.short_reads,
            retries=self._outcome.retries,
            in_flight=self._engine.in_flight,
            queued=sum(operation.queued for operation in self._operations),
            open_files=sum(not file.closed for file in self._files),
        )

    async def aclose(self) -> None:
        """Close files and driver once nothing is in flight; queued reads get ClosedError. Idempotent."""
        self._closed = True
        for operation in list(self._operations):
            operation.withdraw(ClosedError("the driver was closed before this read began"))
            operation.wake()
        cancelled: BaseException | None = None
        with CancelScope(shield=True):
            while self._operations:
                try:
                    await self._wait_until(lambda: not self._operations)
                except get_cancelled_exc_class() as exc:
                    cancelled = exc
        self._finalizer.detach()
        _free(self._engine, self._files)
        self._slots.release()
        if cancelled is not None:
            raise cancelled

    async def _perform(self, operation: Operation, extents: list[Extent]) -> None:
        """Return when the operation is done; raise only when nothing of it is the kernel's any more."""
        self._enqueue(operation, extents)
        try:
            self._pump()
            await self._wait(operation)
        except BaseException as exc:
            operation.withdraw()
            if _torn_down(exc):
                raise GeneratorExit from exc
            await self._wait_out(operation)
            raise
        finally:
            del self._operations[operation]
            if operation.done:
                operation.file.unpin()
            self._hand_over()

    def _split(self, operation: Operation, slot: int, position: int, offset: int, nbytes: int) -> list[Extent]:
        """Cut a read into what the engine is given at a time."""
        chunk_bytes = self._engine.copy_bytes if operation.file.cached else self._chunk_bytes
        return split(operation, slot=slot, position=position, offset=offset, nbytes=nbytes, chunk_bytes=chunk_bytes)

    def _enqueue(self, operation: Operation, extents: list[Extent]) -> None:
        self._operations[operation] = None
        operation.file.pin()
        (self._urgent if operation.urgent else self._queue).extend(extents)

    def _finish(self, operation: Operation, extents: list[Extent], done: Callable[[int | SplitZipError], None]) -> None:
        """The end of an operation that no task waits for."""
        del self._operations[operation]
        operation.file.unpin()
        self._submitted -= 1
        self._wake_patient()
        if operation.failure is not None:
            done(operation.failure)
        else:
            done(self._count(operation.file, extents))

    def _count(self, file: OpenFile, extents: list[Extent]) -> int:
        """Bytes that a successful operation read, added to the counters."""
        count = sum(extent.done for extent in extents)
        self._reads += 1
        self._bytes_read += count
        self._direct_bytes_read += count if file.direct else 0
        return count

    async def _wait_until(self, over: Callable[[], bool]) -> None:
        """Wait for something other than an operation of one's own, and reap meanwhile."""
        waiter = Until(over)
        self._patient.append(waiter)
        try:
            await self._wait(waiter)
        finally:
            self._patient.remove(waiter)
            self._hand_over()

    def _wake_patient(self) -> None:
        for waiter in self._patient:
            if waiter.done:
                waiter.wake()

    async def _wait_out(self, operation: Operation) -> None:
        with CancelScope(shield=True):
            while not operation.done:
                try:
                    await self._wait(operation)
                except get_cancelled_exc_class():
                    continue

    async def _wait(self, waiter: Operation | Until) -> None:
        while not waiter.done:
            if self._led:
                waiter.wakeup = Event()
                await waiter.wakeup.wait()
            else:
                await self._lead(waiter)

    async def _lead(self, waiter: Operation | Until) -> None:
        self._led = True
        try:
            self._tell_finished()  # whoever led before may have been cancelled
            while not waiter.done:
                with Watch(self._engine) as watch:
                    while not waiter.done and self._engine.flush():
                        await watch.call(self._settle, lambda: self._goes_on(waiter))
                        self._tell_finished()
                if not waiter.done:  # the kernel takes no more for the moment
                    with move_on_after(SUBMIT_AGAIN_S):
                        await wait_readable(self._engine)
                    self._settle()
                    self._tell_finished()
        finally:
            self._led = False

    def _goes_on(self, waiter: Operation | Until) -> bool:
        """Whether the leader has to wait for the engine's descriptor, and has nothing else to do."""
        return not waiter.done and not self._finished and self._engine.flush()

    def _tell_finished(self) -> None:
        """Make the calls for operations that no task waits for: here, in a task, whatever they do."""
        while self._finished:
            self._finished.popleft().wake()

    def _hand_over(self) -> None:
        """Wake one that waits if none leads, and those who have waited long enough."""
        self._wake_patient()
        if not self._led:
            waiters: list[Operation | Until] = [*self._patient, *self._operations]
            for waiter in waiters:
                if waiter.wakeup is not None and not waiter.done:
                    waiter.wakeup.set()
                    return

    def _settle(self) -> None:
        for extent, result in self._engine.collect():
            operation = extent.operation
            operation.active -= 1
            self._copying -= extent.copies
            if extent.settle(result, self._outcome) and not operation.withdrawn:
                operation.queued += 1
                (self._urgent if operation.urgent else self._queue).appendleft(extent)
            if operation.done and operation.call is not None:
                self._finished.append(operation)
            elif operation.done:
                operation.wake()
        self._pump()

    def _pump(self) -> None:
        """Begin as many queued extents as there is room for: urgent ones first, then the oldest."""
        batch: list[Extent] = []
        room = self._depth - self._engine.in_flight
        while (queue := self._urgent or self._queue) and len(batch) < room:
            extent = queue[0]
            wanted, copies = not extent.operation.withdrawn, extent.file.cached
            if wanted and copies and self._copying >= self._engine.copies:
                break
            queue.popleft()
            if wanted:
                extent.copies = copies
                self._copying += copies
                extent.operation.queued -= 1
                extent.operation.active += 1
                batch.append(extent)
        if batch:
            self._engine.begin(batch)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self.name} driver is closed")
        if os.getpid() != self._process:
            raise WrongEventLoopError(
                f"the {self.name} driver was opened in process {self._process} and cannot be used in its "
                f"child {os.getpid()}; open another one there"
            )

    def _check_loop(self) -> None:
        token = current_token()
        if self._token is None:
            self._token = token
        elif self._token != token:
            raise WrongEventLoopError(
                f"the {self.name} driver belongs to the event loop of its first read; open one for each loop"
            )

    def _check_file(self, file: FileHandle) -> OpenFile:
        if file.closed:
            raise ClosedError(f"{file.path}: read from a closed file")
        if not isinstance(file, OpenFile) or file not in self._files:
            raise InvalidArgumentError(f"{file.path}: opened by another driver")
        return file


def _torn_down(exc: BaseException | None) -> bool:
    """Whether a coroutine is being closed, maybe with a complaint of its dead event loop on top."""
    while exc is not None:
        if isinstance(exc, GeneratorExit):
            return True
        exc = exc.__context__
    return False


def _forget(files: set[OpenFile], engine: Engine, file: OpenFile) -> None:
    files.discard(file)
    engine.disown(file)


def _free(engine: Engine, files: set[OpenFile]) -> None:
    """Wait for the kernel, then let go of everything: the order in which no buffer is written to after."""
    engine.close()
    for file in list(files):
        file.release()


def _abandon(engine: Engine, files: set[OpenFile]) -> None:
    """What is left to do for a driver that was dropped, or whose event loop died, with reads in flight."""
    warnings.warn(f"a {engine.name} driver was never closed; use 'async with'", ResourceWarning, stacklevel=2)
    _free(engine, files)
