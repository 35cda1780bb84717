"""Consumers that lag behind, on the CPU, where they do not: their bookkeeping, and that they find wrong bytes."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

from splitzip_aio.transport import open_transport
from tests.faults.late import Expected
from tests.faults.seeded import Tally
from tests.faults.soaking import Mix, mixed_round
from tests.transport.samples import Sample


def test_a_mixed_round(sample: Sample) -> None:
    tally = Tally()
    mixed_round(Mix(sample, Path("no rebuild"), late=Expected(sample, "cpu")), 1, tally)
    assert tally.runs == 1
    assert tally.outcomes["right bytes"] == tally.outcomes["used late"] > 0


def test_a_wrong_byte_is_found_and_its_layer_named(sample: Sample) -> None:
    expected = Expected(sample, "cpu")
    expected.layers["blocks.4"]["blocks.4.down.weight"][77] ^= 1

    async def main(layers: list[str]) -> None:
        async with open_transport(sample.root, device="cpu") as transport:
            await expected.use(transport, layers, None, random.Random(0), Tally())

    anyio.run(main, ["blocks.3", "blocks.5"])
    with pytest.raises(AssertionError, match=r"of 3 layers used: \{'blocks.4': 1\}"):
        anyio.run(main, ["blocks.3", "blocks.4", "blocks.5"])
