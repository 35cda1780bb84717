"""The transport beside loaders of the raw checkpoint: the same weights, to the same device, in one run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.cli.bench.measure import Times
from splitzip_aio.cli.bench.passes import Streamer, Tier, processor
from splitzip_aio.cli.bench.peers import PEERS, Peer
from splitzip_aio.cli.bench.workload import drop_from_page_cache, load_into_page_cache
from splitzip_aio.cli.demo import Comparison
from splitzip_aio.cli.output import Output

__all__ = ["LoaderReport", "LoadersReport", "render_loaders", "run_loaders"]

OURS = "splitzip-aio"


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """One loader.

    Attributes:
        name: which.
        version: the installed one.
        times: seconds to load everything, by where the files were.
        refused: why there are no times: not installed, not for this device, or its bytes were wrong.
    """

    name: str
    version: str | None
    times: dict[str, Times]
    refused: str | None


@dataclass(frozen=True, slots=True)
class LoadersReport:
    """All loaders on one checkpoint.

    Attributes:
        device: where tensors were loaded to.
        processor: the GPU's name, or what decodes on the CPU.
        torch: its version.
        raw_bytes: bytes of the tensors.
        ratio: compressed bytes over those.
        loaders: ours first.
        speedups: how many times faster ours was than the best of the others, by where the files were. The host tier is
            compared with the others' page cache: they have nothing better.
    """

    device: str
    processor: str
    torch: str
    raw_bytes: int
    ratio: float
    loaders: tuple[LoaderReport, ...]
    speedups: dict[str, float]


def run_loaders(
    streamer: Streamer, tiers: Sequence[Tier], *, repeats: int, output: Output, peers: Sequence[Peer] = PEERS
) -> LoadersReport:
    """Verify what each loader brings, then time all of them ``repeats`` times, in turns.

    A peer whose bytes are wrong, or that fails, is reported without times.

    Raises:
        SplitZipError: streaming failed, or our bytes are wrong: nothing is reported then.
    """
    for tier in tiers:
        output.note(f"verify every byte, from the {tier.value}")
        streamer.verify(tier)
    refused = {peer.name: _refusal(peer, streamer, output) for peer in peers}
    able = [peer for peer in peers if refused[peer.name] is None]
    seconds: dict[tuple[str, Tier], list[float]] = {}
    for tier in tiers:
        output.note(f"time {', '.join([OURS, *(peer.name for peer in able)])}, from the {tier.value}")
        for _ in range(repeats):
            for name, load in _contestants(streamer, tier, able):
                seconds.setdefault((name, tier), []).append(load())
    loaders = [
        LoaderReport(
            name=name,
            version=version,
            times={tier.value: Times.of(seconds[name, tier]) for tier in tiers if (name, tier) in seconds},
            refused=refused.get(name),
        )
        for name, version in [(OURS, None), *((peer.name, peer.version) for peer in peers)]
    ]
    return LoadersReport(
        device=str(streamer.device),
        processor=processor(streamer.device),
        torch=torch.__version__,
        raw_bytes=streamer.workload.raw_bytes,
        ratio=streamer.workload.ratio,
        loaders=tuple(loaders),
        speedups=dict(_speedups(loaders, tiers)),
    )


def _contestants(streamer: Streamer, tier: Tier, peers: Sequence[Peer]) -> Iterator[tuple[str, Callable[[], float]]]:
    """Each loader's name, and what times it once; ours streams, the peers load all that the device then holds."""

    def ours() -> float:
        streamer.ready(tier)
        return streamer.run(tier).seconds

    yield OURS, ours
    if tier is not Tier.HOST:
        for peer in peers:
            yield peer.name, lambda peer=peer: _time(peer, streamer, tier)  # type: ignore[misc]


def _time(peer: Peer, streamer: Streamer, tier: Tier) -> float:
    files = streamer.workload.files
    (drop_from_page_cache if tier is Tier.DISK else load_into_page_cache)(files)
    began = time.perf_counter()
    tensors = peer.load(files, streamer.device)
    if streamer.device.type == "cuda":
        torch.cuda.synchronize(streamer.device)
    seconds = time.perf_counter() - began
    del tensors
    gc.collect()
    return seconds


def _refusal(peer: Peer, streamer: Streamer, output: Output) -> str | None:
    """Why a peer is not timed, after it has loaded everything once; None if its bytes are right."""
    if peer.version is None:
        return "not installed"
    if peer.gpu_only and streamer.device.type != "cuda":
        return "needs a GPU"
    output.note(f"verify every byte of {peer.name} {peer.version}")
    with Comparison(open_checkpoint(streamer.workload.checkpoint)) as comparison:
        try:
            tensors = peer.load(streamer.workload.files, streamer.device)
        except Exception as exc:  # noqa: BLE001 - someone else's code, and its failure is a finding
            return f"failed: {type(exc).__name__}: {exc}"
        comparison.visit(tensors)
    return f"wrong bytes in {len(comparison.differing)} tensors" if comparison.differing else None


def _speedups(loaders: Sequence[LoaderReport], tiers: Sequence[Tier]) -> Iterator[tuple[str, float]]:
    ours, *others = loaders
    for tier in tiers:
        against = Tier.PAGE_CACHE if tier is Tier.HOST else tier
        theirs = [loader.times[against.value].median_s for loader in others if against.value in loader.times]
        if theirs:
            yield tier.value, min(theirs) / ours.times[tier.value].median_s


def render_loaders(report: LoadersReport, output: Output) -> None:
    """What ``bench loaders`` prints."""
    output.line(f"{report.processor}, torch {report.torch}")
    output.line(f"{report.raw_bytes / 1e9:.2f} GB, ratio {report.ratio:.4f}; every byte was right")
    output.table(
        ("loader", "from", "seconds", "least", "most", "model GB/s"),
        [row for loader in report.loaders for row in _rows(loader, report.raw_bytes)],
    )
    for loader in report.loaders:
        if loader.refused is not None:
            output.line(f"{loader.name}: {loader.refused}")
    for tier, factor in report.speedups.items():
        output.line(f"{tier}: {factor:.2f} times the best of the others")


def _rows(loader: LoaderReport, raw_bytes: int) -> Iterator[tuple[str, ...]]:
    name = f"{loader.name} {loader.version or ''}".rstrip()
    times: Mapping[str, Times] = loader.times
    for tier, each in times.items():
        rate = each.rate(raw_bytes)
        yield name, tier, f"{each.median_s:.4f}", f"{each.least_s:.4f}", f"{each.most_s:.4f}", f"{rate:.2f}"
