"""A mixed load that goes on for long, and what of the process grows meanwhile."""

from __future__ import annotations

import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import anyio

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.drivers.faults import FaultSchedule, faulty_driver
from splitzip_aio.host_cache import HostCache
from splitzip_aio.transport import open_transport
from tests.faults.seeded import BACKENDS, LONGEST_RUN_S, Tally, evict, options, recover, use
from tests.transport.samples import Sample, assert_idle, settled

DRIVERS = ("uring", "threads", "auto")
REBUILD_EVERY = 25


@dataclass(frozen=True)
class Footprint:
    """What this process holds: bytes resident, descriptors, threads, bytes locked or pinned."""

    rss_bytes: int
    descriptors: int
    threads: int
    pinned_bytes: int

    @classmethod
    def now(cls) -> Footprint:
        """As it is, once garbage is collected."""
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
        return cls(
            kib["VmRSS"] << 10,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            (kib["VmLck"] + kib["VmPin"]) << 10,
        )


@dataclass(frozen=True)
class Drift:
    """A footprint early on, after the first tenth of the time, and at the end, each over a tenth of it.

    Of resident bytes it is the median. Of what is counted it is the least: event loops keep idle threads for a while.
    """

    early: Footprint
    late: Footprint

    @classmethod
    def of(cls, footprints: list[Footprint]) -> Drift:
        """From footprints at equal distances."""
        share = max(1, len(footprints) // 10)
        return cls(_typical(footprints[share : 2 * share] or footprints[-1:]), _typical(footprints[-share:]))

    def percent(self, name: str) -> float:
        """How much more of it there is at the end."""
        early, late = getattr(self.early, name), getattr(self.late, name)
        return 100.0 * (late - early) / early if early else 100.0 * late

    def lines(self) -> list[str]:
        """One line for each thing that a process holds."""
        return [
            f"drift {self.percent(each.name):+7.2f}%  {each.name}: {getattr(self.early, each.name)} to "
            f"{getattr(self.late, each.name)}"
            for each in fields(Footprint)
        ]


def _typical(footprints: list[Footprint]) -> Footprint:
    rss_bytes, *counted = zip(*map(astuple, footprints), strict=True)
    return Footprint(int(statistics.median(rss_bytes)), *map(min, counted))


def soak(
    sample: Sample, checkpoint: Path, seconds: float, seed: int, report: Callable[[Tally, Footprint], None]
) -> tuple[Tally, Drift]:
    """Round after round of what ``mixed_round`` does, for so long; ``report`` hears of each."""
    tally, footprints = Tally(), []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or not footprints:
        mixed_round(sample, checkpoint, seed + tally.runs, tally)
        footprints.append(Footprint.now())
        report(tally, footprints[-1])
    return tally, Drift.of(footprints)


def mixed_round(sample: Sample, checkpoint: Path, seed: int, tally: Tally) -> None:
    """Two transports on one host cache, eight tasks each, with faults; every now and then a rebuild meanwhile."""
    chance = random.Random(seed)
    if chance.random() < 0.3:
        evict(sample.root)

    async def main() -> None:
        with HostCache(chance.choice([100_000, 1 << 20]), pinned=False) as host, anyio.fail_after(2 * LONGEST_RUN_S):
            async with anyio.create_task_group() as group:
                for number in range(2):
                    group.start_soon(_stream, sample, host, random.Random(f"{seed} {number}"), tally)
                if seed % REBUILD_EVERY == 0:
                    group.start_soon(anyio.to_thread.run_sync, _rebuild, sample, checkpoint)
            assert host.statistics().held == 0

    anyio.run(main, backend=chance.choice(BACKENDS))
    tally.runs += 1


async def _stream(sample: Sample, host: HostCache, chance: random.Random, tally: Tally) -> None:
    schedule = FaultSchedule(chance.randrange(1 << 30), rate=chance.choice([0.0, 0.05, 0.3]))
    sizes = options(chance) | {"host_cache_bytes": 0, "host_cache": chance.choice([host, None])}
    driver = faulty_driver(schedule, chance.choice(DRIVERS))  # type: ignore[arg-type]
    async with open_transport(sample.root, device="cpu", driver=driver, **sizes) as transport:
        for _ in range(3):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    layers = chance.choices(transport.layers, k=chance.randrange(1, 8))
                    patience_s = chance.choice([None, None, chance.random() * 0.05])
                    group.start_soon(use, sample, transport, layers, patience_s, tally)
        await settled(transport)
        assert_idle(transport.statistics())
        schedule.rate = 0.0
        await recover(sample, transport, chance.choice(transport.layers))
        await settled(transport)
    assert transport.statistics().io.open_files == 0
    tally.faults.update({kind.value: count for kind, count in schedule.counts.items()})


def _rebuild(sample: Sample, checkpoint: Path) -> None:
    build_cache(checkpoint, sample.root, force=True, segment_elements=2048, pack_bytes=200_000)
    with SplitZipShardCache(sample.root) as cache:
        assert cache.verify().ok
