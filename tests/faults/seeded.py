"""One seeded run: a transport with faults, several tasks that ask for layers and are cancelled now and then.

All that a run does follows from its number, but for what the event loop and the kernel make of it. Whatever befalls it,
each layer that is asked for comes with the right bytes or ends in one error of ours, nothing is left over, and once the
faults stop every layer comes.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from splitzip_aio.cache import build_cache
from splitzip_aio.drivers import DriverName, copying
from splitzip_aio.drivers.faults import FaultSchedule, faulty_driver
from splitzip_aio.errors import CorruptDataError, SplitZipError
from splitzip_aio.transport import Transport, open_transport, opening
from tests.cache.samples import write_checkpoint
from tests.simulated import SimulatedCudaArena
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled, ten_layers

BACKENDS = ("asyncio", "trio")
LONGEST_RUN_S = 300.0  # of the clock: the machine may have other things to do for a minute


@dataclass
class Tally:
    """What came of so many runs."""

    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The counts as text."""
        rows = [f"{self.runs:8d}  runs"]
        rows += [f"{count:8d}  fault {kind}" for kind, count in sorted(self.faults.items())]
        return rows + [f"{count:8d}  layer: {outcome}" for outcome, count in sorted(self.outcomes.items())]

    def as_dict(self) -> dict[str, Any]:
        """The counts for a machine."""
        return {
            "runs": self.runs,
            "faults": dict(sorted(self.faults.items())),
            "layers": dict(sorted(self.outcomes.items())),
        }


def make_sample(directory: Path, *, schedule: str | None = None) -> Sample:
    """Ten layers of equal size in two packs, and an eleventh that repeats one."""
    tensors = ten_layers()
    checkpoint = write_checkpoint(directory / "model.safetensors", tensors)
    out = directory / f"cache-{schedule}"
    build_cache(checkpoint, out, segment_elements=2048, pack_bytes=200_000, schedule=schedule)
    return Sample(out, tensors)


def run(sample: Sample, driver: DriverName, seed: int, tally: Tally) -> None:
    """Run number ``seed``; an AssertionError, or any other error that is not ours, means that a rule was broken."""
    chance = random.Random(seed)
    if chance.random() < 0.4:
        evict(sample.root)
    before = descriptors()
    backend = chance.choice(BACKENDS)
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:  # the driver's own threads copy what is cached, as soon as they have started
            patch.setattr(copying, "_WORTH_IT_BYTES", 0)
        kind = "cuda" if seed % 4 > 1 else "cpu"
        if kind == "cuda":  # as far as the host is concerned
            patch.setattr(opening, "HostArena", SimulatedCudaArena)
        anyio.run(stream, sample, driver, seed, chance, tally, kind, backend=backend)
    left = descriptors() - before
    assert not left, f"run {seed}: descriptors left open: {left}"
    workers = [thread.name for thread in threading.enumerate() if thread.name.startswith("splitzip")]
    assert not workers, f"run {seed}: threads left behind: {workers}"
    tally.runs += 1


async def stream(sample: Sample, driver: DriverName, seed: int, chance: random.Random, tally: Tally, kind: str) -> None:
    tasks = len(anyio.get_running_tasks())
    schedule = FaultSchedule(seed, rate=chance.choice([0.1, 0.3, 0.6]), longest_delay_s=0.002)
    with anyio.fail_after(LONGEST_RUN_S):
        async with open_transport(
            sample.root, device="cpu", driver=faulty_driver(schedule, driver), **options(chance, kind)
        ) as transport:
            await ask(sample, transport, chance, tally)
            await settled(transport)
            assert_idle(transport.statistics())
            schedule.rate = 0.0
            for layer in chance.sample(transport.layers, 2):
                await recover(sample, transport, layer)
            await settled(transport)
        statistics = transport.statistics()
        assert_idle(statistics)
        assert statistics.io.open_files == 0
    assert len(anyio.get_running_tasks()) == tasks
    tally.faults.update({kind.value: count for kind, count in schedule.counts.items()})


async def recover(sample: Sample, transport: Transport, layer: str) -> None:
    """Without faults the layer comes; what the host tier holds may be wrong unseen, and fails once."""
    try:
        await sample.check_prefetch(transport, layer)
    except CorruptDataError:
        assert transport.statistics().host is not None
        await sample.check_prefetch(transport, layer)


RINGS_KIB = {"cpu": (64, 200, 1024), "cuda": (192, 500, 4096)}
"""A GPU's slots have room for a decode table behind them, of 150 kB."""


def options(chance: random.Random, kind: str = "cpu") -> dict[str, Any]:
    """Sizes from just enough to plenty."""
    return {
        "ring_bytes": chance.choice(RINGS_KIB[kind]) << 10,
        "arena_bytes": LAYER_BYTES * chance.choice([1, 3, 8]),
        "host_cache_bytes": chance.choice([0, 0, 100_000, 1 << 20]),
        "io": chance.choice(["auto", "auto", "direct", "buffered"]),
    }


async def ask(sample: Sample, transport: Transport, chance: random.Random, tally: Tally) -> None:
    """Three tasks at a time."""
    async with anyio.create_task_group() as group:
        for _ in range(3):
            layers = chance.choices(transport.layers, k=chance.randrange(1, 4))
            patience_s = chance.choice([None, chance.random() * 0.01])
            group.start_soon(use, sample, transport, layers, patience_s, tally)


async def use(sample: Sample, transport: Transport, layers: list[str], patience_s: float | None, tally: Tally) -> None:
    """Ask for layers one after another, for so many seconds at most, and check what comes."""
    with anyio.CancelScope(deadline=anyio.current_time() + (LONGEST_RUN_S if patience_s is None else patience_s)):
        for layer in layers:
            outcome = "cancelled"
            try:
                async with await transport.prefetch(layer) as lease:
                    sample.check(layer, lease.tensors)
                    outcome = "right bytes"
                    await checkpoint()
                    sample.check(layer, lease.tensors)
            except SplitZipError as error:
                outcome = type(error).__name__
            finally:
                tally.outcomes[outcome] += 1


def evict(root: Path) -> None:
    """Have the page cache forget the packs, so that they are read directly where that can be."""
    for path in (root / "packs").iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def descriptors() -> set[tuple[str, str]]:
    """Number and target of each descriptor of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the one that listed
            continue
    return found
