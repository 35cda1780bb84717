"""I/O back ends behind one surface: io_uring where the kernel lets us, worker threads everywhere else."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from splitzip_aio.abc import ReadDriver
from splitzip_aio.drivers.completion import CompletionDriver
from splitzip_aio.drivers.copying import CopyingEngine
from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.operation import Slots
from splitzip_aio.drivers.threads import ThreadsEngine
from splitzip_aio.errors import DriverUnavailableError, InvalidArgumentError

__all__ = ["DriverFactory", "DriverName", "open_driver"]

DriverName: TypeAlias = Literal["auto", "uring", "threads"]
DriverFactory: TypeAlias = Callable[[Sequence[memoryview]], ReadDriver]
"""Makes a driver of one's own that reads into the slots it is given; a transport takes one in place of a name."""

MAX_QUEUE_DEPTH = 4096
QUEUE_DEPTH = 16
# With 16 in flight, as fast from the page cache as any size from 1 to 4 MiB and any depth to 64 (16 cores); and the
# event loop has the fewest of them to look after.
CHUNK_BYTES = 4 << 20

logger = logging.getLogger(__name__)


def open_driver(
    driver: DriverName = "auto",
    *,
    buffers: Sequence[memoryview],
    queue_depth: int = QUEUE_DEPTH,
) -> ReadDriver:
    """Make a driver that reads into ``buffers``.

    ``"auto"`` takes the first rung that works here: io_uring with the buffers registered, io_uring without,
    threads. What was passed over, and why, is logged once and kept in ``statistics().fallbacks``.

    Args:
        driver: ``"auto"``, ``"uring"`` or ``"threads"``.
        buffers: the staging slots: writable, contiguous, and page-aligned if files are to be read directly.
            The driver keeps them alive until it is closed.
        queue_depth: chunks (of at most 4 MiB) that the kernel is given at once.

    Raises:
        DriverUnavailableError: ``"uring"`` was asked for and cannot run here.
        InvalidArgumentError: an unknown name, no buffers or unsuitable ones, or a depth outside [1, 4096].
    """
    return make_driver(driver, buffers, queue_depth)


def make_driver(
    driver: DriverName,
    buffers: Sequence[memoryview],
    queue_depth: int,
    *,
    registering: Callable[[], None] | None = None,
    interpose: Callable[[Engine, Slots], Engine] | None = None,
) -> ReadDriver:
    """What ``open_driver`` does, with two places for faults to come in.

    Args:
        driver: as for ``open_driver``.
        buffers: as for ``open_driver``.
        queue_depth: as for ``open_driver``.
        registering: called before the buffers are registered; an OSError that it raises is taken for the kernel's.
        interpose: what to put between the driver and its engine.
    """
    if driver not in {"auto", "uring", "threads"}:
        raise InvalidArgumentError(f"driver: expected auto, uring or threads, found {driver!r}")
    if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
        raise InvalidArgumentError(f"queue_depth: expected 1 to {MAX_QUEUE_DEPTH}, found {queue_depth}")
    if not buffers:
        raise InvalidArgumentError("buffers: a driver needs at least one")
    views = tuple(_bytes_view(buffer, index) for index, buffer in enumerate(buffers))
    slots = Slots(views, tuple(_address(view) for view in views))
    engine, fallbacks = _make_engine(driver, slots, queue_depth, registering)
    for reason in fallbacks:
        logger.warning("%s driver: fell back, %s", engine.name, reason)
    engine = CopyingEngine(engine, slots)
    if interpose is not None:
        engine = interpose(engine, slots)
    return CompletionDriver(engine, slots, queue_depth=queue_depth, chunk_bytes=CHUNK_BYTES, fallbacks=fallbacks)


def _make_engine(
    driver: DriverName, slots: Slots, queue_depth: int, registering: Callable[[], None] | None
) -> tuple[Engine, tuple[str, ...]]:
    if driver == "threads":
        return ThreadsEngine(slots, queue_depth), ()
    try:
        return _uring_engine(slots, queue_depth, registering)
    except DriverUnavailableError as exc:
        if driver == "uring":
            raise
        return ThreadsEngine(slots, queue_depth), (f"uring: {exc}",)


def _uring_engine(
    slots: Slots, queue_depth: int, registering: Callable[[], None] | None
) -> tuple[Engine, tuple[str, ...]]:
    from splitzip_aio.drivers.uring import UringEngine

    engine = UringEngine(slots, queue_depth, registering=registering)
    logger.debug("uring driver: io_uring through %s (%s)", engine.binding, engine.binding_reason)
    return engine, tuple(engine.refusals)


def _bytes_view(buffer: memoryview, index: int) -> memoryview:
    try:
        view = memoryview(buffer).cast("B")
    except TypeError as exc:
        raise InvalidArgumentError(f"buffers[{index}]: expected contiguous memory: {exc}") from exc
    if view.readonly or not len(view):
        raise InvalidArgumentError(f"buffers[{index}]: expected writable memory of at least a byte")
    return view


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
