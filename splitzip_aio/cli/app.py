"""The commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import anyio
import typer

import splitzip_aio
from splitzip_aio.cli import render
from splitzip_aio.cli.bench.commands import bench
from splitzip_aio.cli.demo import run_demo
from splitzip_aio.cli.doctor import examine
from splitzip_aio.cli.output import reporting
from splitzip_aio.cli.streaming import best_device, stream_cache
from splitzip_aio.cli.summary import summarize
from splitzip_aio.drivers import DriverName
from splitzip_aio.units import parse_bytes

__all__ = ["app"]

app = typer.Typer(
    name="splitzip-aio",
    help="Losslessly compressed checkpoints, streamed asynchronously and decoded bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"splitzip-aio {splitzip_aio.__version__}")
        raise typer.Exit


Version: TypeAlias = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
]
Sources: TypeAlias = Annotated[
    list[Path], typer.Argument(metavar="SRC...", help="Safetensors files or directories of them.", show_default=False)
]
Out: TypeAlias = Annotated[
    Path, typer.Argument(metavar="OUT", help="Directory to make the cache in.", show_default=False)
]
Cache: TypeAlias = Annotated[Path, typer.Argument(metavar="CACHE", help="Directory of a cache.", show_default=False)]
Force: TypeAlias = Annotated[
    bool, typer.Option("--force", help="Replace the cache that is there; it stays until the new one is complete.")
]
ScheduleText: TypeAlias = Annotated[
    str | None,
    typer.Option("--schedule", help="top16, stored, or widths such as 2,2,3, for every tensor; else the smallest."),
]
CoverageMin: TypeAlias = Annotated[
    float | None,
    typer.Option("--coverage-min", help="Store tensors whose 16 commonest exponents cover less than this share."),
]
Device: TypeAlias = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Driver: TypeAlias = Annotated[DriverName, typer.Option("--driver", help="What reads the packs.")]
Checkpoint: TypeAlias = Annotated[
    Path | None, typer.Option("--checkpoint", help="Use this checkpoint, file or directory, instead of a made-up one.")
]
Size: TypeAlias = Annotated[str, typer.Option("--size", help="Bytes of the checkpoint that is made up.")]
Scratch: TypeAlias = Annotated[
    Path | None, typer.Option("--dir", help="Where to put scratch files; else where temporary files go.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.callback()
def options(*, version: Version = False) -> None:
    """Losslessly compressed checkpoints, streamed asynchronously and decoded bit for bit."""


@app.command(no_args_is_help=True)
def build(
    sources: Sources,
    out: Out,
    *,
    force: Force = False,
    schedule: ScheduleText = None,
    coverage_min: CoverageMin = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compress safetensors checkpoints into a cache."""
    with reporting(as_json=as_json) as output:
        with output.progress(f"build {out}") as progress:
            report = splitzip_aio.build_cache(
                sources,
                out,
                force=force,
                schedule=schedule,
                coverage_min=coverage_min,
                device=str(best_device(device)),
                progress=progress,
            )
        output.result(report, render.build, ratio=report.ratio)


@app.command(no_args_is_help=True)
def inspect(cache: Cache, *, as_json: Json = False) -> None:
    """Show what is in a cache, without reading its packs."""
    with reporting(as_json=as_json) as output:
        output.result(summarize(cache), render.summary)


@app.command(no_args_is_help=True)
def verify(cache: Cache, *, as_json: Json = False) -> None:
    """Check every byte of a cache; name each damaged tensor."""
    with reporting(as_json=as_json) as output:
        with output.progress(f"verify {cache}") as progress, splitzip_aio.SplitZipShardCache(cache) as opened:
            report = opened.verify(progress)
        output.result(report, render.verification, ok=report.ok)
        if not report.ok:
            raise typer.Exit(1)


@app.command(no_args_is_help=True)
def load(cache: Cache, *, device: Device = "auto", driver: Driver = "auto", as_json: Json = False) -> None:
    """Stream a cache to a device, and say how that went."""
    with reporting(as_json=as_json) as output:
        target = best_device(device)
        total_bytes = summarize(cache).raw_bytes
        with output.progress(f"stream {cache} to {target}") as progress:
            stream = partial(
                stream_cache, cache, device=target, driver=driver, total_bytes=total_bytes, progress=progress
            )
            report = anyio.run(stream)
        output.result(report, render.stream)


@app.command()
def demo(
    *,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
    size: Size = "256MiB",
    directory: Scratch = None,
    as_json: Json = False,
) -> None:
    """Compress a checkpoint, stream it, compare every bit."""
    with reporting(as_json=as_json) as output:
        report = run_demo(
            checkpoint,
            size=parse_bytes(size, name="--size"),
            directory=directory,
            device=best_device(device),
            output=output,
        )
        output.result(report, render.demo)
        if not report.bit_exact:
            raise typer.Exit(1)


@app.command()
def doctor(*, as_json: Json = False) -> None:
    """Show what this machine offers and what it lacks."""
    with reporting(as_json=as_json) as output:
        found = examine(Path.cwd())
        output.result(found, render.examination)
        if not found.healthy:
            raise typer.Exit(1)
