"""What goes wrong is said, nothing wrong is signalled ready, and the arena is usable afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio import FaultKind, FaultSchedule, faulty_driver
from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.errors import (
    CacheNotFoundError,
    ClosedError,
    CorruptDataError,
    InvalidArgumentError,
    ReadError,
    SourceChangedError,
    UnsupportedError,
)
from splitzip_aio.vmm_fast import bind_slice_aliases, enable_splitzip_fast_transport

if TYPE_CHECKING:
    from tests.vmm_fast.host import Consumer

Enable = Callable[..., Any]
BUDGET = 20_000


def test_corrupt_segment(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGET)
    transport = enable(attached.store, cache, adapter=attached.adapter, arena_bytes=12_000)
    attached.run()
    entry = cache.tensors["blocks.3.up.weight"]
    pack = cache.pack_path(entry.pack)
    good = pack.read_bytes()
    with pack.open("r+b") as file:
        file.seek(entry.offset + entry.segments[0] - 100)
        file.write(bytes(byte ^ 0xFF for byte in good[entry.offset + entry.segments[0] - 100 :][:50]))
    for _ in range(3):
        attached.store.native.memory.fill_(0xA5)
        attached.store.native.resident.clear()
        with pytest.raises(CorruptDataError, match=r"blocks\.3"):
            attached.run()
        for binding in attached.bindings():
            if binding.label.startswith("blocks.3."):
                assert binding.signature is None
                assert binding.ready_event is None
        wrong = next(binding for binding in attached.bindings() if binding.label == "blocks.3.up.weight")
        there = attached.store.native.memory[wrong.offset : wrong.offset + wrong.nbytes]
        assert (there == 0xA5).all(), "wrong bytes reached the weight's range"
    assert transport.statistics().transport.residency.leased == 0
    with pack.open("r+b") as file:
        file.write(good)
    for _ in range(3):
        attached.run()
    attached.adapter._collect_temporary_lifetimes(wait=True)
    assert not any(attached.store.native.pins.values())
    transport.close()
    attached.run()


def test_failed_reads(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    """Some passes fail, some do not, and none is wrong."""
    attached.attach(BUDGET)
    faults = FaultSchedule(seed=3, rate=0.0, kinds=[FaultKind.EIO])
    enable(attached.store, cache, adapter=attached.adapter, arena_bytes=12_000, driver=faulty_driver(faults, "threads"))
    for turn in range(12):
        faults.rate = 1.0 if turn % 2 else 0.0
        if turn % 2:
            with pytest.raises(ReadError, match="packs"):
                attached.run([5, 4, 3, 2, 1, 0])
        else:
            attached.run()
    attached.adapter._cancel_gpu_prefetches()
    attached.adapter._collect_temporary_lifetimes(wait=True)
    assert not any(attached.store.native.pins.values())


def test_native_errors_pass_through(
    attached: Consumer, tmp_path: Path, enable: Enable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer knows what to do about its own errors; nothing of ours is left behind."""
    from ddo_vmm_allocator.native import NativeVmmError

    save_file({name: each for name, each in attached.model.state_dict().items() if ".up." in name}, tmp_path / "up.st")
    (tmp_path / "up.st").rename(tmp_path / "up.safetensors")
    build_cache(tmp_path / "up.safetensors", tmp_path / "half", segment_elements=1024)
    with SplitZipShardCache(tmp_path / "half") as half:
        bind_slice_aliases(attached.model, half)
        attached.attach(BUDGET)
        transport = enable(attached.store, half, adapter=attached.adapter)

        def fail(*_: Any) -> None:
            raise NativeVmmError("the ring is gone")

        monkeypatch.setattr(transport.inner, "upload_batch", fail)
        with pytest.raises(NativeVmmError, match="ring is gone"):
            attached.store.fault_and_copy_group_if_needed(attached.adapter._execution_units[0].tensors)
        while transport.statistics().transport.residency.loading:
            pass
        assert transport.statistics().transport.residency.leased == 0
        assert not any(attached.store.native.pins.values())
        monkeypatch.undo()
        transport.close()


def test_changed_shard(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGET)
    tensors = load_file(attached.shards[1])
    save_file({name: each.reshape(-1) for name, each in tensors.items()}, attached.shards[1])
    with pytest.raises(SourceChangedError, match="rebuild the cache"):
        enable(attached.store, cache, adapter=attached.adapter)
    assert not hasattr(attached.store._native_shard_transport, "inner")


