"""A flipped bit is noticed, in every part; ``python bench/soak.py flips`` flips twenty thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.flipping import Flips, flip_many
from tests.faults.seeded import make_sample

FLIPS = 400


@pytest.mark.parametrize("schedule", [None, "top16"])
def test_every_flipped_bit_is_noticed(tmp_path: Path, schedule: str | None) -> None:
    found = Flips()
    flip_many(make_sample(tmp_path, schedule=schedule), FLIPS, 1, found)
    print("\n".join(found.lines()))
    assert not found.missed
    assert sum(found.noticed.values()) == FLIPS
    assert found.noticed.keys() == {"manifest", "header", "codebook", "low", "codes", "index", "escapes"}
