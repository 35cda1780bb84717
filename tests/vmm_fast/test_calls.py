"""The calls of the consumer one by one: batches, mixed ones, tickets, and what is delegated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.errors import ClosedError
from splitzip_aio.vmm_fast import bind_slice_aliases

if TYPE_CHECKING:
    from tests.vmm_fast.host import Consumer

Enable = Callable[..., Any]


@pytest.fixture
def half(attached: Consumer, tmp_path: Path) -> Iterator[SplitZipShardCache]:
    """A cache of the weights of ``up``, but not of ``down``."""
    tensors = load_file(attached.shards[0]) | load_file(attached.shards[1])
    save_file({name: each for name, each in tensors.items() if ".up." in name}, tmp_path / "up.safetensors")
    build_cache(tmp_path / "up.safetensors", tmp_path / "half", segment_elements=1024)
    with SplitZipShardCache(tmp_path / "half") as cache:
        bind_slice_aliases(attached.model, cache)
        yield cache


@pytest.fixture
def uploaded(attached: Consumer) -> Callable[[Any], None]:
    """Checks that a binding's range holds what its file does."""
    attached.attach(10**9)

    def check(binding: Any) -> None:
        with binding.file_slice.path.open("rb") as file:
            file.seek(binding.file_slice.offset_bytes)
            data = file.read(binding.nbytes)
        found = attached.store.native.memory[binding.offset : binding.offset + binding.nbytes]
        assert found.numpy().tobytes() == data

    return check


def block(attached: Consumer, place: int) -> list[Any]:
    return attached.adapter._execution_units[place].tensors


def call(transport: Any, attached: Consumer, bindings: list[Any]) -> Any:
    return transport.upload_batch(bindings, attached.store.native, attached.store._upload_stream)


def test_any_mix_of_bindings(
    attached: Consumer, cache: SplitZipShardCache, enable: Enable, uploaded: Callable[[Any], None]
) -> None:
    transport = enable(attached.store, cache, adapter=attached.adapter)
    bindings = attached.bindings()
    for batch in (bindings[:1], bindings[3:9], bindings[::-5], bindings, bindings[-1:]):
        attached.store.native.memory.fill_(0xA5)
        event = call(transport, attached, batch)
        assert event.recorded
        for binding in batch:
            uploaded(binding)


def test_destination_is_the_arena_that_was_given(
    attached: Consumer, cache: SplitZipShardCache, enable: Enable, uploaded: Callable[[Any], None]
) -> None:
    """As when a unit goes to an execution buffer: the same slices, other offsets, another arena."""
    from dataclasses import replace

    from tests.vmm_fast.host import HostArena

    transport = enable(attached.store, cache, adapter=attached.adapter)
    bindings = block(attached, 1)
    other = HostArena(1 << 16, 1 << 16)
    moved = [replace(each, offset=8192 * place, signature=None) for place, each in enumerate(bindings)]
    transport.upload_batch(moved, other, attached.store._upload_stream)
    assert (attached.store.native.memory == 0xA5).all()
    call(transport, attached, bindings)
    for binding, copy in zip(bindings, moved, strict=True):
        uploaded(binding)
        there = attached.store.native.memory[binding.offset : binding.offset + binding.nbytes]
        assert torch.equal(other.memory[copy.offset : copy.offset + copy.nbytes], there)


