"""The vmm_fast drop-in on a GPU: order between streams, and the real allocator."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError
from splitzip_aio.vmm_fast import SplitZipNativeShardTransport, bind_slice_aliases, enable_splitzip_fast_transport
from tests.gpu.test_out_of_memory import limited

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
LAYERS, ELEMENTS = 12, 300_000
LONG_CYCLES = 100_000_000


@dataclass(frozen=True)
class Slice:
    path: Path
    offset_bytes: int
    size_bytes: int


@dataclass
class Weight:
    file_slice: Slice
    offset: int
    nbytes: int
    signature: int | None = None


class Memory:
    """An arena that is a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cuda")

    def view(self, native: Any, offset: int, nbytes: int) -> torch.Tensor:
        assert native is self
        return self.bytes[offset : offset + nbytes]

    def peek_range_signature(self, offset: int, nbytes: int) -> None:
        return None


@pytest.fixture
def layers(tmp_path: Path) -> tuple[list[Weight], list[torch.Tensor], Path]:
    """Weights one behind the other, their contents, and a cache of them."""
    torch.manual_seed(0)
    tensors = {f"blocks.{n}.weight": (torch.randn(ELEMENTS) * 0.02).bfloat16() for n in range(LAYERS)}
    save_file(tensors, tmp_path / "model.safetensors")
    build_cache(tmp_path / "model.safetensors", tmp_path / "cache", segment_elements=1 << 16)
    places = {tensor.name: tensor for tensor in open_checkpoint(tmp_path / "model.safetensors").tensors}
    weights = []
    for number, name in enumerate(tensors):
        place = places[name]
        found = Slice(tmp_path / "model.safetensors", place.offset, place.nbytes)
        weights.append(Weight(found, number * (place.nbytes + 256) // 256 * 256, place.nbytes))
    return weights, [tensor.view(torch.uint8).cuda() for tensor in tensors.values()], tmp_path / "cache"


@pytest.mark.parametrize("slow", ["consumer", "neither"])
def test_nothing_is_overwritten_before_it_is_copied(
    layers: tuple[list[Weight], list[torch.Tensor], Path], slow: str
) -> None:
    """The consumer's stream is held up while the arena, which holds two layers, is filled again and again."""
    weights, contents, cache = layers
    memory = Memory(sum(weight.nbytes + 512 for weight in weights))
    stream = torch.cuda.Stream()
    units = [SimpleNamespace(module_name=f"blocks.{n}", tensors=[weight]) for n, weight in enumerate(weights)]
    inner = SimpleNamespace(size_bytes=1, read_seconds=0, read_bytes=0, slot_waits=0, slot_wait_seconds=0)
    store = SimpleNamespace(_native_shard_transport=inner, _upload_stream=stream, _device_ordinal=0)
    with enable_splitzip_fast_transport(
        store,
        cache,
        adapter=SimpleNamespace(_execution_units=units),
        arena_view_fn=memory.view,
        ring_bytes="2MiB",
        arena_bytes=2 * weights[0].nbytes + 512,
        group_bytes=1,
    ) as transport:
        for turn in range(12):
            memory.bytes.fill_(0xA5)
            torch.cuda.synchronize()
            order = list(range(LAYERS)) if turn % 2 else list(range(LAYERS))[::-1]
            events = []
            for number in order:
                if slow == "consumer":
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(LONG_CYCLES // LAYERS)
                events.append(transport.upload_batch([weights[number]], memory, stream))
            for number, event in zip(order, events, strict=True):
                torch.cuda.current_stream().wait_event(event)
                weight = weights[number]
                assert torch.equal(memory.bytes[weight.offset : weight.offset + weight.nbytes], contents[number]), turn
        assert transport.statistics().transport.residency.evictions > LAYERS
    assert store._native_shard_transport is inner


def test_out_of_memory_is_said(layers: tuple[list[Weight], list[torch.Tensor], Path]) -> None:
    """Of memory that this process may have: the device is other tests' as well."""
    weights, _, cache = layers
    units = [SimpleNamespace(module_name="all", tensors=weights)]
    inner = SimpleNamespace(size_bytes=1)
    store = SimpleNamespace(_native_shard_transport=inner, _upload_stream=torch.cuda.Stream(), _device_ordinal=0)
    with limited(16 << 20), pytest.raises(InvalidArgumentError, match="bytes left"):
        enable_splitzip_fast_transport(
            store,
            cache,
            adapter=SimpleNamespace(_execution_units=units),
            arena_view_fn=lambda *_: torch.empty(0),
            ring_bytes="256MiB",
        )
    assert store._native_shard_transport is inner


@contextmanager
def real_consumer(directory: Path) -> Iterator[Any]:
    """A model of 13 MB on the real allocator; not attached yet."""
    pytest.importorskip("ddo_vmm_allocator", reason="not installed: pip install '.[ddo]'")
    pytest.importorskip("cuda.core", reason="not installed: pip install '.[ddo]'")
    from tests.vmm_fast import host

    directory.mkdir()
    with host.consumer(directory, width=768, blocks=4, device="cuda") as opened:
        yield opened


def native_library() -> Any:
    from ddo_vmm_allocator.native import load_native_vmm

    package = Path(importlib.util.find_spec("ddo_vmm_allocator").origin).parent
    return load_native_vmm(str(package / "native" / "linux" / "libddo_vmm.so"))


def cached(opened: Any, root: Path, share: str) -> SplitZipShardCache:
    if share == "all":
        build_cache(opened.shards, root, segment_elements=1 << 18)
        return SplitZipShardCache(root)
    tensors = load_file(opened.shards[0]) | load_file(opened.shards[1])
    part = {name: tensors[name] for name in sorted(tensors)[::2]} if share == "half" else {"other": torch.zeros(8)}
    save_file(part, root.with_suffix(".safetensors"))
    build_cache(root.with_suffix(".safetensors"), root, segment_elements=1 << 18)
    cache = SplitZipShardCache(root)
    bind_slice_aliases(opened.model, cache)
    return cache


@pytest.mark.parametrize("budget", [5 << 20, 12 << 20, 64 << 20])
@pytest.mark.parametrize("share", ["all", "half", "none"])
def test_passes_on_the_real_allocator(tmp_path: Path, share: str, budget: int) -> None:
    with real_consumer(tmp_path / "model") as opened, cached(opened, tmp_path / "cache", share) as cache:
        opened.attach(budget, library=native_library(), slot_bytes=1 << 20)
        transport = enable_splitzip_fast_transport(opened.store, cache, adapter=opened.adapter, ring_bytes="16MiB")
        orders: Sequence[Sequence[int] | None] = (None, None, None, [0, 2, 3], None, [3, 2, 1, 0], [], None)
        for order in orders:
            opened.run(order)
        statistics = transport.statistics()
        assert (statistics.uploads > 0) == (share != "none")
        assert (statistics.native_uploads > 0) == (share != "all")
        transport.close()
        assert not isinstance(opened.store._native_shard_transport, SplitZipNativeShardTransport)
        for order in orders:
            opened.run(order)


def test_tickets_on_the_real_allocator(tmp_path: Path) -> None:
    with real_consumer(tmp_path / "model") as opened, cached(opened, tmp_path / "cache", "half") as cache:
        opened.attach(64 << 20, library=native_library(), slot_bytes=1 << 20)
        store, units = opened.store, opened.adapter._execution_units
        with enable_splitzip_fast_transport(store, cache, adapter=opened.adapter, ring_bytes="16MiB"):
            for unit in units:
                opened.adapter._prefetch_next_unit(unit)
            opened.run()
            assert store.runtime_stats()["prefetch_hits"] > 0


def test_corruption_on_the_real_allocator(tmp_path: Path) -> None:
    with real_consumer(tmp_path / "model") as opened, cached(opened, tmp_path / "cache", "all") as cache:
        opened.attach(12 << 20, library=native_library(), slot_bytes=1 << 20)
        entry = cache.tensors["blocks.2.up.weight"]
        pack = cache.pack_path(entry.pack)
        good = pack.read_bytes()
        with enable_splitzip_fast_transport(
            opened.store, cache, adapter=opened.adapter, ring_bytes="8MiB", arena_bytes="6MiB"
        ):
            opened.run()
            damage(pack, entry.offset + entry.segments[0] - 5000, good)
            for _ in range(3):
                for binding in opened.bindings():
                    binding.signature = None  # as if the arena had lost everything
                with pytest.raises(CorruptDataError, match=r"blocks\.2"):
                    opened.run()
            pack_restored(pack, good)
            for _ in range(3):
                opened.run()
        opened.run()


def damage(pack: Path, offset: int, good: bytes) -> None:
    with pack.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in good[offset : offset + 100]))
        os.fsync(file.fileno())


def pack_restored(pack: Path, good: bytes) -> None:
    with pack.open("r+b") as file:
        file.write(good)
        os.fsync(file.fileno())


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with real_consumer(tmp_path / "model") as opened, cached(opened, tmp_path / "cache", "all") as cache:
        opened.attach(12 << 20, library=native_library(), slot_bytes=1 << 20)
        use_once(opened, cache)  # kernels, contexts and pools are made once
        before = resources()
        for _ in range(3):
            use_once(opened, cache)
        assert resources() == before


def use_once(opened: Any, cache: SplitZipShardCache) -> None:
    with enable_splitzip_fast_transport(
        opened.store, cache, adapter=opened.adapter, ring_bytes="8MiB", host_cache_bytes="8MiB"
    ):
        for _ in range(20):
            opened.run()


def resources() -> tuple[int, int, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return len(os.listdir("/proc/self/fd")), len(threading.enumerate()), torch.cuda.memory_allocated()


def test_example(tmp_path: Path) -> None:
    """A small FLUX transformer through the program that users begin with."""
    for name in ("diffusers", "diffusers_dynamic_offloader", "cuda.core"):
        pytest.importorskip(name, reason="not installed: pip install '.[ddo]'")
    from diffusers import FluxTransformer2DModel

    config = {"attention_head_dim": 64, "num_attention_heads": 6, "axes_dims_rope": (16, 24, 24)}
    model = FluxTransformer2DModel(num_layers=2, num_single_layers=4, joint_attention_dim=256, **config)
    model.bfloat16().save_pretrained(tmp_path / "transformer")
    program = [sys.executable, "examples/ddo_flux.py", str(tmp_path / "transformer"), str(tmp_path / "cache")]
    done = subprocess.run([*program, "--budget-gb", "0.03"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "outputs are equal" in done.stdout
    assert done.stdout.count("cache, step") == 4
