"""More than 2,000 changed bytes in all parts of segments, each noticed by the decode kernel or by who feeds it."""

from __future__ import annotations

import pytest

from tests.codec.corruption import SAMPLES, Sample, check_changed_bytes

pytestmark = pytest.mark.gpu
ROUNDS, COPIES = 2, 90


def test_there_are_enough() -> None:
    assert len(SAMPLES) * ROUNDS * COPIES >= 2000


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_changed_byte_is_noticed(sample: Sample, seed: int) -> None:
    changed = check_changed_bytes(sample, COPIES, device="cuda", seed=seed)
    assert {"header", "low"} <= changed
    assert (sample.schedule == "stored") != ({"codes", "index"} <= changed)
