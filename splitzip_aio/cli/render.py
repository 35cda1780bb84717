"""Reports as people read them."""

from __future__ import annotations

from splitzip_aio.cache import BuildReport, VerifyReport
from splitzip_aio.cli.demo import DemoReport
from splitzip_aio.cli.doctor import Examination
from splitzip_aio.cli.output import Output, format_bytes, format_rate
from splitzip_aio.cli.streaming import StreamReport
from splitzip_aio.cli.summary import CacheSummary

__all__ = ["build", "demo", "examination", "stream", "summary", "verification"]

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def build(report: BuildReport, output: Output) -> None:
    """What ``build`` prints."""
    output.fields(
        [
            ("cache", str(report.root)),
            ("tensors", _tensors(report)),
            *_sizes(report.raw_bytes, report.compressed_bytes),
            ("time", f"{report.seconds:.1f} s, {format_rate(report.raw_bytes, report.seconds)}"),
        ]
    )


def summary(report: CacheSummary, output: Output) -> None:
    """What ``inspect`` prints."""
    output.fields(
        [
            ("cache", f"{report.root}, format {report.format}, {report.packs} pack{_s(report.packs)}"),
            *(("source", f"{source.name}, {format_bytes(source.size)}") for source in report.sources),
            ("layers", str(len(report.layers))),
            ("tensors", str(len(report.tensors))),
            *_sizes(report.raw_bytes, report.compressed_bytes),
        ]
    )
    output.line("")
    output.table(
        ("dtype", "schedule", "tensors", "raw", "encoded", "ratio"),
        [
            (
                group.dtype,
                group.schedule,
                str(group.tensors),
                format_bytes(group.raw_bytes),
                format_bytes(group.encoded_bytes),
                _ratio(group.raw_bytes, group.encoded_bytes),
            )
            for group in report.groups
        ],
    )


def verification(report: VerifyReport, output: Output) -> None:
    """What ``verify`` prints."""
    for damage in report.damaged:
        output.line(f"damaged: {damage.tensor or damage.pack}: {damage.problem}", style=_STYLES["fail"])
    found = f"{len(report.damaged)} damaged" if report.damaged else "all intact"
    output.line(f"{report.tensors} tensors, {format_bytes(report.raw_bytes)} in {report.seconds:.1f} s: {found}")


def stream(report: StreamReport, output: Output) -> None:
    """What ``load`` prints."""
    output.fields([("layers", f"{report.layers}, {report.tensors} tensors"), *_streamed(report)])


def demo(report: DemoReport, output: Output) -> None:
    """What ``demo`` prints."""
    output.fields(
        [
            ("checkpoint", report.checkpoint or "made up, with weights as training leaves them"),
            ("tensors", _tensors(report.build)),
            *_sizes(report.build.raw_bytes, report.build.compressed_bytes),
            (
                "compressing",
                f"{report.build.seconds:.1f} s, {format_rate(report.build.raw_bytes, report.build.seconds)}",
            ),
            *_streamed(report.stream),
            ("bit-exact", "yes" if report.bit_exact else "NO"),
        ]
    )
    for name in report.differing:
        output.line(f"differs: {name}", style=_STYLES["fail"])


def examination(report: Examination, output: Output) -> None:
    """What ``doctor`` prints."""
    for check in report.checks:
        output.line(f"{check.status:<4}  {check.name}: {check.detail}", style=_STYLES[check.status])
        if check.remedy:
            output.line(f"      {check.remedy}")


def _tensors(report: BuildReport) -> str:
    tied = f", {report.tied} tied" if report.tied else ""
    return f"{report.tensors}: {report.encoded} encoded, {report.stored} stored{tied}"


def _sizes(raw_bytes: int, compressed_bytes: int) -> list[tuple[str, str]]:
    return [
        ("raw", f"{format_bytes(raw_bytes)} ({raw_bytes} bytes)"),
        ("compressed", f"{format_bytes(compressed_bytes)} ({compressed_bytes} bytes)"),
        ("ratio", _ratio(raw_bytes, compressed_bytes)),
    ]


def _ratio(raw_bytes: int, compressed_bytes: int) -> str:
    return f"{compressed_bytes / raw_bytes:.4f}" if raw_bytes else "-"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _streamed(report: StreamReport) -> list[tuple[str, str]]:
    how = [report.driver, "direct" if report.direct else "buffered"]
    how.append("registered buffers" if report.fixed_buffers else "unregistered buffers")
    if report.gpu is not None:
        how.append("pinned" if report.pinned else "not pinned")
    return [
        ("device", f"{report.device}, {report.gpu or report.codec}"),
        ("driver", ", ".join(how)),
        ("streaming", f"{report.seconds:.2f} s after {report.open_s:.2f} s to open"),
        ("speed, raw", format_rate(report.raw_bytes, report.seconds)),
        ("speed, wire", format_rate(report.wire_bytes, report.seconds)),
        *(("fell back", reason) for reason in report.fallbacks),
    ]
