"""Seeded runs with faults of every kind; ``python bench/soak.py runs --count 10000`` makes more of them."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from splitzip_aio.drivers import DriverName, open_driver
from splitzip_aio.drivers.faults import FaultKind
from splitzip_aio.drivers.files import direct_support
from splitzip_aio.errors import DriverUnavailableError
from tests.faults.seeded import Tally, make_sample, run
from tests.transport.samples import Sample

RUNS = 120


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each run says that it has faults, and what it fell back from."""
    logger = logging.getLogger("splitzip_aio")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("driver", ["uring", "threads"])
def test_right_bytes_or_one_error_and_nothing_left(sample: Sample, driver: DriverName) -> None:
    if driver == "uring":
        skip_without_uring()
    tally = Tally()
    for seed in range(RUNS):
        run(sample, driver, seed, tally)
    print("\n".join(tally.lines()))
    assert {kind for kind, count in tally.faults.items() if count} == possible(sample.root, driver)
    assert {"right bytes", "cancelled", "ReadError", "CorruptDataError"} <= tally.outcomes.keys()


def skip_without_uring() -> None:
    memory = mmap.mmap(-1, 4096)
    try:
        driver = open_driver("uring", buffers=[memoryview(memory)])
    except DriverUnavailableError as error:
        pytest.skip(str(error))
    anyio.run(driver.aclose)


def possible(root: Path, driver: DriverName) -> set[FaultKind]:
    """Threads register nothing, and not every file system reads directly."""
    kinds = set(FaultKind)
    if driver == "threads":
        kinds.remove(FaultKind.ENOMEM_REGISTERING)
    with (root / "manifest.json").open("rb") as file:
        if not direct_support(file.fileno()).supported:
            kinds.remove(FaultKind.EINVAL_DIRECT)
    return kinds
