"""Layers come through byte for byte, whatever the sizes, the order, the driver and the number who ask."""

from __future__ import annotations

import random

import anyio
import pytest
import torch

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.drivers.rings import open_ring
from splitzip_aio.errors import DriverUnavailableError, InvalidArgumentError, LayerTooLargeError, LeaseReleasedError
from splitzip_aio.plan import largest_read_bytes
from splitzip_aio.transport import open_transport
from tests.transport.samples import LAYER_BYTES, Sample, arena_of, assert_idle, settled

pytestmark = pytest.mark.anyio


async def test_every_layer_in_order(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="4MiB") as transport:
        assert len(transport.layers) == 11
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    assert_idle(statistics)
    assert_idle(transport.statistics())
    assert statistics.residency.loaded == statistics.residency.demands == 11
    assert statistics.decoded_bytes == sum(
        len(data) for name, (_, _, data) in sample.tensors.items() if ".tied." not in name
    )
    assert statistics.device.startswith(device)


async def test_an_arena_is_no_larger_than_all_layers(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="4MiB", arena_bytes="1GiB") as transport:
        for layer in transport.layers * 2:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    assert statistics.arena.capacity_bytes == statistics.arena.used_bytes == 11 * LAYER_BYTES
    assert statistics.residency.loaded == statistics.residency.resident == 11
    assert statistics.residency.demands == 22
    assert statistics.residency.evictions == 0


@pytest.mark.parametrize(("multiple", "slots"), [(1, 1), (2, 2), (3, 3)])
async def test_a_ring_smaller_than_a_layer(sample: Sample, device: str, multiple: int, slots: int) -> None:
    with SplitZipShardCache(sample.root) as cache:
        payload = largest_read_bytes(cache.tensors.values())
    least = payload + arena_of(device).table_bytes(payload)
    with pytest.raises(LayerTooLargeError, match=rf"slot of {least} bytes, and the ring has {least - 1}"):
        async with open_transport(sample.root, device=device, ring_bytes=least - 1):
            pass
    async with open_transport(sample.root, device=device, ring_bytes=multiple * least) as transport:
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    assert statistics.ring.slots == slots
    assert statistics.ring.acquired >= 3 * len(transport.layers)
    assert_idle(statistics)


async def test_an_arena_of_two_layers_for_ten(sample: Sample, device: str) -> None:
    order = [f"blocks.{number}" for number in range(10)] * 3
    random.Random(7).shuffle(order)
    async with open_transport(sample.root, device=device, ring_bytes="2MiB", arena_bytes=2 * LAYER_BYTES) as transport:
        for layer in order:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    assert statistics.arena.peak_bytes <= 2 * LAYER_BYTES
    assert statistics.residency.evictions >= 8
    assert_idle(statistics)


