"""Nothing lost, nothing leaked, nothing silent: long runs with faults on purpose, and counts of what came of them.

    python bench/soak.py mixed --minutes 30        a mixed load; what the process holds at the end against the start
    python bench/soak.py mixed --device cuda:0     the same on a GPU, by consumers whose streams lag behind at random
    python bench/soak.py runs --count 10000        seeded runs, each with its own transport, of each driver
    python bench/soak.py cancellations --count 100000
    python bench/soak.py flips --count 20000       single flipped bits in every part of a cache

Needs the tests beside it, and but for the second no GPU. Ends with an error as soon as a rule is broken; the seed
finds it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio

from splitzip_aio.drivers.rings import open_ring
from splitzip_aio.errors import DriverUnavailableError
from tests.faults.cancelling import cancel_many
from tests.faults.flipping import Flips, flip_many
from tests.faults.late import Expected
from tests.faults.seeded import BACKENDS, Tally, make_sample, run
from tests.faults.soaking import Drift, Footprints, Mix, soak
from tests.transport.samples import Sample

REPORT_EVERY_S = 30.0

began = time.monotonic()


class Reporter:
    """Prints the state of a run every half minute."""

    def __init__(self) -> None:
        self._next = time.monotonic() + REPORT_EVERY_S

    def __call__(self, *state: object) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + REPORT_EVERY_S
        print(f"{time.monotonic() - began:7.0f} s ", *state, flush=True)
        return True


def mixed(options: argparse.Namespace, sample: Sample) -> bool:
    reporter = Reporter()
    mix = Mix(
        sample,
        sample.root.parent / "model.safetensors",
        available(options.drivers),
        options.backends,
        Expected(sample, options.device) if options.late or options.device != "cpu" else None,
    )

    def report(tally: Tally, footprints: Footprints) -> None:
        if reporter(f"{tally.runs} rounds, {sum(tally.faults.values())} faults,", footprints[-1]):
            keep(options, found(options, tally, footprints))

    tally, footprints = soak(mix, options.minutes * 60, options.seed, report)
    keep(options, found(options, tally, footprints))
    drift = Drift.of(footprints)
    print("\n".join(tally.lines() + drift.lines()))
    return drift.small


def available(drivers: list[str]) -> list[str]:
    """Those of the drivers that can run here; says so if one cannot."""
    try:
        ring, _ = open_ring(1)
    except (DriverUnavailableError, OSError) as error:
        print(f"without uring: {error}", flush=True)
        return [driver for driver in drivers if driver != "uring"] or ["threads"]
    ring.close()
    return drivers


def found(options: argparse.Namespace, tally: Tally, footprints: Footprints) -> dict[str, Any]:
    """What came of a soak so far, with two hundred footprints of it at most."""
    some = footprints[:: len(footprints) // 200 + 1]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "device": options.device,
        "first_seed": options.seed,
        "drift": Drift.of(footprints).as_dict(),
        **tally.as_dict(),
        "footprints": [asdict(each) for each in some],
    }


def runs(options: argparse.Namespace, sample: Sample) -> bool:
    kept: dict[str, Any] = {}
    for driver in options.drivers:
        tally, reporter, start = Tally(), Reporter(), time.monotonic()
        for seed in range(options.seed, options.seed + options.count):
            run(sample, driver, seed, tally)
            if reporter(driver, f"{tally.runs} runs, {sum(tally.faults.values())} faults"):
                kept[driver] = tally.as_dict() | seeds_and_seconds(options.seed, tally.runs, start)
                keep(options, kept)
        print(f"{driver}:")
        print("\n".join(tally.lines()), flush=True)
        kept[driver] = tally.as_dict() | seeds_and_seconds(options.seed, tally.runs, start)
        keep(options, kept)
    return True


def seeds_and_seconds(first: int, count: int, start: float) -> dict[str, Any]:
    return {"first_seed": first, "last_seed": first + count - 1, "seconds": round(time.monotonic() - start, 1)}


def keep(options: argparse.Namespace, counts: dict[str, Any]) -> None:
    """Write the counts as JSON where ``--json`` says; what there is of a run that goes on, too."""
    if options.json is not None:
        options.json.write_text(json.dumps({"mode": options.mode} | counts, indent=1) + "\n")


def cancellations(options: argparse.Namespace, sample: Sample) -> bool:
    for driver in options.drivers:
        for backend in options.backends:
            share = options.count // (len(options.drivers) * len(options.backends))
            task = partial(cancel_many, sample, driver, share, seed=options.seed, rate=options.rate)
            print(f"{driver}, {backend}:")
            print("\n".join(anyio.run(task, backend=backend).lines()), flush=True)
    return True


def flips(options: argparse.Namespace, sample: Sample) -> bool:
    found = Flips()
    for each in (sample, make_sample(sample.root.parent, schedule="top16")):
        flip_many(each, options.count // 2, options.seed, found)
    print("\n".join(found.lines()))
    return not found.missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes: dict[str, tuple[Callable[[argparse.Namespace, Sample], bool], int]] = {
        "mixed": (mixed, 0),
        "runs": (runs, 10_000),
        "cancellations": (cancellations, 100_000),
        "flips": (flips, 20_000),
    }
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--minutes", type=float, default=10.0, help="mixed: how long")
    parser.add_argument("--count", type=int, help="the others: how many, by default what is promised")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="cancellations: how many reads complete late on purpose"
    )
    parser.add_argument("--drivers", nargs="+", default=["uring", "threads"], choices=["uring", "threads"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--device", default="cpu", help="mixed: where to stream to; on cuda consumers lag behind")
    parser.add_argument("--late", action="store_true", help="mixed: consumers as on a GPU, but on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="runs, mixed: a file to keep the counts in")
    options = parser.parse_args()
    act, usual = modes[options.mode]
    options.count = options.count or usual
    logging.getLogger("splitzip_aio").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        well = act(options, make_sample(Path(directory)))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{time.monotonic() - began:.0f} s, at most {most} KiB resident, {'all well' if well else 'NOT WELL'}")
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
