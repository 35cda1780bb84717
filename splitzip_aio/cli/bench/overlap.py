"""Each stage alone, then all together: how much of the slowest stage's speed is left.

After a rest, memory and processor of a server take some 50 ms to come up to their speed, more than half of a pass over
a few gigabytes from memory. That is not what overlap is about. So but for the disk, whose passes are long, whatever is
timed is done twice in a row, and the second time counts, alone and together alike; the first is shown as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
import torch

from splitzip_aio.cli.bench.measure import Times
from splitzip_aio.cli.bench.passes import Pass, Streamer, Tier, processor
from splitzip_aio.cli.bench.stages import Stages
from splitzip_aio.cli.output import Output
from splitzip_aio.telemetry import TimeStatistics
from splitzip_aio.timeline import Timeline

__all__ = ["OverlapReport", "TierReport", "WakeUps", "render_overlap", "run_overlap"]

_NAP_S = 0.010
_PROBE_S = 3.0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier: each stage alone, all together.

    Attributes:
        tier: where the packs were.
        stages: times of each stage alone, by name.
        together: times of the whole pipeline.
        rested: those of the pass right before each of these, the first after a rest; None from the disk, whose passes
            all are.
        slowest: name of the slowest stage.
        efficiency: time of the slowest stage over that of the whole; 1 where nothing is added to it.
        waited: what the last pass waited for.
        direct_bytes, buffered_bytes, mapped_bytes, host_bytes: what the last pass brought past the page cache and
            through it, what it decoded from where the page cache has it, and what came from the host tier.
        fallbacks: each better way that could not be taken, and why.
    """

    tier: str
    stages: dict[str, Times]
    together: Times
    rested: Times | None
    slowest: str
    efficiency: float
    waited: TimeStatistics
    direct_bytes: int
    buffered_bytes: int
    mapped_bytes: int
    host_bytes: int
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WakeUps:
    """How late an asyncio task was that slept for 10 ms again and again while layers streamed.

    Attributes:
        tier: where they streamed from.
        naps: how often it slept.
        median_s, p99_s, most_s: seconds beyond the 10 ms.
    """

    tier: str
    naps: int
    median_s: float
    p99_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """What the benchmark found; all bytes were right.

    Attributes:
        device: where layers were decoded to.
        processor: the GPU's name, or what decodes on the CPU.
        torch: its version.
        layers, raw_bytes, wire_bytes: of the cache.
        tiers: each tier measured.
        wake_ups: how responsive the event loop was, streaming from the fastest tier.
    """

    device: str
    processor: str
    torch: str
    layers: int
    raw_bytes: int
    wire_bytes: int
    tiers: tuple[TierReport, ...]
    wake_ups: WakeUps


def run_overlap(
    streamer: Streamer, tiers: Sequence[Tier], *, repeats: int, output: Output, timeline: Path | None
) -> OverlapReport:
    """Verify, then time each stage and the whole ``repeats`` times for each tier; draw the last tier's timeline.

    Raises:
        SplitZipError: streaming failed, or bytes are wrong: nothing is reported then.
        UnsupportedError: a timeline is to be drawn, and matplotlib is not installed.
    """
    stages = Stages(streamer.workload, streamer.device, streamer.ring_bytes)
    for tier in tiers:
        output.note(f"verify every byte, from the {tier.value}")
        streamer.verify(tier)
    decodes = stages.decodes()
    reports = []
    for tier in tiers:
        output.note(f"time each stage and all together, from the {tier.value}")
        reports.append(_time_tier(streamer, stages, decodes, tier, repeats))
    decodes.close()
    output.note("time the naps of a task beside the stream")
    wake_ups = _probe(streamer, tiers[-1])
    if timeline is not None:
        _draw(streamer, tiers[-1], timeline)
    return OverlapReport(
        device=str(streamer.device),
        processor=processor(streamer.device),
        torch=torch.__version__,
        layers=stages.layers,
        raw_bytes=streamer.workload.raw_bytes,
        wire_bytes=stages.wire_bytes,
        tiers=tuple(reports),
        wake_ups=wake_ups,
    )


