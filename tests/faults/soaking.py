"""A mixed load that goes on for long, and what of the process grows meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, overload

import anyio
import torch

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.drivers.faults import FaultSchedule, faulty_driver
from splitzip_aio.host_cache import HostCache
from splitzip_aio.transport import open_transport
from tests.faults.late import Expected
from tests.faults.seeded import BACKENDS, LONGEST_RUN_S, Tally, evict, options, recover, use
from tests.transport.samples import Sample, assert_idle, settled

DRIVERS = ("uring", "threads", "auto")
REBUILD_EVERY = 25
IDLE_THREADS_S = 10.0
LARGEST_DRIFT_PERCENT = 1.0
SIZES = ("rss_bytes", "malloc_bytes", "python_blocks")
TRIM_THRESHOLD, KEPT_BYTES = -1, 128 << 10
INTERNED = 200_000


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@dataclass(frozen=True)
class Mix:
    """What is streamed in a soak, and in which ways, which take turns at random.

    With ``late`` it is streamed to that device, and used by consumers that lag behind.
    """

    sample: Sample
    checkpoint: Path
    drivers: Sequence[str] = DRIVERS
    backends: Sequence[str] = BACKENDS
    late: Expected | None = None

    @property
    def device(self) -> torch.device:
        """Where layers are decoded to."""
        return torch.device("cpu") if self.late is None else self.late.device


@dataclass(frozen=True)
class Footprint:
    """What this process holds.

    ``malloc_bytes`` and ``python_blocks`` are what is in use of the two heaps, so they tell of the smallest leak.
    ``rss_bytes`` is what is resident, with free memory that malloc keeps for later: see ``settle_heaps``.
    """

    rss_bytes: int
    malloc_bytes: int
    python_blocks: int
    descriptors: int
    threads: int
    pinned_bytes: int
    device_bytes: int

    @classmethod
    def now(cls) -> Footprint:
        """As it is, once garbage is collected."""
        gc.collect()
        malloc_bytes = _trimmed_malloc()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
        return cls(
            kib["VmRSS"] << 10,
            malloc_bytes,
            sys.getallocatedblocks(),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            (kib["VmLck"] + kib["VmPin"]) << 10,
            torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
        )


def settle_heaps() -> None:
    """Have what is resident be what is in use, and done with growing once.

    glibc has up to eight arenas a core, which threads come upon by chance. Unless told otherwise each keeps up to twice
    as much as the largest block that was freed, and ``malloc_trim`` leaves that alone; then what is resident rises for
    an hour, to the sum of the worst moments of all arenas, while what is in use does not.

    Python's table of interned strings is rebuilt, and with so many modules doubled to 4 MB, once as many strings have
    come and gone as it has room for.
    """
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
    for number in range(INTERNED):
        sys.intern(f"a name of number {number}")


def _trimmed_malloc() -> int:
    """Bytes that malloc has given out, after it gave free pages back; 0 where the C library cannot tell."""
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallocInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class Footprints(Sequence[Footprint]):
    """Footprints one after another, kept without a Python object for each: they are in what is measured."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._width = len(fields(Footprint))

    def append(self, footprint: Footprint) -> None:
        """Add one."""
        self._numbers.extend(astuple(footprint))

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    @overload
    def __getitem__(self, index: int) -> Footprint: ...

    @overload
    def __getitem__(self, index: slice) -> list[Footprint]: ...

    def __getitem__(self, index: int | slice) -> Footprint | list[Footprint]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        start = range(len(self))[index] * self._width
        return Footprint(*self._numbers[start : start + self._width])


