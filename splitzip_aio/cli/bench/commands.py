"""The commands under ``splitzip-aio bench``, and their options."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

import splitzip_aio
from splitzip_aio.cli.bench.loaders import render_loaders, run_loaders
from splitzip_aio.cli.bench.offload_command import offload
from splitzip_aio.cli.bench.overlap import render_overlap, run_overlap
from splitzip_aio.cli.bench.passes import Streamer, Tier
from splitzip_aio.cli.bench.peers import PEERS, Peer
from splitzip_aio.cli.bench.workload import Workload, prepare
from splitzip_aio.cli.output import Output, reporting
from splitzip_aio.cli.streaming import best_device
from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.host_cache import HostCache
from splitzip_aio.units import parse_bytes

__all__ = ["bench"]

bench = typer.Typer(
    help="Time the pipeline beside its stages, and beside other loaders; no speed without the right bytes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

bench.command()(offload)

T = TypeVar("T")

_HOST_TABLES_BYTES = 64 << 20  # room for the tables of a small cache; a large one has the second half

Gigabytes: TypeAlias = Annotated[
    float | None, typer.Option("--gigabytes", help="Size of the checkpoint; 5.9, or 0.3 without a GPU.")
]
Checkpoint: TypeAlias = Annotated[
    Path | None, typer.Option("--checkpoint", help="Use this checkpoint, file or directory, instead of a made-up one.")
]
Scratch: TypeAlias = Annotated[
    Path | None,
    typer.Option("--dir", help="Where to keep checkpoint and cache for the next run; else nowhere."),
]
Device: TypeAlias = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Repeats: TypeAlias = Annotated[int, typer.Option("--repeats", min=1, help="Runs of each thing; medians are reported.")]
Tiers: TypeAlias = Annotated[
    str | None, typer.Option("--tiers", help="Only these of disk, page-cache and host-tier, with commas; else all.")
]
Ring: TypeAlias = Annotated[str, typer.Option("--ring", help="Bytes of the staging ring.")]
Picture: TypeAlias = Annotated[
    Path | None, typer.Option("--timeline", help="Draw a pass there, as a PNG; its trace goes beside it, as JSON.")
]
Peers: TypeAlias = Annotated[
    str | None, typer.Option("--peers", help="Only these other loaders, with commas; else all.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@bench.command()
def overlap(
    *,
    gigabytes: Gigabytes = None,
    checkpoint: Checkpoint = None,
    directory: Scratch = None,
    device: Device = "auto",
    repeats: Repeats = 5,
    tiers: Tiers = None,
    ring: Ring = "128MiB",
    timeline: Picture = None,
    as_json: Json = False,
) -> None:
    """Time each stage alone, then all together, from each tier."""
    with reporting(as_json=as_json) as output:
        chosen = _tiers(tiers)
        with _streamer(gigabytes, checkpoint, directory, device, ring, output) as streamer:
            report = run_overlap(streamer, chosen, repeats=repeats, output=output, timeline=timeline)
        output.result(report, render_overlap)


@bench.command()
def loaders(
    *,
    gigabytes: Gigabytes = None,
    checkpoint: Checkpoint = None,
    directory: Scratch = None,
    device: Device = "auto",
    repeats: Repeats = 5,
    tiers: Tiers = None,
    ring: Ring = "128MiB",
    peers: Peers = None,
    as_json: Json = False,
) -> None:
    """Load a checkpoint beside other loaders, from each tier."""
    with reporting(as_json=as_json) as output:
        chosen = _tiers(tiers)
        wanted = _peers(peers)
        with _streamer(gigabytes, checkpoint, directory, device, ring, output) as streamer:
            report = run_loaders(streamer, chosen, repeats=repeats, output=output, peers=wanted)
        output.result(report, render_loaders)


def _tiers(names: str | None) -> tuple[Tier, ...]:
    """The tiers of these names; all that there are by default."""
    known = {tier.value.replace(" ", "-"): tier for tier in Tier}
    return tuple(known.values()) if names is None else tuple(_named(known, names, "--tiers"))


def _peers(names: str | None) -> tuple[Peer, ...]:
    known = {peer.name: peer for peer in PEERS}
    return PEERS if names is None else tuple(_named(known, names, "--peers"))


def _named(known: Mapping[str, T], names: str, option: str) -> Iterator[T]:
    """What is known by each of the names, which have commas between them."""
    for name in filter(None, names.split(",")):
        if name not in known:
            raise InvalidArgumentError(f"{option}: expected some of {', '.join(known)}, found {name!r}")
        yield known[name]


@contextmanager
def _streamer(
    gigabytes: float | None, checkpoint: Path | None, directory: Path | None, device: str, ring: str, output: Output
) -> Iterator[Streamer]:
    """Make what is streamed, in a folder that stays or in one that goes."""
    target = best_device(device)
    size = gigabytes if gigabytes is not None else (5.9 if target.type == "cuda" else 0.3)
    if not size > 0:
        raise InvalidArgumentError(f"--gigabytes: expected more than 0, found {size}")
    ring_bytes = parse_bytes(ring, name="--ring")
    with ExitStack() as own:
        if directory is None:
            directory = Path(own.enter_context(tempfile.TemporaryDirectory(prefix="splitzip-bench-")))
        workload = prepare(directory, int(size * 1e9), checkpoint=checkpoint, device=target, output=output)
        host = own.enter_context(HostCache(2 * workload.compressed_bytes + _HOST_TABLES_BYTES))
        yield Streamer(workload, target, ring_bytes, _arena_bytes(workload), host)


def _arena_bytes(workload: Workload) -> int:
    """A third of the model, so that each pass streams all of it, but three of the largest layers at least."""
    with splitzip_aio.SplitZipShardCache(workload.cache) as cache:
        largest = max(sum(entry.nbytes for entry in layer) for layer in cache.layers.values())
    return max(workload.raw_bytes // 3, 3 * largest)
