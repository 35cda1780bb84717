"""Opening a transport: which device, how much memory, which files."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike

import anyio
import anyio.to_thread
import torch

from splitzip_aio.abc import Arena, IOMode, ReadDriver
from splitzip_aio.arena import CudaArena, HostArena
from splitzip_aio.cache import LayerRule, SplitZipShardCache
from splitzip_aio.drivers import DriverFactory, DriverName, open_driver
from splitzip_aio.errors import ClosedError, CorruptDataError, InvalidArgumentError, UnsupportedError
from splitzip_aio.forecast import Forecast
from splitzip_aio.host_cache import HostCache, HostTier
from splitzip_aio.host_cache.headroom import check_room
from splitzip_aio.mapped import MappedPacks
from splitzip_aio.packs import PackSource
from splitzip_aio.plan import ExecutionPlan, largest_read_bytes
from splitzip_aio.staging import StagingRing, split_ring
from splitzip_aio.timeline import Timeline
from splitzip_aio.transport.stream import Parts, Transport
from splitzip_aio.units import parse_bytes

__all__ = ["open_transport"]

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_transport(
    cache: str | PathLike[str] | SplitZipShardCache,
    *,
    device: str | torch.device = "auto",
    ring_bytes: int | str = "128MiB",
    arena_bytes: int | str = "2GiB",
    host_cache_bytes: int | str = 0,
    host_cache: HostCache | None = None,
    driver: DriverName | DriverFactory = "auto",
    io: IOMode = "auto",
    layer_of: LayerRule | None = None,
    order: Sequence[str] | None = None,
    timeline: Timeline | None = None,
) -> AsyncIterator[Transport]:
    """Open a cache for streaming: ``async with open_transport("cache/") as transport``.

    Leaving the block closes the transport, whatever the reason: what is in flight lands first, then memory, files and
    driver are freed. An exception of the block passes through as it is.

    Args:
        cache: a cache's directory, or an open cache, which stays open.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``: the current CUDA device if there is one, else the
            CPU.
        ring_bytes: memory for staging slots; page-locked for a GPU. One slot is enough, three or more overlap.
        arena_bytes: memory on the device for decoded layers, at most; never more than all layers need.
        host_cache_bytes: memory for compressed extents that are kept for later rounds, at most; page-locked for a GPU.
        host_cache: an open host cache to keep them in instead, which other transports may use as well; stays open.
        driver: ``"uring"``, ``"threads"`` or ``"auto"``; or a function that makes one for the slots it is given, such
            as ``splitzip_aio.faulty_driver`` returns.
        io: how packs are read: ``"direct"`` past the page cache, ``"buffered"`` through it, or ``"auto"``: each extent
            from the page cache if it is there, and else past it.
        layer_of: from a tensor's name to its layer's; by default what the cache was built with.
        order: names of layers in the order they will be asked for in, round after round, if that is known. Otherwise
            it is learned: from the execution order, and from which layer was asked for after which.
        timeline: where to record what each stage does, if anyone wants to look at it.

    Raises:
        CacheNotFoundError, ManifestError: there is no usable cache.
        InvalidArgumentError: an option is out of range, or two exclude each other.
        ClosedError: ``host_cache`` is closed.
        UnknownLayerError: ``order`` names a layer that the cache does not have.
        LayerTooLargeError: the ring is smaller than the cache's largest segment.
        UnsupportedError: the device, the driver or direct reading was asked for and cannot be had here.
        ReadError: a pack cannot be opened.
        TransportError: streaming broke down, and nobody has been told.
    """
    target, fallbacks = _choose_device(device)
    options = _Options(
        ring_bytes=parse_bytes(ring_bytes, name="ring_bytes"),
        arena_bytes=parse_bytes(arena_bytes, name="arena_bytes"),
        host_cache=_choose_host_cache(host_cache, parse_bytes(host_cache_bytes, name="host_cache_bytes")),
        driver=driver,
        io=io,
        layer_of=layer_of,
        order=order,
        timeline=timeline,
    )
    raised: BaseException | None = None
    async with AsyncExitStack() as resources:
        transport = Transport(await _in_thread(partial(_assemble, cache, target, options, resources, fallbacks)))
        async with anyio.create_task_group() as group:
            group.start_soon(transport.serve, resources.pop_all())
            try:
                yield transport
            except (Exception, KeyboardInterrupt, SystemExit) as exc:  # noqa: BLE001 - raised below
                raised = exc
            finally:
                await transport.aclose()
    if raised is None:
        raised = transport.failure
    if raised is not None:
        raise raised


async def _in_thread(make: Callable[[], Parts]) -> Parts:
    """Run ``make`` in a worker thread, and wait for its end whatever comes.

    A task of its own is out of reach of asyncio's ``Task.cancel``, which would leave the thread to go on alone.
    """
    outcome: list[Parts | Exception] = []

    async def run() -> None:
        try:
            outcome.append(await anyio.to_thread.run_sync(make))
        except Exception as exc:  # noqa: BLE001 - raised below, outside of the group
            outcome.append(exc)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
    (result,) = outcome
    if isinstance(result, Exception):
        raise result
    return result


@dataclass(frozen=True, slots=True)
class _Options:
    """What ``open_transport`` was asked for; ``host_cache`` is one that is shared, or the bytes of one's own."""

    ring_bytes: int
    arena_bytes: int
    host_cache: HostCache | int
    driver: DriverName | DriverFactory
    io: IOMode
    layer_of: LayerRule | None
    order: Sequence[str] | None
    timeline: Timeline | None


