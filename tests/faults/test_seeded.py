"""Seeded runs with faults of every kind; ``python bench/soak.py runs --count 10000`` makes more of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from splitzip_aio.drivers import DriverName
from splitzip_aio.drivers.faults import FaultKind
from splitzip_aio.drivers.files import direct_support
from splitzip_aio.drivers.rings import open_ring
from splitzip_aio.errors import DriverUnavailableError
from tests.faults.seeded import Tally, run
from tests.transport.samples import Sample

RUNS = 60


@pytest.mark.parametrize("driver", ["uring", "threads"])
def test_right_bytes_or_one_error_and_nothing_left(
    sample: Sample, driver: DriverName, caplog: pytest.LogCaptureFixture
) -> None:
    if driver == "uring":
        skip_without_uring()
    tally = Tally()
    with caplog.at_level(logging.ERROR, "splitzip_aio"):
        for seed in range(RUNS):
            run(sample, driver, seed, tally)
    print("\n".join(tally.lines()))
    assert {kind for kind, count in tally.faults.items() if count} == possible(sample.root, driver)
    assert {"right bytes", "cancelled", "ReadError", "CorruptDataError"} <= tally.outcomes.keys()


def skip_without_uring() -> None:
    try:
        ring, _ = open_ring(1)
    except (DriverUnavailableError, OSError) as error:
        pytest.skip(f"no io_uring here: {error}")
    ring.close()


def possible(root: Path, driver: DriverName) -> set[FaultKind]:
    """Threads register nothing, and not every file system reads directly."""
    kinds = set(FaultKind)
    if driver == "threads":
        kinds.remove(FaultKind.ENOMEM_REGISTERING)
    with (root / "manifest.json").open("rb") as file:
        if not direct_support(file.fileno()).supported:
            kinds.remove(FaultKind.EINVAL_DIRECT)
    return kinds
