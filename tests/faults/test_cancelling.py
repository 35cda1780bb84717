"""Cancelled prefetches give their slots back; ``python bench/soak.py cancellations`` cancels a hundred thousand."""

from __future__ import annotations

import logging

import pytest

from splitzip_aio.drivers import DriverName
from tests.faults.cancelling import cancel_many
from tests.faults.test_seeded import skip_without_uring
from tests.transport.samples import Sample

COUNT = 60

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("driver", ["uring", "threads"])
async def test_none_is_lost(sample: Sample, driver: DriverName, rate: float, caplog: pytest.LogCaptureFixture) -> None:
    if driver == "uring":
        skip_without_uring()
    with caplog.at_level(logging.ERROR, "splitzip_aio"):
        found = await cancel_many(sample, driver, COUNT, seed=1, rate=rate)
    print("\n".join(found.lines()))
    assert found.cancelled == len(found.waits_s) == COUNT