@pytest.mark.parametrize("arena_layers", [1, 2, 11])
async def test_100_at_once(sample: Sample, device: str, arena_layers: int) -> None:
    async with open_transport(
        sample.root, device=device, ring_bytes="1MiB", arena_bytes=arena_layers * LAYER_BYTES
    ) as transport:
        async with anyio.create_task_group() as group:
            for number in range(100):
                layer = transport.layers[number * 7 % len(transport.layers)]
                group.start_soon(sample.check_prefetch, transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    assert statistics.residency.demands == 100
    residency = statistics.residency
    assert residency.hits + residency.joins + residency.misses == 100
    assert residency.loaded == residency.misses + residency.read_ahead - residency.abandoned
    assert_idle(statistics)


async def test_tied_tensors_share_memory(sample: Sample, device: str) -> None:
    async with (
        open_transport(sample.root, device=device, ring_bytes="1MiB") as transport,
        await transport.prefetch("blocks.1") as lease,
    ):
        one, other = lease.tensors["blocks.1.up.weight"], lease.tensors["blocks.1.tied.weight"]
        assert one.data_ptr() == other.data_ptr()
        assert one.dtype is torch.bfloat16
        assert one.device.type == device
        assert lease.tensors["blocks.1.mixed.BOOL"].dtype is torch.bool
        assert lease.tensors["blocks.1.empty"].shape == (0, 7)
        assert lease.tensors["blocks.1.scale"].shape == ()


async def test_a_layer_is_there_as_bytes_too(sample: Sample, device: str) -> None:
    async with (
        open_transport(sample.root, device=device, ring_bytes="1MiB") as transport,
        await transport.prefetch("blocks.1") as lease,
    ):
        assert lease.offsets.keys() == lease.tensors.keys()
        assert len(lease.offsets) > 1
        for name, offset in lease.offsets.items():
            data = sample.tensors[name][2]
            target = torch.full((len(data),), 0xA5, dtype=torch.uint8, device=device)
            lease.copy_to(target, offset)
            assert offset % 256 == 0
            assert bytes(target.cpu().numpy().data) == data
        end = max(offset + len(sample.tensors[name][2]) for name, offset in lease.offsets.items())
        for outside in (-1, end + 256):
            with pytest.raises(InvalidArgumentError, match=f"found 1 bytes at {outside}"):
                lease.copy_to(torch.empty(1, dtype=torch.uint8, device=device), outside)
        room = torch.zeros(4, 4, dtype=torch.uint8, device=device)
        for wrong in (room.view(torch.int16), room.T, room.to("meta")):
            with pytest.raises(InvalidArgumentError, match="target: expected contiguous uint8 on"):
                lease.copy_to(wrong, 0)
        assert not room.any()
    with pytest.raises(LeaseReleasedError):
        lease.copy_to(target, 0)


@pytest.fixture(params=["uring", "threads"])
def driver(request: pytest.FixtureRequest) -> str:
    if request.param == "uring":
        try:
            open_ring(1)[0].close()
        except (DriverUnavailableError, OSError) as exc:
            pytest.skip(f"no io_uring here: {exc}")
    return str(request.param)


@pytest.mark.parametrize("io", ["auto", "buffered"])
async def test_drivers_and_modes_give_the_same_bytes(sample: Sample, device: str, driver: str, io: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="2MiB", driver=driver, io=io) as transport:
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    assert statistics.io.name == driver
    assert statistics.io.fixed_buffers == (driver == "uring")
    if io == "buffered":
        assert statistics.direct_files == statistics.io.direct_bytes_read == 0
        assert statistics.fallbacks == ()
    elif statistics.direct_files:
        assert statistics.direct_files == statistics.files
    assert statistics.direct_bytes + statistics.buffered_bytes == statistics.io.bytes_read
    assert statistics.io.bytes_read + statistics.mapped_bytes > 0
    assert statistics.mapped_bytes == 0 or (io, device) == ("auto", "cpu")


async def test_an_open_cache_is_used_and_left_open(sample: Sample, device: str) -> None:
    with SplitZipShardCache(sample.root) as cache:
        async with open_transport(cache, device=device, ring_bytes="1MiB") as transport:
            await sample.check_prefetch(transport, "blocks.5")
        assert not cache.closed


async def test_layers_can_be_grouped_otherwise(sample: Sample, device: str) -> None:
    async with open_transport(
        sample.root, device=device, ring_bytes="1MiB", layer_of=lambda name: name.split(".")[2]
    ) as transport:
        assert set(transport.layers) == {"up", "tied", "down", "empty", "scale", "mixed"}
        async with await transport.prefetch("empty") as lease:
            assert all(tensor.shape == (0, 7) for tensor in lease.tensors.values())
            assert len(lease.tensors) == 11
        async with await transport.prefetch("up") as lease:
            assert len(lease.tensors) == 11


async def test_two_transports_of_one_cache_are_independent(sample: Sample, device: str) -> None:
    async with (
        open_transport(sample.root, device=device, ring_bytes="1MiB") as one,
        open_transport(sample.root, device=device, ring_bytes="1MiB") as other,
        anyio.create_task_group() as group,
    ):
        for layer in one.layers:
            group.start_soon(sample.check_prefetch, one, layer)
            group.start_soon(sample.check_prefetch, other, layer)


async def test_what_is_evicted_is_brought_anew(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device) as transport:
        async with await transport.prefetch("blocks.0") as held:
            await sample.check_prefetch(transport, "blocks.1")
            await settled(transport)
            held.tensors["blocks.0.up.weight"].zero_()
            decoded = transport.statistics().decoded_bytes
            transport.evict()
            assert transport.statistics().residency.resident == 1
            assert not held.released
        transport.evict()
        assert transport.statistics().residency.resident == 0
        await sample.check_prefetch(transport, "blocks.0")
        assert transport.statistics().decoded_bytes > decoded
