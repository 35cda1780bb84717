"""The engine of a driver with faults: what another engine completes, but not quite."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.faults import FaultKind, FaultSchedule
from splitzip_aio.drivers.files import OpenFile
from splitzip_aio.drivers.operation import Extent, Slots
from splitzip_aio.drivers.surrounding import SurroundingEngine

__all__ = ["FaultyEngine"]

SECTOR_BYTES = 512
POISON = 0xA5
LOOK_AGAIN_S = 0.001

_REFUSALS: Mapping[FaultKind, int] = MappingProxyType(
    {
        FaultKind.EINTR: errno.EINTR,
        FaultKind.EAGAIN: errno.EAGAIN,
        FaultKind.EIO: errno.EIO,
        FaultKind.EINVAL_DIRECT: errno.EINVAL,
    }
)
_SHORTENED: Mapping[FaultKind, Callable[[int], int]] = MappingProxyType(
    {
        FaultKind.SHORT_BYTE: lambda nbytes: 1,
        FaultKind.SHORT_SECTOR: lambda nbytes: SECTOR_BYTES,
        FaultKind.SHORT_BY_ONE: lambda nbytes: nbytes - 1,
    }
)


@dataclass(slots=True)
class _Held:
    """A completion kept back, with the bytes it will bring; from ``due`` on it is looked at again."""

    kind: FaultKind
    extent: Extent
    data: bytes
    due: float
    until: float
    seen_withdrawn: bool = False


class FaultyEngine(SurroundingEngine):
    """Lets another engine do the work, and meddles with what it has done.

    The other engine's reads are real and whole. A fault is applied when they complete, to the result and to the
    memory, and before the driver sees either: bytes that a short or failed read would not have brought are
    overwritten, and bytes of a completion that is kept back are taken away and come with it. So whoever uses memory
    too early, or believes more than it was told, has wrong bytes.
    """

    def __init__(self, inner: Engine, slots: Slots, schedule: FaultSchedule) -> None:
        super().__init__(inner)
        self._slots = slots
        self._schedule = schedule
        self._process = os.getpid()
        self._held: list[_Held] = []
        self._read_directly: set[OpenFile] = set()
        self._alarm = _Alarm()
        # Readable whenever one of the two is; an event loop can wait for it like for any other descriptor.
        self._either = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._either.register(inner.fileno(), select.EPOLLIN)
        self._either.register(self._alarm.fileno(), select.EPOLLIN)
        self._closed = False
        self.name = f"{inner.name} with faults"
        self.may_be_bypassed = False  # what is not read does not fail

    @property
    def in_flight(self) -> int:
        """Extents begun and not yet collected."""
        return self._inner.in_flight + len(self._held)

    def fileno(self) -> int:
        """Readable when the other engine's is, or a completion need not be kept back any longer."""
        return self._either.fileno()

    def disown(self, file: OpenFile) -> None:
        """Forget that it was read directly, too."""
        self._read_directly.discard(file)
        super().disown(file)

    def collect(self) -> list[tuple[Extent, int]]:
        """What the other engine completed and was not kept back, with its faults, and what was kept long enough."""
        self._alarm.acknowledge()
        overtaken = [held for held in self._held if held.kind is FaultKind.REORDER]
        completions = [(extent, self._strike(extent, result)) for extent, result in self._inner.collect()]
        passed = [(extent, result) for extent, result in completions if result is not None]
        if passed:
            for held in overtaken:
                held.due = 0.0
        passed += [(held.extent, self._restore(held)) for held in self._take_due()]
        self._alarm.set(min((held.due for held in self._held), default=None))
        return passed

    def close(self) -> None:
        """Close the other engine, then what was added to it. Idempotent; no-op in a forked child."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._inner.close()
        self._held.clear()
        self._either.close()
        self._alarm.close()

    def _strike(self, extent: Extent, result: int) -> int | None:
        """What the driver is to be told instead of ``result``; None if nothing yet."""
        if result <= 0:  # failed, or at the end of the file, by itself
            return result
        kind, chance = self._draw(extent)
        if kind is None:
            return result
        if kind in _REFUSALS:
            self._poison(extent, 0, result)
            return self._counted(kind, -_REFUSALS[kind])
        if kind in _SHORTENED:
            count = _SHORTENED[kind](result)
            if not 0 < count < result:
                return result
            self._poison(extent, count, result)
            return self._counted(kind, count)
        if kind is FaultKind.BIT_FLIP:
            self._memory(extent, result)[chance.randrange(result)] ^= 1 << chance.randrange(8)
            return self._counted(kind, result)
        self._hold(kind, extent, result, chance)
        return None

    def _draw(self, extent: Extent) -> tuple[FaultKind | None, random.Random]:
        file = extent.file
        name = Path(file.path).name
        kind, chance = self._schedule.for_read(name, extent.offset)
        if file.direct and file not in self._read_directly:
            self._read_directly.add(file)
            if self._schedule.once(FaultKind.EINVAL_DIRECT, name):
                return FaultKind.EINVAL_DIRECT, chance
        return kind, chance

    def _counted(self, kind: FaultKind, result: int) -> int:
        self._schedule.count(kind)
        return result

    def _memory(self, extent: Extent, nbytes: int) -> memoryview:
        """Where the ``nbytes`` bytes are that a read of the rest of ``extent`` brought."""
        start = extent.position + extent.done
        return self._slots.views[extent.slot][start : start + nbytes]

    def _poison(self, extent: Extent, start: int, stop: int) -> None:
        self._memory(extent, stop)[start:] = bytes([POISON]) * (stop - start)

    def _hold(self, kind: FaultKind, extent: Extent, nbytes: int, chance: random.Random) -> None:
        self._schedule.count(kind)
        now = time.monotonic()
        if kind is FaultKind.AFTER_CANCELLATION:
            due, until = now, now + self._schedule.longest_delay_s
        else:
            due = until = now + chance.random() * self._schedule.longest_delay_s
        self._held.append(_Held(kind, extent, bytes(self._memory(extent, nbytes)), due, until))
        self._poison(extent, 0, nbytes)

    def _restore(self, held: _Held) -> int:
        nbytes = len(held.data)
        self._memory(held.extent, nbytes)[:] = held.data
        return nbytes

    def _take_due(self) -> Iterator[_Held]:
        now = time.monotonic()
        for held in list(self._held):
            if held.due <= now and not self._keeps_back(held, now):
                self._held.remove(held)
                yield held

    def _keeps_back(self, held: _Held, now: float) -> bool:
        """Whether to look again later: has the read been cancelled, or else its time run out?"""
        if held.kind is not FaultKind.AFTER_CANCELLATION or held.seen_withdrawn:
            return False
        if held.extent.operation.withdrawn:
            held.seen_withdrawn = True
            held.due = now + self._schedule.longest_delay_s
            return True
        held.due = now + LOOK_AGAIN_S
        return now < held.until


class _Alarm:
    """A descriptor that becomes readable at a time of ``time.monotonic``: Linux's timerfd, new to Python in 3.13."""

    _MONOTONIC, _ABSOLUTE = 1, 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.timerfd_create(self._MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd: {os.strerror(code)}")

    def fileno(self) -> int:
        return self._descriptor

    def set(self, when: float | None) -> None:
        """Ring at ``when``, at once if that is past; never if it is None."""
        nanoseconds = 0 if when is None else max(1, int(when * 1e9))
        time_spec = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 1_000_000_000))
        self._libc.timerfd_settime(self._descriptor, self._ABSOLUTE, time_spec, None)

    def acknowledge(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)
