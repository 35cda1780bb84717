"""What is streamed in these tests, and how to tell that it came through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import anyio
import torch

from splitzip_aio.abc import Arena
from splitzip_aio.arena import CudaArena
from splitzip_aio.cache import layer_name
from splitzip_aio.codec.dtypes import DTYPE_BITS
from splitzip_aio.telemetry import TransportStatistics
from splitzip_aio.transport import Transport, opening
from tests.cache.samples import Content, noise, weights

LAYERS = 10
LAYER_BYTES = 65_024
"""What each of the layers takes in the arena."""


def arena_of(device: str) -> type[Arena]:
    """The kind of arena that a test streams to."""
    return CudaArena if device == "cuda" else opening.HostArena


@dataclass(frozen=True)
class Sample:
    """A cache, and what is in it."""

    root: Path
    tensors: Mapping[str, Content]

    def check(self, layer: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors are those of the layer, byte for byte, with their dtypes and shapes."""
        expected = self._layers[layer]
        assert tensors.keys() == expected.keys()
        for name, (dtype, shape, data) in expected.items():
            tensor = tensors[name]
            assert raw(tensor) == data, name
            if DTYPE_BITS[dtype] >= 8:
                assert tuple(tensor.shape) == shape, name

    @cached_property
    def _layers(self) -> dict[str, dict[str, Content]]:
        """The tensors of each layer; kept, since long runs check a hundred thousand layers."""
        layers: dict[str, dict[str, Content]] = {}
        for name, content in self.tensors.items():
            layers.setdefault(layer_name(name), {})[name] = content
        return layers

    async def check_prefetch(self, transport: Transport, layer: str) -> None:
        """The layer comes through."""
        async with await transport.prefetch(layer) as lease:
            self.check(layer, lease.tensors)


def assert_idle(statistics: TransportStatistics) -> None:
    """Nothing is going on, and nothing is held."""
    ring, residency = statistics.ring, statistics.residency
    assert ring.free == ring.slots
    assert residency.loading == residency.waiting == residency.draining == residency.leased == 0
    assert statistics.io.in_flight == statistics.io.queued == 0


async def settled(transport: Transport) -> None:
    """Wait until what nobody waits for has landed, and every slot is back.

    The prefetcher may have been waiting for a slot for a load that was given up since: it is handed one, and gives it
    back when it next has a turn, which may be after that load's last read.
    """
    with anyio.fail_after(60):
        while True:
            statistics = transport.statistics()
            residency, ring = statistics.residency, statistics.ring
            if not residency.draining and not residency.loading and ring.free == ring.slots:
                return
            await anyio.sleep(0.001)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor on any device."""
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def ten_layers() -> dict[str, Content]:
    """``blocks.0`` to ``blocks.9``: a weight of five segments, one of every dtype, tied, empty and scalar tensors."""
    tensors: dict[str, Content] = {}
    for block in range(LAYERS):
        prefix = f"blocks.{block}"
        tensors |= {
            f"{prefix}.up.weight": ("BF16", (100, 96), weights(9600, block)),
            f"{prefix}.tied.weight": ("BF16", (100, 96), weights(9600, block)),
            f"{prefix}.down.weight": ("F32", (9, 1000), noise(36_000, block)),
            f"{prefix}.empty": ("F16", (0, 7), b""),
            f"{prefix}.scale": ("F32", (), noise(4, block)),
        }
        for place, dtype in enumerate(DTYPE_BITS):
            tensors[f"{prefix}.mixed.{dtype}"] = (dtype, (6, 20), noise(15 * DTYPE_BITS[dtype], 100 * block + place))
    # A layer whose bytes are those of an earlier one: stored once, streamed like any other.
    tensors |= {f"copy.0{name.removeprefix('blocks.3')}": tensors[name] for name in list(tensors) if "blocks.3" in name}
    return tensors
