"""The times of ``bench offload``, drawn."""

from __future__ import annotations

from pathlib import Path

from splitzip_aio.cli.bench.offload import OffloadReport, OffloadRow
from splitzip_aio.errors import UnsupportedError

__all__ = ["draw_offload"]

_OURS, _THEIRS, _RESIDENT = "#3f51b5", "#9e9e9e", "#26a69a"


def draw_offload(report: OffloadReport, path: Path) -> None:
    """A bar for each contender and tier: the time of a run, and its memory on the device.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise UnsupportedError("drawing needs matplotlib; pip install splitzip-aio[plot]") from exc
    rows = [row for row in report.rows if row.times is not None][::-1]
    figure = Figure(figsize=(9, 1.2 + 0.34 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [f"{row.name}\n{row.tier}" if row.tier else row.name for row in rows]
    colours = [_colour(row) for row in rows]
    milliseconds = [1e3 * row.times.median_s for row in rows if row.times is not None]
    times.bar_label(times.barh(names, milliseconds, color=colours), fmt="%.0f", padding=3, fontsize=8)
    times.set_xscale("log")
    times.set_xlabel(f"ms for {report.unit}")
    memory.barh(names, [row.peak_bytes / 1e9 for row in rows], color=colours)
    memory.set_xlabel("device memory at most, GB")
    for axes in (times, memory):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    times.margins(x=0.15)
    figure.suptitle(f"{report.subject}, {report.raw_bytes / 1e9:.1f} GB of weights, {report.processor}", fontsize=10)
    figure.savefig(path, dpi=110)


def _colour(row: OffloadRow) -> str:
    if row.name == "resident":
        return _RESIDENT
    return _OURS if row.version is None else _THEIRS
