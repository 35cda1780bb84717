"""``offload`` beside other ways to run a model that does not fit: the same model, on the same machine, in one run."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import splitzip_aio
from splitzip_aio.cli.bench.measure import Times
from splitzip_aio.cli.bench.offload_peers import CONTENDERS, Contender, Setting
from splitzip_aio.cli.bench.offload_subjects import Subject
from splitzip_aio.cli.bench.passes import Tier, processor
from splitzip_aio.cli.bench.workload import drop_from_page_cache, load_into_page_cache
from splitzip_aio.cli.output import Output
from splitzip_aio.errors import CorruptDataError

__all__ = ["OffloadReport", "OffloadRow", "render_offload", "run_offload"]

_WARM_UP = 2
_LONG_S = 10.0  # after so many seconds and two runs, no more runs


@dataclass(frozen=True, slots=True)
class OffloadRow:
    """One contender, from one tier.

    Attributes:
        name: who; ``"resident"`` is the model with all its weights on the device.
        version: the installed one.
        tier: where the weights were.
        times: seconds a run; None if there are none.
        share: what part of a run was timed, and ``times`` scaled up from.
        peak_bytes: device memory at most, minus what is not the model's; 0 on the CPU.
        pinned_bytes: compressed weights in page-locked memory; None where that is not known.
        refused: why there are no times.
    """

    name: str
    version: str | None
    tier: str
    times: Times | None
    share: float
    peak_bytes: int
    pinned_bytes: int | None
    refused: str | None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """All contenders on one model.

    Attributes:
        subject: the model's name.
        unit: what a run is.
        device: where it ran; ``processor`` is what that is.
        torch: its version.
        raw_bytes: bytes of the weights.
        compressed_bytes: bytes of the cache.
        resident_bytes: what ours was allowed of device memory for weights.
        largest_units_bytes: bytes of the two largest units.
        rows: the resident model first, then ours.
        speedups: how many times faster ours was than the best of the others, by tier.
    """

    subject: str
    unit: str
    device: str
    processor: str
    torch: str
    raw_bytes: int
    compressed_bytes: int
    resident_bytes: int
    largest_units_bytes: int
    rows: tuple[OffloadRow, ...]
    speedups: dict[str, float]


def run_offload(
    subject: Subject,
    directory: Path,
    *,
    device: torch.device,
    resident_bytes: int | None,
    tiers: Sequence[Tier] | None = None,
    repeats: int,
    output: Output,
    contenders: Sequence[Contender] = CONTENDERS,
) -> OffloadReport:
    """Make the model and its cache, then time it resident, and by each contender from each tier.

    A contender is timed only once its output was the resident model's, bit for bit.

    Raises:
        SplitZipError: the cache cannot be built or used, or our output is wrong.
    """
    setting, raw_bytes = _prepare(subject, directory, device, resident_bytes, output)
    wanted = subject.tiers if tiers is None else tiers
    output.note("run it with all weights on the device")
    expected, rows = _resident(setting, repeats)
    largest = 0
    for contender in contenders:
        refusal = contender.refusal(device)
        for tier in wanted if refusal is None else ():
            output.note(f"{contender.name}, from the {tier.value}")
            row, largest_of = _attempt(contender, setting, tier, expected, repeats)
            largest = max(largest, largest_of)
            rows.append(row)
            if row.refused:
                output.note(f"  {row.refused}")
        if refusal is not None:
            rows.append(OffloadRow(contender.name, contender.version, "", None, 1.0, 0, None, refusal))
    return OffloadReport(
        subject=subject.name,
        unit=subject.unit,
        device=str(device),
        processor=processor(device),
        torch=torch.__version__,
        raw_bytes=raw_bytes,
        compressed_bytes=sum(path.stat().st_size for path in (setting.cache / "packs").iterdir()),
        resident_bytes=setting.resident_bytes,
        largest_units_bytes=largest,
        rows=tuple(rows),
        speedups=dict(_speedups(rows)),
    )


def _prepare(
    subject: Subject, directory: Path, device: torch.device, resident_bytes: int | None, output: Output
) -> tuple[Setting, int]:
    checkpoint, cache = directory / subject.name, directory / f"{subject.name}-cache"
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    output.note(f"make {subject.name}, {subject.nbytes / 1e9:.2f} GB")
    subject.save(checkpoint, device)
    _forget(device)
    with output.progress("compress") as progress:
        report = splitzip_aio.build_cache(checkpoint, cache, force=True, progress=progress)
    budget = resident_bytes or int(report.raw_bytes * subject.resident_share)
    return Setting(subject, checkpoint, cache, device, budget), report.raw_bytes


def _resident(setting: Setting, repeats: int) -> tuple[torch.Tensor, list[OffloadRow]]:
    with _measuring(setting.device) as peak:
        model = setting.subject.load(setting.checkpoint).to(setting.device)
        with torch.no_grad():
            expected = setting.subject.run(model, setting.device).clone()
            again = setting.subject.run(model, setting.device)
        if not torch.equal(expected, again):
            raise splitzip_aio.UnsupportedError("the resident model's own output differs from run to run here")
        times = _time(model, setting, repeats)
        row = OffloadRow("resident", None, "device", times, 1.0, peak(), None, None)
        del model
    return expected, [row]


def _attempt(
    contender: Contender, setting: Setting, tier: Tier, expected: torch.Tensor, repeats: int
) -> tuple[OffloadRow, int]:
    try:
        return _compete(contender, setting, tier, expected, repeats)
    except splitzip_aio.SplitZipError:
        raise
    except Exception as exc:  # noqa: BLE001 - someone else's code, and its failure is a finding
        refusal = f"failed: {type(exc).__name__}: {exc}"
        return OffloadRow(contender.name, contender.version, tier.value, None, 1.0, 0, None, refusal), 0


def _compete(
    contender: Contender, setting: Setting, tier: Tier, expected: torch.Tensor, repeats: int
) -> tuple[OffloadRow, int]:
    ours = contender.distribution is None
    share = 1.0 if ours else setting.subject.slow_share
    pinned, largest = None, 0
    files = _files(setting)
    with _measuring(setting.device) as peak, contender.build(setting, tier) as model:
        for _ in range(_WARM_UP if ours else 1):
            with torch.no_grad():
                output = setting.subject.run(model, setting.device, share)
            _check(contender, output, expected, ours=ours)
        ready = _ready(tier, files if ours else [*files, *_left_by(contender, setting)])
        times = _time(model, setting, repeats, share=share, ready=ready)
        with torch.no_grad():
            _check(contender, setting.subject.run(model, setting.device, share), expected, ours=ours)
        peak_bytes = peak()
        if ours:
            pinned, largest = _account(model)
        del model
    scaled = times.scaled(1 / share)
    return OffloadRow(contender.name, contender.version, tier.value, scaled, share, peak_bytes, pinned, None), largest


def _check(contender: Contender, output: torch.Tensor, expected: torch.Tensor, *, ours: bool) -> None:
    """Compare with the resident model's, or as much of it as was asked for."""
    part = expected if output.shape == expected.shape else expected[:, : output.shape[1]]
    if torch.equal(output, part):
        return
    problem = f"{contender.name}: the output is not the resident model's"
    raise CorruptDataError(problem) if ours else ArithmeticError(problem)