def test_nothing_of_the_model_in_the_cache(
    attached: Consumer, tmp_path: Path, enable: Enable, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    build_cache(tmp_path / "other.safetensors", tmp_path / "other")
    attached.attach(BUDGET)
    with caplog.at_level(logging.WARNING):
        transport = enable(attached.store, tmp_path / "other", adapter=attached.adapter)
    assert "none of this model's weights" in caplog.text
    attached.run()
    assert transport.statistics().found_share == 1
    transport.close()


def test_stores_that_cannot_be_served(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    with pytest.raises(UnsupportedError, match="ModelArenaWeightStore"):
        enable(object(), cache)

    class Hook:
        _vmm_fast_store = None
        _vmm_fast_adapter = None

    with pytest.raises(InvalidArgumentError, match="vmm_fast_runtime"):
        enable(Hook(), cache)
    attached.attach(BUDGET)
    with pytest.raises(InvalidArgumentError, match="arena_bytes"):
        enable(attached.store, cache, adapter=attached.adapter, arena_bytes=1000)
    transport = enable(attached.store, cache, adapter=attached.adapter)
    with pytest.raises(InvalidArgumentError, match="already"):
        enable(attached.store, cache)
    transport.close()
    inner, attached.store._native_shard_transport = attached.store._native_shard_transport, None
    with pytest.raises(InvalidArgumentError, match="vmm_native_transport"):
        enable(attached.store, cache)
    attached.store._native_shard_transport = inner
    cache.close()
    with pytest.raises(ClosedError, match="cache is closed"):
        enable(attached.store, cache)
    with pytest.raises(CacheNotFoundError):
        enable(attached.store, cache.root / "nothing")


def test_closed_store(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGET)
    transport = enable(attached.store, cache, adapter=attached.adapter)
    attached.run()
    bindings, native, ring = attached.bindings(), attached.store.native, transport.inner.ring
    attached.close()
    attached.adapter = None
    assert transport.closed
    assert ring.closed
    assert native.closed
    with pytest.raises(ClosedError):
        transport.upload_batch(bindings, native, None)
    with pytest.raises(ClosedError):
        transport.statistics()
    with pytest.raises(ClosedError, match="store is closed"):
        enable(attached.store, cache)
    assert not cache.closed


def test_closing_gives_the_native_transport_back(
    attached: Consumer, cache: SplitZipShardCache, enable: Enable, caplog: pytest.LogCaptureFixture
) -> None:
    attached.attach(BUDGET)
    inner = attached.store._native_shard_transport

    class Hook:
        _vmm_fast_store = attached.store
        _vmm_fast_adapter = attached.adapter

    for _ in range(3):
        with enable(Hook(), cache.root) as transport:
            assert attached.store._native_shard_transport is transport
            attached.run()
            assert transport.statistics().uploads > 0
        transport.close()
        assert attached.store._native_shard_transport is inner
        assert attached.store._upload_stream.synchronized > 0
        attached.run()
    transport = enable(attached.store, cache)
    attached.store._native_shard_transport = inner
    with caplog.at_level(logging.WARNING):
        transport.close()
    assert "was replaced" in caplog.text
    assert attached.store._native_shard_transport is inner


def test_failed_opening_leaves_the_store_alone(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGET)
    inner = attached.store._native_shard_transport
    with pytest.raises(InvalidArgumentError, match="ring_bytes"):
        enable(attached.store, cache.root, ring_bytes="much")
    assert attached.store._native_shard_transport is inner


def test_without_the_package_a_view_must_be_given(
    attached: Consumer, cache: SplitZipShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    attached.attach(BUDGET)
    monkeypatch.setitem(sys.modules, "ddo_vmm_allocator", None)
    with pytest.raises(UnsupportedError, match=r"splitzip-aio\[ddo\]"):
        enable_splitzip_fast_transport(attached.store, cache, device="cpu", ring_bytes="1MiB")


def test_aliases(attached: Consumer, cache: SplitZipShardCache) -> None:
    assert bind_slice_aliases(attached.model, cache) == 0
    attached.shards[0].rename(attached.directory / "renamed.safetensors")
    registry = attached.registry
    for place, found in registry._slices.items():
        if found.path == attached.shards[0]:
            registry._slices[place] = type(found)(
                attached.directory / "renamed.safetensors", found.offset_bytes, found.size_bytes
            )
    assert bind_slice_aliases(attached.model, cache) == 20
    assert bind_slice_aliases(attached.model, cache) == 0
    with SplitZipShardCache(cache.root) as again:
        assert bind_slice_aliases(attached.model, again) == 0
    with pytest.raises(InvalidArgumentError, match="from_pretrained_with_dynamic_offload"):
        bind_slice_aliases(torch.nn.Linear(2, 2), cache)