def _time_tier(streamer: Streamer, stages: Stages, decodes: Iterator[float], tier: Tier, repeats: int) -> TierReport:
    """The stages and the whole take turns, so what else the machine does falls on all of them."""
    alone: dict[str, list[float]] = {}
    rested: list[float] = []
    done: list[Pass] = []
    settled = tier is not Tier.DISK
    with streamer.open(tier) as passes:
        streamer.ready(tier)
        passes.run()  # what is done once, however long a transport lives: headers are examined, the host tier filled
        for _ in range(repeats):
            if tier is not Tier.HOST:
                streamer.ready(tier)
                alone.setdefault("read", []).append(stages.read(settled=settled))
            if streamer.device.type == "cuda":
                alone.setdefault("copy", []).append(stages.copy(streamer.host if tier is Tier.HOST else None))
            alone.setdefault("decode", []).append(next(decodes))
            streamer.ready(tier)
            if settled:
                rested.append(passes.run().seconds)
            done.append(passes.run())
    times = {name: Times.of(seconds) for name, seconds in alone.items()}
    together = Times.of([each.seconds for each in done])
    slowest = max(times, key=lambda name: times[name].median_s)
    last = done[-1]
    return TierReport(
        tier=tier.value,
        stages=times,
        together=together,
        rested=Times.of(rested) if rested else None,
        slowest=slowest,
        efficiency=times[slowest].median_s / together.median_s,
        waited=last.waited,
        direct_bytes=last.direct_bytes,
        buffered_bytes=last.buffered_bytes,
        mapped_bytes=last.mapped_bytes,
        host_bytes=last.host_bytes,
        fallbacks=last.after.fallbacks,
    )


def _probe(streamer: Streamer, tier: Tier) -> WakeUps:
    """Stream passes for some seconds beside a task that naps in the same event loop."""
    late: list[float] = []

    async def nap() -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(_NAP_S)
            late.append(time.perf_counter() - began - _NAP_S)

    streamer.ready(tier)
    with streamer.open(tier) as passes:
        passes.run_beside(nap, _PROBE_S)
    median_s, p99_s = np.percentile(late, (50, 99)).tolist()
    return WakeUps(tier.value, len(late), median_s, p99_s, max(late))


def _draw(streamer: Streamer, tier: Tier, path: Path) -> None:
    """A picture and a trace of one more pass."""
    timeline = Timeline()
    streamer.ready(tier)
    done = streamer.run(tier, timeline=timeline)
    title = f"{streamer.workload.raw_bytes / 1e9:.2f} GB from the {tier.value} to {processor(streamer.device)}"
    timeline.plot(path, title=f"{title}, {done.seconds * 1e3:.0f} ms")
    timeline.save(path.with_suffix(".json"))


def render_overlap(report: OverlapReport, output: Output) -> None:
    """What ``bench overlap`` prints."""
    ratio = report.wire_bytes / report.raw_bytes
    output.line(f"{report.processor}, torch {report.torch}")
    output.line(f"{report.raw_bytes / 1e9:.2f} GB in {report.layers} layers, ratio {ratio:.4f}; every byte was right")
    rows = [row for tier in report.tiers for row in _rows(tier, report)]
    output.table(("from", "stage", "seconds", "least", "most", "wire GB/s", "model GB/s"), rows)
    for tier in report.tiers:
        output.line(f"{tier.tier}: efficiency {tier.efficiency:.3f}, {tier.slowest} alone over all together")
        output.line(f"{tier.tier}: the last pass waited for {_waited(tier.waited)}")
        for reason in tier.fallbacks:
            output.line(f"{tier.tier}: fell back, {reason}")
    naps = report.wake_ups
    output.line(
        f"a task sleeping 10 ms beside it ({naps.tier}, {naps.naps} naps) woke {naps.median_s * 1e3:.2f} ms late, "
        f"p99 {naps.p99_s * 1e3:.2f}, at most {naps.most_s * 1e3:.2f}"
    )


def _rows(tier: TierReport, report: OverlapReport) -> list[tuple[str, ...]]:
    return [
        (
            tier.tier,
            name,
            f"{times.median_s:.4f}",
            f"{times.least_s:.4f}",
            f"{times.most_s:.4f}",
            f"{times.rate(report.wire_bytes):.2f}",
            f"{times.rate(report.raw_bytes):.2f}",
        )
        for name, times in _timed(tier).items()
    ]


def _timed(tier: TierReport) -> dict[str, Times]:
    first = {} if tier.rested is None else {"together, after a rest": tier.rested}
    return tier.stages | first | {"together": tier.together}


def _waited(waited: TimeStatistics) -> str:
    parts = {
        "disk": waited.disk_s,
        "slot": waited.slot_s,
        "copy": waited.copy_s,
        "decode": waited.decode_s,
        "consumer": waited.consumer_s,
    }
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())
