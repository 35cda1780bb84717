"""Faults on purpose: a driver that fails as disks and kernels do, on a schedule that a seed fixes.

Give ``open_transport`` what ``faulty_driver`` returns, and see what your own code makes of it::

    schedule = FaultSchedule(seed=7, rate=0.2, kinds=["eio", "short-byte"])
    async with open_transport("cache/", driver=faulty_driver(schedule)) as transport:
        ...
    print(schedule.counts)
"""

from __future__ import annotations

import enum
import errno
import logging
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from splitzip_aio.abc import ReadDriver
from splitzip_aio.drivers import QUEUE_DEPTH, DriverFactory, DriverName, make_driver
from splitzip_aio.errors import InvalidArgumentError

__all__ = ["FaultKind", "FaultSchedule", "faulty_driver"]

logger = logging.getLogger(__name__)


class FaultKind(enum.StrEnum):
    """What can go wrong, and what has to come of it.

    =====================  ==========================================================  =================================
    kind                   what happens                                                what has to come of it
    =====================  ==========================================================  =================================
    ``short-byte``         a read brings one byte                                      the rest is read: right bytes
    ``short-sector``       a read brings 512 bytes                                     the same
    ``short-by-one``       a read brings all but its last byte                         the same
    ``eintr``              a read is interrupted by a signal                           it is repeated: right bytes
    ``eagain``             the kernel has no room for a read                           the same
    ``einval-direct``      a file's first direct read is refused                       the file is read buffered
    ``eio``                the disk fails a read                                       ``ReadError`` of its layer
    ``enomem-registering`` the kernel does not pin the slots                           a fallback, said once
    ``delay``              a completion comes late                                     right bytes
    ``reorder``            a completion comes after a later one                        right bytes
    ``after-cancellation`` a completion comes after its read was cancelled             the slot is not reused before
    ``bit-flip``           one bit of what was read is wrong                           ``CorruptDataError`` of its layer
    =====================  ==========================================================  =================================

    What a read is said not to have brought is not there: its place is overwritten. What comes late is written late.
    For ``after-cancellation`` a completion waits until its read is cancelled, and then for the longest delay; if the
    read is not cancelled meanwhile, it comes after the longest delay.
    """

    SHORT_BYTE = "short-byte"
    SHORT_SECTOR = "short-sector"
    SHORT_BY_ONE = "short-by-one"
    EINTR = "eintr"
    EAGAIN = "eagain"
    EINVAL_DIRECT = "einval-direct"
    EIO = "eio"
    ENOMEM_REGISTERING = "enomem-registering"
    DELAY = "delay"
    REORDER = "reorder"
    AFTER_CANCELLATION = "after-cancellation"
    BIT_FLIP = "bit-flip"


_ONCE = frozenset({FaultKind.EINVAL_DIRECT, FaultKind.ENOMEM_REGISTERING})
"""What is drawn for a file or a driver; the other kinds are drawn for each read."""


class FaultSchedule:
    """Which reads go wrong, and how.

    What befalls a read depends on the seed, the file's name, the offset, and how often this place was read before. It
    does not depend on time or on the order of completions, so that a seed that found a bug finds it again.

    Args:
        seed: what fixes the schedule.
        rate: how many of the reads go wrong, from 0 to 1. May be changed at any time: 0 lets everything succeed.
        kinds: the faults that are drawn, by default all.
        longest_delay_s: the longest that a completion is kept back, in seconds.

    Attributes:
        seed: as given.
        rate: as given.
        kinds: as given.
        longest_delay_s: as given.

    Raises:
        InvalidArgumentError: a rate outside [0, 1], an unknown kind or none, or a negative delay.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        rate: float = 0.1,
        kinds: Iterable[FaultKind | str] = tuple(FaultKind),
        longest_delay_s: float = 0.005,
    ) -> None:
        if not 0.0 <= rate <= 1.0:
            raise InvalidArgumentError(f"rate: expected 0 to 1, found {rate}")
        if not longest_delay_s >= 0.0:
            raise InvalidArgumentError(f"longest_delay_s: expected 0 or more, found {longest_delay_s}")
        self.seed = seed
        self.rate = rate
        self.kinds = _parsed(kinds)
        self.longest_delay_s = longest_delay_s
        self._per_read = tuple(kind for kind in self.kinds if kind not in _ONCE)
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._counts: Counter[FaultKind] = Counter()

    @property
    def counts(self) -> Mapping[FaultKind, int]:
        """How often each kind has happened."""
        return MappingProxyType({kind: self._counts[kind] for kind in self.kinds})

    def count(self, kind: FaultKind) -> None:
        """Take note of a fault that happened."""
        self._counts[kind] += 1

    def for_read(self, name: str, offset: int) -> tuple[FaultKind | None, random.Random]:
        """What befalls the next read of this place, and where its details are drawn from."""
        self._attempts[name, offset] += 1
        chance = self._chance(name, offset, self._attempts[name, offset])
        if not self._per_read or chance.random() >= self.rate:
            return None, chance
        return chance.choice(self._per_read), chance

    def once(self, kind: FaultKind, name: str) -> bool:
        """Whether what can happen once to a file, or a driver, happens to this one."""
        self._attempts[f"{kind} {name}", 0] += 1
        return kind in self.kinds and self._chance(kind, name, self._attempts[f"{kind} {name}", 0]).random() < self.rate

    def _chance(self, *place: object) -> random.Random:
        return random.Random(repr((self.seed, *map(str, place))))


def faulty_driver(
    schedule: FaultSchedule, driver: DriverName = "auto", *, queue_depth: int = QUEUE_DEPTH
) -> DriverFactory:
    """Something that ``open_transport(driver=...)`` takes: a driver to which what ``schedule`` says happens.

    The faults come from beneath the driver, where the kernel is. So all that the driver does about them is tested with
    them, and what gets past it is what it would let past.

    Args:
        schedule: what happens, and where what has happened is counted. Several drivers of one event loop may share it.
        driver: ``"auto"``, ``"uring"`` or ``"threads"``; statistics name it, and say that it has faults.
        queue_depth: chunks that the kernel is given at once.

    Returns:
        A function that makes the driver for the slots it is given, and raises what ``open_driver`` raises.
    """
    return partial(_make, schedule, driver, queue_depth)


def _make(schedule: FaultSchedule, driver: DriverName, queue_depth: int, buffers: Sequence[memoryview]) -> ReadDriver:
    from splitzip_aio.drivers.faulty_engine import FaultyEngine

    def registering() -> None:
        if schedule.once(FaultKind.ENOMEM_REGISTERING, "slots"):
            schedule.count(FaultKind.ENOMEM_REGISTERING)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    logger.warning("faults are injected into reads: seed %s, rate %s", schedule.seed, schedule.rate)
    return make_driver(
        driver,
        buffers,
        queue_depth,
        registering=registering,
        interpose=lambda engine, slots: FaultyEngine(engine, slots, schedule),
    )


def _parsed(kinds: Iterable[FaultKind | str]) -> tuple[FaultKind, ...]:
    found: list[FaultKind] = []
    for kind in kinds:
        try:
            found.append(FaultKind(kind))
        except ValueError as exc:
            raise InvalidArgumentError(f"kinds: expected some of {', '.join(FaultKind)}, found {kind!r}") from exc
    if not found:
        raise InvalidArgumentError("kinds: expected at least one")
    return tuple(dict.fromkeys(found))