@dataclass(frozen=True)
class Drift:
    """A footprint early on, after the first tenth of the time, and at the end, each over a tenth of it.

    Of sizes it is the median. Of what is counted it is the least: now and then a footprint waits until no event loop
    keeps an idle thread.
    """

    early: Footprint
    late: Footprint

    @classmethod
    def of(cls, footprints: Sequence[Footprint]) -> Drift:
        """From footprints at equal distances."""
        share = max(1, len(footprints) // 10)
        return cls(_typical(footprints[share : 2 * share] or footprints[-1:]), _typical(footprints[-share:]))

    def percent(self, name: str) -> float:
        """How much more of it there is at the end."""
        early, late = int(getattr(self.early, name)), int(getattr(self.late, name))
        return 100.0 * (late - early) / early if early else 100.0 * late

    @property
    def small(self) -> bool:
        """Whether nothing grew by 1% or more."""
        return all(self.percent(each.name) < LARGEST_DRIFT_PERCENT for each in fields(Footprint))

    def lines(self) -> list[str]:
        """One line for each thing that a process holds."""
        return [
            f"drift {self.percent(each.name):+7.2f}%  {each.name}: {getattr(self.early, each.name)} to "
            f"{getattr(self.late, each.name)}"
            for each in fields(Footprint)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The same for a machine."""
        return {
            each.name: {
                "early": getattr(self.early, each.name),
                "late": getattr(self.late, each.name),
                "percent": round(self.percent(each.name), 3),
            }
            for each in fields(Footprint)
        }


def _typical(footprints: Sequence[Footprint]) -> Footprint:
    columns = zip(*map(astuple, footprints), strict=True)
    return Footprint(
        *(
            int(statistics.median(values)) if each.name in SIZES else min(values)
            for each, values in zip(fields(Footprint), columns, strict=True)
        )
    )


def soak(mix: Mix, seconds: float, seed: int, report: Callable[[Tally, Footprints], None]) -> tuple[Tally, Footprints]:
    """Round after round of what ``mixed_round`` does, for so long; ``report`` hears of each."""
    settle_heaps()
    tally, footprints = Tally(), Footprints()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or not footprints:
        mixed_round(mix, seed + tally.runs, tally)
        if tally.runs % REBUILD_EVERY == 0:
            let_idle_threads_end()
        footprints.append(Footprint.now())
        report(tally, footprints)
    return tally, footprints


def let_idle_threads_end() -> None:
    """Wait for the threads that event loops keep for ten seconds in case there is more to do."""
    deadline = time.monotonic() + 2 * IDLE_THREADS_S
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.1)


def mixed_round(mix: Mix, seed: int, tally: Tally) -> None:
    """Two transports on one host cache, eight tasks each, with faults; every now and then a rebuild meanwhile."""
    chance = random.Random(seed)
    if chance.random() < 0.3:
        evict(mix.sample.root)

    async def main() -> None:
        pinned = mix.device.type == "cuda"
        with HostCache(chance.choice([100_000, 1 << 20]), pinned=pinned) as host, anyio.fail_after(2 * LONGEST_RUN_S):
            async with anyio.create_task_group() as group:
                for number in range(2):
                    group.start_soon(_stream, mix, host, random.Random(f"{seed} {number}"), tally)
                if seed % REBUILD_EVERY == 0:
                    group.start_soon(anyio.to_thread.run_sync, _rebuild, mix)
            assert host.statistics().held == 0

    anyio.run(main, backend=chance.choice(mix.backends))
    tally.runs += 1


async def _stream(mix: Mix, host: HostCache, chance: random.Random, tally: Tally) -> None:
    schedule = FaultSchedule(chance.randrange(1 << 30), rate=chance.choice([0.0, 0.05, 0.3]))
    sizes = options(chance, mix.device.type) | {"host_cache_bytes": 0, "host_cache": chance.choice([host, None])}
    driver = faulty_driver(schedule, chance.choice(mix.drivers))  # type: ignore[arg-type]
    async with open_transport(mix.sample.root, device=mix.device, driver=driver, **sizes) as transport:
        for _ in range(3):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    layers = chance.choices(transport.layers, k=chance.randrange(1, 8))
                    patience_s = chance.choice([None, None, chance.random() * 0.05])
                    if mix.late is None:
                        group.start_soon(use, mix.sample, transport, layers, patience_s, tally)
                    else:
                        own = random.Random(chance.randrange(1 << 30))
                        group.start_soon(mix.late.use, transport, layers, patience_s, own, tally)
        await settled(transport)
        assert_idle(transport.statistics())
        schedule.rate = 0.0
        await recover(mix.sample, transport, chance.choice(transport.layers))
        await settled(transport)
    assert transport.statistics().io.open_files == 0
    tally.faults.update({kind.value: count for kind, count in schedule.counts.items()})


def _rebuild(mix: Mix) -> None:
    build_cache(mix.checkpoint, mix.sample.root, force=True, segment_elements=2048, pack_bytes=200_000)
    with SplitZipShardCache(mix.sample.root) as cache:
        assert cache.verify().ok
