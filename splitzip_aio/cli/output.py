"""What a command writes: its result to stdout, its progress and errors to stderr."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.errors import InvalidArgumentError, SplitZipError

__all__ = ["Output", "format_bytes", "format_rate", "reporting"]

_PLAIN_INTERVAL_S = 5.0

T = TypeVar("T")


def format_bytes(count: int) -> str:
    """A byte count in decimal units, as disks and links are sold: ``268.4 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_rate(nbytes: int, seconds: float) -> str:
    """Bytes per second: ``1.23 GB/s``, or ``45.6 MB/s`` where that says more."""
    rate = nbytes / max(seconds, 1e-9)
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


class Output:
    """One command's view of the terminal: readable for people, or one JSON document for machines."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._out = Console(soft_wrap=True, highlight=False, markup=False)
        self._err = Console(soft_wrap=True, highlight=False, markup=False, stderr=True)

    def result(self, report: T, render: Callable[[T, Output], None], **derived: object) -> None:
        """Write what a command found: in JSON ``report`` and ``derived``, else what ``render`` makes of it."""
        if self.as_json:
            self._json(msgspec.to_builtins(report, enc_hook=str) | derived)
        else:
            render(report, self)

    def fields(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write ``name  value`` lines, values aligned."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self._out.print(f"{name:<{width}}  {value}")

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table; all columns but the first are numbers, aligned to the right."""
        table = Table(box=None, pad_edge=False)
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._out.print(table, soft_wrap=True)

    def line(self, text: str, *, style: str | None = None) -> None:
        """Write one line of the result."""
        self._out.print(text, style=style)

    def note(self, text: str) -> None:
        """Tell a person what is going on; machines are not told."""
        if not self.as_json:
            self._err.print(text)

    def error(self, exc: Exception) -> None:
        """Say on stderr, in one line, what went wrong; in JSON on stdout as well."""
        message = " ".join(str(exc).split()) or type(exc).__name__
        self._err.print(f"splitzip-aio: error: {message}", style="red")
        if self.as_json:
            self._json({"error": {"type": type(exc).__name__, "message": message}})

    @contextmanager
    def progress(self, label: str) -> Iterator[ProgressCallback]:
        """A bar while the block runs, on a terminal; a line now and then where stderr goes elsewhere."""
        if self.as_json:
            yield lambda _: None
        elif self._err.is_terminal:
            with _bar(self._err) as bar:
                task = bar.add_task(label, total=None)
                yield lambda now: bar.update(task, completed=now.done_bytes, total=now.total_bytes)
        else:
            self.note(f"{label} ...")
            yield _PlainProgress(label, self.note)

    def _json(self, document: object) -> None:
        self._out.print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


class _PlainProgress:
    """Says how far something is, at most once in a few seconds."""

    def __init__(self, label: str, write: Callable[[str], None]) -> None:
        self._label = label
        self._write = write
        self._next = time.monotonic() + _PLAIN_INTERVAL_S

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PLAIN_INTERVAL_S
            done, total = map(format_bytes, (progress.done_bytes, progress.total_bytes))
            self._write(f"{self._label} ... {done} of {total}")


def _bar(console: Console) -> bars.Progress:
    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def reporting(*, as_json: bool) -> Iterator[Output]:
    """Give a command its output, and turn the errors that users can cause into one line and an exit code.

    An option with a value that no run could accept is wrong usage (2); all else that fails is a failure (1).
    """
    output = Output(as_json=as_json)
    # What the library logs when it falls back is in the reports, with its reason; it need not be said twice.
    logging.getLogger("splitzip_aio").addHandler(logging.NullHandler())
    try:
        yield output
    except InvalidArgumentError as exc:
        output.error(exc)
        raise typer.Exit(2) from exc
    except BrokenPipeError:
        raise  # the reader of our output has gone: typer ends the process quietly
    except (SplitZipError, OSError) as exc:
        output.error(exc)
        raise typer.Exit(1) from exc