def _account(model: nn.Module) -> tuple[int, int]:
    """Host bytes of the transport, and bytes of the two largest units."""
    found = splitzip_aio.offload_statistics(model)
    host = None if found.transport is None else found.transport.host
    return 0 if host is None else host.bytes, found.largest_units_bytes


def _files(setting: Setting) -> list[Path]:
    return sorted((setting.cache / "packs").iterdir())


def _left_by(contender: Contender, setting: Setting) -> list[Path]:
    """What a peer has written beside the cache."""
    folders = (folder for folder in setting.cache.parent.iterdir() if folder.name.startswith(("group-", "accelerate-")))
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def _ready(tier: Tier, files: Sequence[Path]) -> Callable[[], None]:
    """What is done before each run, outside of its time."""
    if tier is Tier.DISK:
        return lambda: drop_from_page_cache(files)
    if tier is Tier.PAGE_CACHE:
        load_into_page_cache(files)
    return lambda: None


def _time(
    model: nn.Module,
    setting: Setting,
    repeats: int,
    *,
    share: float = 1.0,
    ready: Callable[[], None] = lambda: None,
) -> Times:
    seconds: list[float] = []
    while len(seconds) < repeats and (len(seconds) < 2 or sum(seconds) < _LONG_S):
        ready()
        _synchronize(setting.device)
        began = time.perf_counter()
        with torch.no_grad():
            setting.subject.run(model, setting.device, share)
        _synchronize(setting.device)
        seconds.append(time.perf_counter() - began)
    return Times(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@contextmanager
def _measuring(device: torch.device) -> Iterator[Callable[[], int]]:
    """Device memory at most since the start of the block, beyond what there was."""
    _forget(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    try:
        yield lambda: torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    finally:
        _forget(device)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _speedups(rows: Sequence[OffloadRow]) -> Iterator[tuple[str, float]]:
    ours = [row for row in rows if row.name == CONTENDERS[0].name]
    others = [row for row in rows if row.name not in {"resident", CONTENDERS[0].name}]
    for row in ours:
        theirs = [each.times.median_s for each in others if each.times is not None and each.tier == row.tier]
        if row.times is not None and theirs:
            yield row.tier, min(theirs) / row.times.median_s


def render_offload(report: OffloadReport, output: Output) -> None:
    """What ``bench offload`` prints."""
    ratio = report.compressed_bytes / report.raw_bytes
    output.line(f"{report.processor}, torch {report.torch}")
    output.line(
        f"{report.subject}: {report.raw_bytes / 1e9:.2f} GB, ratio {ratio:.4f}; resident_bytes "
        f"{report.resident_bytes / 1e9:.2f} GB; every output was the resident model's, bit for bit"
    )
    output.table(
        ("who", "weights in", f"ms for {report.unit}", "least", "most", "runs", "GPU GB", "pinned GB"),
        [_cells(row) for row in report.rows if row.times is not None],
    )
    for row in report.rows:
        if row.refused is not None:
            output.line(f"{row.name}{', ' + row.tier if row.tier else ''}: {row.refused}")
    for tier, factor in report.speedups.items():
        output.line(f"{tier}: {factor:.2f} times the best of the others")


def _cells(row: OffloadRow) -> tuple[str, ...]:
    assert row.times is not None
    seconds = (row.times.median_s, row.times.least_s, row.times.most_s)
    pinned = "" if row.pinned_bytes is None else f"{row.pinned_bytes / 1e9:.2f}"
    name = f"{row.name} {row.version or ''}".rstrip()
    times = [f"{1e3 * each:.1f}" for each in seconds]
    return name, row.tier, *times, str(row.times.runs), f"{row.peak_bytes / 1e9:.2f}", pinned