def _assemble(
    cache: str | PathLike[str] | SplitZipShardCache,
    device: torch.device,
    options: _Options,
    resources: AsyncExitStack,
    fallbacks: tuple[str, ...],
) -> Parts:
    """Make everything, in a worker thread since page-locking takes a while; ``resources`` takes it down."""
    with ExitStack() as own:
        opened = cache if isinstance(cache, SplitZipShardCache) else own.enter_context(SplitZipShardCache(cache))
        if device.type == "cuda":
            own.enter_context(torch.cuda.device(device))  # the current device is this thread's own
        entries = opened.tensors.values()
        kind = CudaArena if device.type == "cuda" else HostArena
        slots, payload_bytes = split_ring(
            options.ring_bytes, largest_read_bytes=largest_read_bytes(entries), table_bytes=kind.table_bytes
        )
        packs = [str(opened.pack_path(number)) for number in range(len(opened.manifest.packs))]
        plan = ExecutionPlan(
            entries,
            packs=packs,
            slot_bytes=payload_bytes,
            max_segments=kind.max_segments,
            layer_of=options.layer_of,
        )
        forecast = Forecast(plan.layers, order=options.order)
        check_room(options.ring_bytes, option="ring_bytes")
        ring = resources.enter_context(
            StagingRing(slots, payload_bytes, table_bytes=kind.table_bytes(payload_bytes), pinned=device.type == "cuda")
        )
        resources.callback(ring.release_all)
        tier = _make_tier(options.host_cache, device, kind.table_bytes, resources)
        # Closed after the arena, which may decode from there until then.
        mapped = MappedPacks()
        resources.callback(mapped.close)
        arena = _make_arena(device, min(options.arena_bytes, plan.nbytes), len(ring.slots[0].memory))
        resources.push_async_callback(arena.aclose)
        buffers = [slot.payload for slot in ring.slots]
        reader = options.driver(buffers) if callable(options.driver) else open_driver(options.driver, buffers=buffers)
        resources.push_async_exit(reader)
        files = [_open_pack(opened, number, reader, options.io, resources) for number in range(len(packs))]
    if tier is None and arena.decodes_in_place and options.io == "auto" and reader.may_be_bypassed:
        mapped.add(files)
    fallbacks = (*fallbacks, *_fallbacks(ring, reader, files, options.io))
    return Parts(plan, forecast, ring, reader, files, arena, tier, mapped, options.timeline, fallbacks)


