"""``splitzip-aio bench offload`` and its options."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from splitzip_aio.cli.bench.offload import render_offload, run_offload
from splitzip_aio.cli.bench.offload_peers import CONTENDERS
from splitzip_aio.cli.bench.offload_picture import draw_offload
from splitzip_aio.cli.bench.offload_subjects import SUBJECTS
from splitzip_aio.cli.bench.passes import Tier
from splitzip_aio.cli.output import reporting
from splitzip_aio.cli.streaming import best_device
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError
from splitzip_aio.units import parse_bytes

__all__ = ["offload"]

T = TypeVar("T")


def offload(
    *,
    model: Annotated[str, typer.Option("--model", help="flux, llama or plain.")] = "plain",
    gigabytes: Annotated[float | None, typer.Option("--gigabytes", help="Size of the model in BF16.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to make checkpoint and cache, and so on which disk.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    resident: Annotated[
        str | None, typer.Option("--resident", help="Bytes of weights that stay on the device; a quarter of them.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each; medians are reported.")] = 5,
    tiers: Annotated[
        str | None, typer.Option("--tiers", help="Only these of host-tier, page-cache and disk, with commas.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option("--peers", help="Only these others, with commas; an empty list is none.")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the times there, as a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Run a model that does not fit, beside other ways to do that."""
    with reporting(as_json=as_json) as output, ExitStack() as own:
        if model not in SUBJECTS:
            raise InvalidArgumentError(f"--model: expected one of {', '.join(SUBJECTS)}, found {model!r}")
        target = best_device(device)
        usual = SUBJECTS[model].gigabytes[target.type != "cuda"]
        size = usual if gigabytes is None else gigabytes
        if not size > 0:
            raise InvalidArgumentError(f"--gigabytes: expected more than 0, found {size}")
        subject = SUBJECTS[model](int(size * 1e9))
        if subject.missing is not None:
            raise UnsupportedError(f"--model {model}: {subject.missing}; install it, or take --model plain")
        if directory is None:
            directory = Path(own.enter_context(tempfile.TemporaryDirectory(prefix="splitzip-bench-")))
        report = run_offload(
            subject,
            directory,
            device=target,
            resident_bytes=None if resident is None else parse_bytes(resident, name="--resident"),
            tiers=_chosen(tiers, {tier.value.replace(" ", "-"): tier for tier in Tier}, "--tiers"),
            repeats=repeats,
            output=output,
            contenders=[CONTENDERS[0], *(_chosen(peers, {each.name: each for each in CONTENDERS[1:]}, "--peers") or ())]
            if peers is not None
            else CONTENDERS,
        )
        output.result(report, render_offload)
        if picture is not None:
            draw_offload(report, picture)


def _chosen(names: str | None, known: dict[str, T], option: str) -> list[T] | None:
    """What is known by each of the names, which have commas between them; None if there are none to choose by."""
    if names is None:
        return None
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if name not in known:
            raise InvalidArgumentError(f"{option}: expected some of {', '.join(known)}, found {name!r}")
    return [known[name] for name in wanted]
