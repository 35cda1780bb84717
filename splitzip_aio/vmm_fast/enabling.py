"""Putting the drop-in in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from splitzip_aio.abc import IOMode
from splitzip_aio.blocking import BlockingTransport
from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.cache.entry import Entry
from splitzip_aio.drivers import DriverFactory, DriverName
from splitzip_aio.errors import ClosedError, InvalidArgumentError, UnsupportedError
from splitzip_aio.host_cache import HostCache
from splitzip_aio.timeline import Timeline
from splitzip_aio.units import parse_bytes
from splitzip_aio.vmm_fast.catalog import GROUP_BYTES, Catalog, Groups, units_of
from splitzip_aio.vmm_fast.shard_transport import SplitZipNativeShardTransport
from splitzip_aio.vmm_fast.streamer import Streamer
from splitzip_aio.vmm_fast.views import ArenaView, ArenaViews

__all__ = ["bind_slice_aliases", "enable_splitzip_fast_transport"]

logger = logging.getLogger(__name__)

_ARENA_BYTES = 512 << 20  # what streams in while a large unit is computed: 9 ms of a PCIe 5 link, decoded
_ARENA_GROUPS = 5
_PAGE_BYTES = 64 << 20
_SMALL_PAGE_BYTES = 16 << 20
_PAGE_MS = 0.08  # what mapping and unmapping a page takes of an H200's driver, from 2 MiB to 32 MiB


def enable_splitzip_fast_transport(
    store: Any,
    shard_cache: SplitZipShardCache | str | os.PathLike[str],
    *,
    adapter: Any | None = None,
    arena_view_fn: ArenaView | None = None,
    ring_bytes: int | str = "256MiB",
    arena_bytes: int | str | None = None,
    group_bytes: int | str = GROUP_BYTES,
    host_cache_bytes: int | str = 0,
    host_cache: HostCache | None = None,
    driver: DriverName | DriverFactory = "auto",
    io: IOMode | None = None,
    device: str | torch.device | None = None,
    timeline: Timeline | None = None,
) -> SplitZipNativeShardTransport:
    """Let a vmm_fast store take its weights from a cache, instead of the native transport from the shards.

    Call it when the model is attached: right after ``attach_model_linear_modules``, or with the hook that
    ``apply_dynamic_offload`` returned. What is returned has replaced ``store._native_shard_transport``; close it, or
    leave its ``with`` block, to have the native transport back. Closing the store closes both.

    Attach the model with ``vmm_page_mb=64`` (``page_size_bytes=64 << 20`` for ``attach_model_linear_modules``): the
    allocator's own pages of 2 MiB are so many that mapping them takes longer than anything that is done here. A line
    of level INFO says so where pages are smaller than 16 MiB.

    Args:
        store: a ``ModelArenaWeightStore``, or a hook of diffusers-dynamic-offloader, which knows its store and adapter.
        shard_cache: an open cache, which stays open, or a cache's directory.
        adapter: the ``ModelArenaModuleAdapter`` that attached the model, if ``store`` is not a hook. With it, exactly
            the weights that are attached are grouped; without it, what the names of tensors and units tell.
        arena_view_fn: from an arena, an offset and a size to its bytes there, a (size,) uint8 tensor; by default
            through ``ddo_vmm_allocator.tensor_view``.
        ring_bytes: page-locked memory for staging.
        arena_bytes: memory on the device for what is decoded and not uploaded yet; beside the store's own budget. By
            default 512 MiB, or five times the largest group of weights if that is more, and never more than all of
            them need.
        group_bytes: decoded bytes that are streamed at a time, at most, unless a single weight is larger.
        host_cache_bytes: page-locked memory that keeps compressed weights for later passes, at most.
        host_cache: an open host cache to keep them in instead.
        driver: ``"uring"``, ``"threads"`` or ``"auto"``; or a function that makes one.
        io: how packs are read: ``"direct"``, ``"buffered"`` or ``"auto"``. By default buffered, so that later passes
            find them in the page cache; ``"auto"`` where a host tier has room for all of them.
        device: where to decode; by default the store's GPU.
        timeline: where to record what each stage does.

    Raises:
        InvalidArgumentError: the store has no native transport, or has a replacement already; an option is out of
            range; the device has not that much memory left.
        ClosedError: the store or the cache is closed.
        SourceChangedError: a source file is not what the cache was built from.
        CacheNotFoundError, ManifestError: there is no usable cache.
        UnsupportedError: ``ddo_vmm_allocator`` is missing or of a version that cannot be served; the device, the
            driver or direct reading cannot be had here.
        LayerTooLargeError: the ring is smaller than the cache's largest segment.
        ReadError: a pack cannot be opened.
    """
    store, adapter = _store_and_adapter(store, adapter)
    inner = _native_transport_of(store)
    _advise_larger_pages(store)
    with ExitStack() as own:
        cache = shard_cache
        if not isinstance(cache, SplitZipShardCache):
            cache = own.enter_context(SplitZipShardCache(cache))
        elif cache.closed:
            raise ClosedError(f"{cache.root}: the cache is closed")
        catalog = Catalog(cache)
        units = units_of(store, adapter, catalog)
        groups = Groups.of(units, group_bytes=parse_bytes(group_bytes, name="group_bytes"))
        if not groups.sizes:
            logger.warning("%s has none of this model's weights; all are left to the native transport", cache.root)
        transport = BlockingTransport(
            cache,
            device=f"cuda:{store._device_ordinal}" if device is None else device,
            ring_bytes=ring_bytes,
            arena_bytes=_arena_bytes(arena_bytes, groups),
            host_cache_bytes=host_cache_bytes,
            host_cache=host_cache,
            driver=driver,
            io=io or _io_mode(units, host_cache_bytes, host_cache),
            layer_of=groups.layer_of,
            order=tuple(groups.sizes) or None,
            timeline=timeline,
        )
        own.callback(transport.close)
        if arena_view_fn is None:
            arena_view_fn = views = ArenaViews()
            own.callback(views.clear)
        streamer = Streamer(transport, groups, arena_view_fn)
        drop_in = SplitZipNativeShardTransport(
            store, inner, streamer, catalog, own.pop_all(), unit_bytes=_largest_unit(units)
        )
    store._native_shard_transport = drop_in
    return drop_in


def bind_slice_aliases(root: Any, shard_cache: SplitZipShardCache) -> int:
    """Teach a cache where a model's files hold weights that it has, though it was built from other files.

    Weights are found by content, so the loader's tensors must be alive: call it after loading, and before the model is
    attached. A cache that was built from these files needs none of it.

    Args:
        root: the model, loaded by diffusers-dynamic-offloader, which notes where each tensor came from.
        shard_cache: the cache; remembers what it is taught.

    Returns:
        How many places were added.

    Raises:
        InvalidArgumentError: the model has no such notes, or a place is known to hold another tensor.
        CacheBusyError: the cache is being rebuilt.
        CacheError: it was rebuilt since it was opened, or cannot be written.
    """
    registry = getattr(root, "_ddo_safetensor_slices", None)
    if registry is None:
        raise InvalidArgumentError(
            f"{type(root).__name__} has no _ddo_safetensor_slices; load it with from_pretrained_with_dynamic_offload "
            "from local safetensors files, and call this before the model is attached"
        )
    slices: list[tuple[torch.Tensor | str, str, int, int]] = []
    for parameter in root.parameters():
        tensor = parameter.detach()
        found = registry.lookup(tensor) if tensor.device.type == "cpu" and tensor.is_contiguous() else None
        if found is not None:
            place = (os.path.basename(found.path), found.offset_bytes, found.size_bytes)
            if shard_cache.lookup_by_slice(*place) is None:
                slices.append((tensor, *place))
    return shard_cache.alias_slices(slices)


def _store_and_adapter(store: Any, adapter: Any | None) -> tuple[Any, Any | None]:
    if not hasattr(store, "_vmm_fast_store"):
        return store, adapter
    if store._vmm_fast_store is None:
        raise InvalidArgumentError(
            "the hook has no vmm_fast store: load with execution_mode='vmm_fast_runtime', and apply it before this"
        )
    return store._vmm_fast_store, adapter if adapter is not None else store._vmm_fast_adapter


def _native_transport_of(store: Any) -> Any:
    missing = [name for name in ("_native_shard_transport", "_upload_stream") if not hasattr(store, name)]
    if missing:
        raise UnsupportedError(
            f"{type(store).__name__} has no {' and no '.join(missing)}: expected a ModelArenaWeightStore of "
            "ddo-vmm-allocator 0.1.0rc2, or a hook of diffusers-dynamic-offloader that has one"
        )
    inner = store._native_shard_transport
    if isinstance(inner, SplitZipNativeShardTransport):
        raise InvalidArgumentError("the store already takes its weights from a cache; close that transport first")
    if store._upload_stream is None and inner is None:
        raise ClosedError("the store is closed")
    if inner is None:
        raise InvalidArgumentError(
            "the store has no native shard transport to take the place of: give vmm_native_transport=True to "
            "DynamicOffloadConfig, or native_transport_slot_size_bytes to attach_model_linear_modules"
        )
    return inner


def _advise_larger_pages(store: Any) -> None:
    """Mapping takes its time before a transport is asked for anything, so only a larger page makes it less."""
    page_bytes = getattr(store, "page_bytes", None)
    if isinstance(page_bytes, int) and 0 < page_bytes < _SMALL_PAGE_BYTES:
        logger.info(
            "weights are mapped in pages of %g MiB, which takes some %.0f ms a GB whatever the transport; "
            "vmm_page_mb=64 in DynamicOffloadConfig (page_size_bytes=64 << 20 for attach_model_linear_modules) makes "
            "it %.0f ms, for weight budgets of 1 GiB and more",
            page_bytes / (1 << 20),
            1e9 / page_bytes * _PAGE_MS,
            1e9 / _PAGE_BYTES * _PAGE_MS,
        )


def _arena_bytes(given: int | str | None, groups: Groups) -> int:
    if given is None:
        return max(_ARENA_BYTES, _ARENA_GROUPS * groups.largest_bytes)
    nbytes = parse_bytes(given, name="arena_bytes")
    if nbytes < groups.largest_bytes:
        raise InvalidArgumentError(
            f"arena_bytes: expected {groups.largest_bytes} or more, which the largest group of weights needs, and "
            f"better five times that; found {nbytes}"
        )
    return nbytes


def _io_mode(
    units: Sequence[tuple[str, Sequence[Entry]]], host_cache_bytes: int | str, host_cache: HostCache | None
) -> IOMode:
    """Passes repeat, so what was read has to stay somewhere."""
    if host_cache is None:
        kept = parse_bytes(host_cache_bytes, name="host_cache_bytes")
    else:
        kept = host_cache.statistics().capacity_bytes
    needed = sum({entry.name: entry.encoded_bytes for _, entries in units for entry in entries}.values())
    return "auto" if kept >= needed else "buffered"


def _largest_unit(units: Sequence[tuple[str, Sequence[Entry]]]) -> int:
    return max((sum(entry.nbytes for entry in entries) for _, entries in units), default=0)