def _choose_host_cache(shared: HostCache | None, own_bytes: int) -> HostCache | int:
    """A shared host cache, or the bytes of one's own.

    Raises:
        InvalidArgumentError: both were given.
        ClosedError: the shared one is closed.
    """
    if shared is None:
        return own_bytes
    if own_bytes:
        raise InvalidArgumentError("host_cache has its own size; give it or host_cache_bytes, not both")
    if shared.closed:
        raise ClosedError("the host cache is closed")
    return shared


def _make_tier(
    host_cache: HostCache | int, device: torch.device, table_bytes: Callable[[int], int], resources: AsyncExitStack
) -> HostTier | None:
    if host_cache == 0:
        return None
    if isinstance(host_cache, int):
        host_cache = resources.enter_context(HostCache(host_cache, pinned=device.type == "cuda"))
    tier = HostTier(host_cache, table_bytes=table_bytes, device=device)
    resources.callback(tier.close)
    return tier


def _choose_device(device: str | torch.device) -> tuple[torch.device, tuple[str, ...]]:
    """The device, and what was passed over on the way to it.

    Raises:
        InvalidArgumentError: not a device.
        UnsupportedError: a device that is not here, or that nothing is decoded on.
    """
    missing = _cuda_missing()
    if device == "auto":
        if missing is None:
            return torch.device("cuda", torch.cuda.current_device()), ()
        logger.info("streaming to the CPU: %s", missing)
        return torch.device("cpu"), (f"cuda: {missing}",)
    try:
        chosen = torch.device(device)
    except RuntimeError as exc:
        raise InvalidArgumentError(f"device: expected 'auto', 'cpu' or one like 'cuda:0', found {device!r}") from exc
    if chosen.type == "cpu":
        return torch.device("cpu"), ()
    if chosen.type != "cuda":
        raise UnsupportedError(f"device: layers are decoded on 'cpu' and 'cuda', not on {str(chosen)!r}")
    if missing is not None:
        raise UnsupportedError(f"device {str(chosen)!r}: {missing}; use device='cpu'")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise UnsupportedError(f"device {str(chosen)!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index), ()


def _cuda_missing() -> str | None:
    """Why nothing can be decoded on a GPU here; None if it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    from splitzip_aio.codec.gpu import triton_available

    if not triton_available():
        return "Triton is not installed; pip install splitzip-aio[gpu]"
    return None


def _make_arena(device: torch.device, capacity_bytes: int, slot_bytes: int) -> Arena:
    if device.type == "cuda":
        return CudaArena(capacity_bytes, device=device, slot_bytes=slot_bytes)
    check_room(capacity_bytes, option="arena_bytes")
    return HostArena(capacity_bytes)


def _open_pack(
    cache: SplitZipShardCache, number: int, reader: ReadDriver, io: IOMode, resources: AsyncExitStack
) -> PackSource | None:
    """Open a pack by way of the cache's own descriptor, so that it is the one that the manifest belongs to.

    None if it does not exist, which concerns only who reads from it.
    """
    try:
        descriptor = cache.open_pack(number)
    except CorruptDataError:
        return None
    pack = PackSource(reader, descriptor, str(cache.pack_path(number)), io=io)
    resources.callback(pack.close)
    return pack


def _fallbacks(ring: StagingRing, reader: ReadDriver, files: Sequence[PackSource | None], io: IOMode) -> Iterator[str]:
    """Each better way that could not be taken, and why."""
    refused = ring.statistics().fallback
    if refused is not None:
        yield f"pinned memory: {refused}"
    yield from reader.statistics().fallbacks
    if io == "auto":
        for reason in dict.fromkeys(file.fallback for file in files if file is not None):
            if reason is not None:
                logger.warning("packs are not read in the best way: %s", reason)
                yield reason
