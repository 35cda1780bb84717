"""Cancellation at any moment: nothing leaks, and nobody else notices."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest
from anyio.lowlevel import checkpoint

from splitzip_aio.transport import Transport, open_transport
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

pytestmark = pytest.mark.anyio

RUNS = 500


async def cancelled_somewhere(sample: Sample, transport: Transport, layer: str, chance: random.Random) -> None:
    """Prefetch and use a layer, and be cancelled after some steps of the event loop or some time."""

    async def use() -> None:
        async with await transport.prefetch(layer) as lease:
            sample.check(layer, lease.tensors)
            await anyio.sleep(chance.random() * 0.002)
            sample.check(layer, lease.tensors)

    async with anyio.create_task_group() as group:
        group.start_soon(use)
        if chance.random() < 0.5:
            for _ in range(chance.randrange(300)):
                await checkpoint()
        else:
            await anyio.sleep(chance.random() ** 2 * 0.04)
        group.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(5))
async def test_prefetches_cancelled_at_random_points(sample: Sample, device: str, seed: int) -> None:
    """Many tasks on one transport, cancelled now and then; the layers they leave behind are right for the others."""
    chance = random.Random(seed)
    async with open_transport(
        sample.root, device=device, ring_bytes="1MiB", arena_bytes=3 * LAYER_BYTES, driver="threads"
    ) as transport:
        for _ in range(RUNS // 5 // 10):
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    layer = chance.choice(transport.layers)
                    group.start_soon(cancelled_somewhere, sample, transport, layer, chance)
            await settled(transport)
            assert_idle(transport.statistics())
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        assert_idle(transport.statistics())


async def test_transports_cancelled_at_random_points(sample: Sample, device: str) -> None:
    """The whole block is cancelled, wherever it is: opening, waiting, using or closing."""
    chance = random.Random(0)
    for _ in range(RUNS // 5):
        transport = None
        with anyio.move_on_after(chance.random() * 0.02):
            async with (
                open_transport(
                    sample.root, device=device, ring_bytes="1MiB", arena_bytes=2 * LAYER_BYTES, driver="threads"
                ) as transport,
                anyio.create_task_group() as group,
            ):
                for _ in range(3):
                    group.start_soon(sample.check_prefetch, transport, chance.choice(transport.layers))
        if transport is not None:
            assert_idle(transport.statistics())
            assert transport.statistics().io.open_files == 0


async def test_tasks_cancelled_by_asyncio_itself_at_random_points(
    sample: Sample, device: str, anyio_backend_name: str
) -> None:
    """``Task.cancel`` and ``asyncio.timeout`` pass through the shields of anyio's scopes."""
    if anyio_backend_name != "asyncio":
        pytest.skip("only asyncio cancels so")
    chance = random.Random(1)
    transports: list[Transport] = []

    async def stream() -> None:
        async with open_transport(sample.root, device=device, ring_bytes="1MiB", driver="threads") as transport:
            transports.append(transport)
            for layer in transport.layers:
                await sample.check_prefetch(transport, layer)

    patience_s = 0.03
    for _ in range(RUNS // 5):
        task = asyncio.create_task(stream())
        await asyncio.sleep(chance.random() * patience_s)
        while not task.done():
            task.cancel()
            await asyncio.sleep(chance.random() * 0.005)
        assert task.cancelled() or task.exception() is None
        if not transports:  # a machine on which opening takes longer
            patience_s *= 1.2
    assert transports
    for transport in transports:
        assert_idle(transport.statistics())
        assert transport.statistics().io.open_files == 0


async def test_a_layer_nobody_waits_for_is_read_no_further(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="1MiB", layer_of=lambda name: "all") as transport:
        with anyio.move_on_after(0):
            await transport.prefetch("all")
        await settled(transport)
        statistics = transport.statistics()
        assert statistics.residency.abandoned == 1
        assert statistics.arena.used_bytes == 0
        assert statistics.decoded_bytes < sum(len(data) for _, _, data in sample.tensors.values()) / 2
        async with await transport.prefetch("all") as lease:
            assert lease.tensors.keys() == sample.tensors.keys()


async def test_others_who_wait_for_the_layer_get_it(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="1MiB") as transport:
        async with anyio.create_task_group() as group, anyio.create_task_group() as doomed:
            for _ in range(3):
                doomed.start_soon(transport.prefetch, "blocks.1")
                group.start_soon(sample.check_prefetch, transport, "blocks.1")
            await checkpoint()
            await checkpoint()
            doomed.cancel_scope.cancel()
        statistics = transport.statistics()
        assert statistics.residency.loaded == 1
        assert statistics.residency.abandoned == 0
        assert_idle(statistics)
