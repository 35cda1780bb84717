"""Layers asked for round after round are on their way before they are asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from splitzip_aio.cache import build_cache
from splitzip_aio.telemetry import ResidencyStatistics
from splitzip_aio.transport import Transport, open_transport
from tests.cache.samples import weights, write_checkpoint
from tests.transport.samples import Sample, assert_idle, settled

pytestmark = pytest.mark.anyio

PASSES = 100


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Twelve layers of three segments and 8192 bytes each."""
    root = tmp_path_factory.mktemp("twelve")
    tensors = {f"blocks.{block}.weight": ("BF16", (64, 64), weights(4096, block)) for block in range(12)}
    build_cache(write_checkpoint(root / "model.safetensors", tensors), root / "cache", segment_elements=2048)
    return Sample(root / "cache", tensors)


async def rounds(sample: Sample, transport: Transport, order: Sequence[str], count: int) -> ResidencyStatistics:
    for layer in list(order) * count:
        await sample.check_prefetch(transport, layer)
    return transport.statistics().residency


async def test_twelve_layers_through_an_arena_of_three(twelve: Sample, device: str) -> None:
    """100 rounds, another order half-way: from the third round of each on, 95% are found ready or in flight."""
    async with open_transport(twelve.root, device=device, ring_bytes="1MiB", arena_bytes=3 * 8192) as transport:
        for shuffled in (False, True):
            order = list(transport.layers)
            if shuffled:
                random.Random(4).shuffle(order)
            learning = await rounds(twelve, transport, order, 2)
            known = await rounds(twelve, transport, order, PASSES // 2 - 2)
            demands = known.demands - learning.demands
            assert demands == 12 * (PASSES // 2 - 2)
            assert known.misses - learning.misses <= 0.05 * demands
            assert (known.hits + known.joins) - (learning.hits + learning.joins) >= 0.95 * demands
        await settled(transport)
        statistics = transport.statistics()
    assert statistics.arena.peak_bytes <= 3 * 8192
    assert_idle(statistics)


async def test_a_given_order_is_followed_from_the_first_demand_on(twelve: Sample, device: str) -> None:
    order = [f"blocks.{block}" for block in (7, 2, 9, 0, 11)]
    async with open_transport(
        twelve.root, device=device, ring_bytes="1MiB", arena_bytes=3 * 8192, order=order
    ) as transport:
        statistics = await rounds(twelve, transport, order, 20)
    assert (statistics.demands, statistics.misses) == (100, 1)
