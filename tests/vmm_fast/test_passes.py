"""Passes of the consumer's model, weights from the cache: bit-equal however they are driven, and foreseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.vmm_fast import bind_slice_aliases

if TYPE_CHECKING:
    from tests.vmm_fast.host import Consumer

BLOCK = 10_000
"""Somewhat more than the weights of a block take."""
BUDGETS = (2 * BLOCK, 4 * BLOCK, 20 * BLOCK)
ALL = 28
"""Its weights that are attached: all but those of norms."""

Enable = Callable[..., Any]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_equal_on_every_pass(attached: Consumer, enable: Enable, tmp_path: Path, budget: int, share: float) -> None:
    tensors = load_file(attached.shards[0]) | load_file(attached.shards[1])
    kept = sorted(tensors)[: round(share * len(tensors))] or sorted(tensors)[:1]
    if not share:
        tensors = {name: torch.zeros(3) for name in kept}
    save_file({name: tensors[name] for name in kept}, tmp_path / "part.safetensors")
    build_cache(tmp_path / "part.safetensors", tmp_path / "part", segment_elements=1024)
    with SplitZipShardCache(tmp_path / "part") as cache:
        assert bind_slice_aliases(attached.model, cache) == (len(kept) if share else 0)
        attached.attach(budget)
        transport = enable(attached.store, cache, adapter=attached.adapter)
        for _ in range(4):
            attached.run()
        statistics = transport.statistics()
        assert (statistics.uploads > 0) == (share > 0)
        assert (statistics.native_uploads > 0) == (share < 1)
        assert statistics.uploads + statistics.native_uploads == attached.store.runtime_stats()["uploads"]
        assert attached.store.runtime_stats()["temporary_tensors"] == 0
        transport.close()
        attached.run()


@pytest.mark.parametrize("known", ["adapter", "store"])
def test_from_the_second_pass_weights_are_foreseen(
    attached: Consumer, cache: SplitZipShardCache, enable: Enable, known: str
) -> None:
    attached.attach(BUDGETS[1])
    adapter = attached.adapter if known == "adapter" else None
    transport = enable(attached.store, cache, adapter=adapter, arena_bytes=5 * BLOCK)
    attached.run()
    first = transport.statistics()
    assert first.uploads == ALL
    settle(transport)
    transport.reset_stats()
    for _ in range(20):
        attached.run()
        settle(transport)
    later = transport.statistics()
    assert later.found_share >= 0.95
    assert later.transport.residency.read_ahead > 0
    resident = attached.store.native.resident
    assert 0 < len(resident) < ALL
    assert later.uploads < 20 * ALL, "what stays resident is not asked for"


def settle(transport: Any) -> None:
    """What a GPU would compute meanwhile: long enough for what is read ahead."""
    while transport.statistics().transport.residency.loading:
        pass


def test_what_stays_resident_is_not_streamed(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGETS[2])
    transport = enable(attached.store, cache, adapter=attached.adapter)
    for _ in range(3):
        attached.run()
    settle(transport)
    before = transport.statistics()
    for _ in range(10):
        attached.run()
    after = transport.statistics()
    assert before.uploads == after.uploads == ALL
    assert before.transport.io.reads == after.transport.io.reads


def test_out_of_order(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGETS[0])
    enable(attached.store, cache, adapter=attached.adapter, arena_bytes=2 * BLOCK)
    usual = list(range(6))
    for _ in range(3):
        for order in (usual, [0, 1, 3, 4, 5], usual[::-1], [5, 0, 3], [2, 2, 2], []):
            attached.run(order)


@pytest.mark.parametrize("group_bytes", [1, 4096, "6KiB"])
@pytest.mark.parametrize("arena", [4608, 12_000, BLOCK])
def test_small_groups_in_a_small_arena(
    attached: Consumer, cache: SplitZipShardCache, enable: Enable, group_bytes: int | str, arena: int
) -> None:
    """Nothing waits for ever, however little room there is; and a batch may be of several groups."""
    attached.attach(BUDGETS[0])
    arena = max(arena, 6144) if group_bytes == "6KiB" else arena
    transport = enable(attached.store, cache, adapter=attached.adapter, arena_bytes=arena, group_bytes=group_bytes)
    for order in (None, None, [5, 4, 3, 2, 1, 0], None):
        attached.run(order)
    assert transport.statistics().demands > 30


def test_host_tier_counts_as_found(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGETS[0])
    transport = enable(attached.store, cache, adapter=attached.adapter, host_cache_bytes="8MiB", arena_bytes=BLOCK)
    attached.run()
    settle(transport)
    reads = transport.statistics().transport.io.reads
    transport.reset_stats()
    for order in ([5, 1, 3], [0, 2, 4], [1, 1], [4, 3, 0]):
        attached.run(order)
    settle(transport)
    statistics = transport.statistics()
    assert statistics.host_share == 1
    assert statistics.found_share == 1
    assert statistics.transport.io.reads == reads


def test_consumer_reads_its_statistics(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(BUDGETS[0])
    transport = enable(attached.store, cache, adapter=attached.adapter)
    attached.run()
    stats = attached.store.runtime_stats()
    statistics = transport.statistics()
    assert stats["native_transport_splitzip_uploads"] == statistics.uploads > 0
    assert stats["native_transport_read_bytes"] == statistics.upload_bytes
    assert stats["native_transport_slot_waits"] == statistics.waits
    assert stats["native_transport_source_read_bytes"] == statistics.transport.io.bytes_read > 0
    attached.store.reset_runtime_stats()
    assert attached.store.runtime_stats()["native_transport_read_bytes"] == 0
    assert transport.statistics().uploads == 0
    assert transport.size_bytes >= max(sum(each.nbytes for each in unit.tensors) for unit in units(attached))
    assert transport.slots == transport.inner.slots == 16
    assert transport.cache is None


def units(attached: Consumer) -> list[Any]:
    return attached.adapter._execution_units


def test_what_was_read_stays_somewhere(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    """In the host tier if that has room for all of it, or else in the page cache."""
    attached.attach(BUDGETS[0])
    for options in ({}, {"host_cache_bytes": "8kB"}):
        with enable(attached.store, cache, adapter=attached.adapter, **options) as transport:
            attached.run()
            statistics = transport.statistics().transport
            assert statistics.direct_files == statistics.direct_bytes == 0, options
    with enable(attached.store, cache, adapter=attached.adapter, host_cache_bytes="8MiB") as transport:
        statistics = transport.statistics().transport
        assert statistics.direct_files == 1 or any("direct I/O" in each for each in statistics.fallbacks)