def test_what_the_cache_lacks_goes_to_the_native_transport_unchanged(
    attached: Consumer, half: SplitZipShardCache, enable: Enable, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached.attach(10**9)
    transport = enable(attached.store, half, adapter=attached.adapter)
    token = object()
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(transport.inner, "upload_batch", lambda *given: (calls.append(given), token)[1])
    down = [binding for binding in block(attached, 0) if ".down." in binding.label]
    assert call(transport, attached, down) is token
    assert calls == [(down, attached.store.native, attached.store._upload_stream)]
    assert transport.statistics().native_bytes == sum(binding.nbytes for binding in down)


def test_one_event_stands_for_both_parts(
    attached: Consumer, half: SplitZipShardCache, enable: Enable, uploaded: Callable[[Any], None]
) -> None:
    transport = enable(attached.store, half, adapter=attached.adapter)
    event = call(transport, attached, block(attached, 0))
    assert event.recorded
    assert transport.inner.ring.waited_for, "the event does not wait for the native part"
    for binding in block(attached, 0):
        uploaded(binding)
    statistics = transport.statistics()
    assert (statistics.uploads, statistics.native_uploads) == (2, 2)


@pytest.mark.parametrize("kind", ["batch", "event"])
def test_tokens_of_every_kind_are_waited_for(
    attached: Consumer, half: SplitZipShardCache, enable: Enable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    attached.attach(10**9)
    transport = enable(attached.store, half, adapter=attached.adapter)
    waits: list[Any] = []

    class Batch:
        def wait_on_stream(self, stream: Any) -> None:
            waits.append(stream)

    token = Batch() if kind == "batch" else torch.cuda.Event()
    stream = attached.store._upload_stream
    monkeypatch.setattr(stream, "wait_event", waits.append, raising=False)
    monkeypatch.setattr(transport.inner, "upload_batch", lambda *given: token)
    assert call(transport, attached, block(attached, 0)) is not token
    assert waits == [stream if kind == "batch" else token]


@pytest.mark.parametrize("kept", ["all", "half"])
def test_tickets(request: pytest.FixtureRequest, attached: Consumer, enable: Enable, kept: str) -> None:
    cache = request.getfixturevalue("cache" if kept == "all" else "half")
    uploaded = request.getfixturevalue("uploaded")
    transport = enable(attached.store, cache, adapter=attached.adapter)
    first, second, third = (transport.begin_read(block(attached, place)) for place in range(3))
    call(transport, attached, block(attached, 4))  # tickets stay while others upload
    for place, ticket in ((1, second), (0, first)):
        assert transport.ticket_active(ticket)
        event = transport.upload_ticket(ticket, attached.store.native, attached.store._upload_stream)
        assert event.recorded
        assert not transport.ticket_active(ticket)
        for binding in block(attached, place):
            uploaded(binding)
    with pytest.raises(ClosedError, match="used or discarded"):
        transport.upload_ticket(first, attached.store.native, attached.store._upload_stream)
    for _ in range(2):
        transport.discard_ticket(third)
    assert not transport.ticket_active(third)
    assert transport.statistics().transport.residency.leased == 0
    assert not transport.inner._pending


def test_tickets_never_keep_others_waiting(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(10**9)
    largest = 9_600
    transport = enable(attached.store, cache, adapter=attached.adapter, arena_bytes=largest)
    for place in range(6):
        transport.begin_read(block(attached, place))
    for place in (5, 0, 3):
        call(transport, attached, block(attached, place))


def test_tickets_of_the_native_transport_stay_its_own(
    attached: Consumer, cache: SplitZipShardCache, half: SplitZipShardCache, enable: Enable
) -> None:
    attached.attach(10**9)
    native, stream = attached.store.native, attached.store._upload_stream
    old = attached.store._native_shard_transport.begin_read(block(attached, 0))
    dropped = attached.store._native_shard_transport.begin_read(block(attached, 1)[:1])
    transport = enable(attached.store, cache, adapter=attached.adapter)
    assert transport.ticket_active(dropped)
    transport.discard_ticket(dropped)
    assert not transport.ticket_active(dropped)
    assert transport.ticket_active(old)
    transport.upload_ticket(old, native, stream)
    ours = transport.begin_read(block(attached, 2))
    transport.close()
    inner = attached.store._native_shard_transport
    assert not inner.ticket_active(ours)
    inner.discard_ticket(ours)
    with enable(attached.store, half, adapter=attached.adapter) as transport:
        down = [binding for binding in block(attached, 0) if ".down." in binding.label]
        assert transport.inner.ticket_active(transport.begin_read(down))


def test_old_calling_pattern(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    """The consumer's look-ahead by tickets, which its hooks no longer use, interleaved with its demands."""
    attached.attach(30_000)
    enable(attached.store, cache, adapter=attached.adapter, arena_bytes=30_000)
    units = attached.adapter._execution_units
    for unit, following in pairwise(units[:6]):
        attached.store.fault_and_copy_group_if_needed(unit.tensors)
        attached.adapter._prefetch_next_unit(unit)
        for binding in unit.tensors:
            attached.store.unpin(binding)
        assert following.tensors[0].native_prefetch_ticket is not None
    assert attached.store.runtime_stats()["prefetch_hits"] > 0
    attached.run()


def test_single_bindings(attached: Consumer, cache: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(10**9)
    enable(attached.store, cache, adapter=attached.adapter)
    for binding in attached.bindings():
        assert attached.store.fault_and_copy_if_needed(binding).recorded
    attached.run()


def test_a_weight_of_another_size_is_not_the_same(
    attached: Consumer, cache: SplitZipShardCache, enable: Enable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a part of a slice is bound: what the cache has is more."""
    from dataclasses import replace

    attached.attach(10**9)
    transport = enable(attached.store, cache, adapter=attached.adapter)
    part = replace(block(attached, 0)[0], nbytes=64)
    given: list[Any] = []
    monkeypatch.setattr(transport.inner, "upload_batch", lambda bindings, *_: given.extend(bindings))
    call(transport, attached, [part])
    assert given == [part]


def test_everything_else_is_delegated(attached: Consumer, half: SplitZipShardCache, enable: Enable) -> None:
    attached.attach(10**9)
    transport = enable(attached.store, half, adapter=attached.adapter)
    inner = transport.inner
    assert transport.ring is inner.ring
    assert transport.window_size_bytes == inner.window_size_bytes
    assert transport._source(attached.shards[0]) is inner._source(attached.shards[0])
    assert transport.cache_stats == {}
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = transport.no_such_thing
    given: list[Any] = []
    inner.prepare_sources = given.extend
    transport.prepare_sources(attached.adapter._execution_units)
    assert {binding.label for part in given for binding in part.tensors} == {
        binding.label for binding in attached.bindings() if ".up." not in binding.label
    }


@pytest.mark.parametrize(
    ("page_bytes", "advised"), [(2 << 20, True), (8 << 20, True), (16 << 20, False), (64 << 20, False)]
)
def test_small_pages_are_named(
    attached: Consumer,
    cache: SplitZipShardCache,
    enable: Enable,
    caplog: pytest.LogCaptureFixture,
    page_bytes: int,
    advised: bool,
) -> None:
    attached.attach(10**9, page_bytes=page_bytes)
    with caplog.at_level(logging.INFO, logger="splitzip_aio"):
        enable(attached.store, cache, adapter=attached.adapter)
    told = [record for record in caplog.records if "vmm_page_mb=64" in record.getMessage()]
    assert len(told) == advised
    for record in told:
        assert record.levelno == logging.INFO
        assert f"pages of {page_bytes >> 20} MiB" in record.getMessage()
    attached.run()


@pytest.mark.parametrize("found", [None, AttributeError("no such thing"), "2 MiB", 0])
def test_stores_that_do_not_tell_their_page_size(
    attached: Consumer,
    cache: SplitZipShardCache,
    enable: Enable,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    found: Any,
) -> None:
    def page_bytes(_: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    attached.attach(10**9)
    monkeypatch.setattr(type(attached.store), "page_bytes", property(page_bytes))
    with caplog.at_level(logging.INFO, logger="splitzip_aio"):
        enable(attached.store, cache, adapter=attached.adapter)
    assert "vmm_page_mb" not in caplog.text
    attached.run()
