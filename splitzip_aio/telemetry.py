"""What a transport says of itself: frozen snapshots, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from splitzip_aio.abc import ArenaStatistics, DriverStatistics

__all__ = ["HostCacheStatistics", "ResidencyStatistics", "RingStatistics", "TimeStatistics", "TransportStatistics"]


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """A snapshot of a staging ring.

    Attributes:
        slots: how many slots there are; each is in one of the four states below.
        slot_bytes: bytes of a slot, its room for the decode table included.
        pinned: the slots are page-locked and known to CUDA, so that copies from them are asynchronous.
        fallback: why the slots are not pinned although that was asked for; None if they are, or need not be.
        free: slots that nobody uses.
        reading: slots that a driver fills.
        ready: slots that are filled and wait for the dispatcher.
        copying: slots that are being copied to the device, or decoded from in place.
        acquired: how often a slot was taken since the ring was made.
    """

    slots: int
    slot_bytes: int
    pinned: bool
    fallback: str | None
    free: int
    reading: int
    ready: int
    copying: int
    acquired: int


@dataclass(frozen=True, slots=True)
class HostCacheStatistics:
    """A snapshot of a host cache, over all transports that use it.

    Attributes:
        capacity_bytes: the most memory that it may take.
        bytes: memory that it has now: whole pages, with room for decode tables.
        entries: extents that can be found.
        held: extents that a transport is using, or bringing.
        pinned: the memory is page-locked and known to CUDA.
        fallback: why it is not although that was asked for; None if it is, or need not be.
        hits: extents that were asked for and found.
        misses: extents that were asked for and not found.
        admissions: extents that were given room.
        evictions: extents that had to go, for others or for want of memory.
        shrunk: how many of ``evictions`` were for want of memory.
    """

    capacity_bytes: int
    bytes: int
    entries: int
    held: int
    pinned: bool
    fallback: str | None
    hits: int
    misses: int
    admissions: int
    evictions: int
    shrunk: int


@dataclass(frozen=True, slots=True)
class ResidencyStatistics:
    """A snapshot of which layers the arena holds, and how they came there.

    Attributes:
        resident: layers decoded and in the arena.
        leased: resident layers with at least one lease.
        loading: layers on their way.
        waiting: layers that wait for room in the arena.
        draining: loads given up or failed, whose last reads are still in flight.
        demands: prefetches asked for.
        hits: demands that found their layer resident.
        joins: demands that found their layer on its way or waiting.
        misses: the other demands: nobody had foreseen or asked for their layer, or it had to go.
        read_ahead: loads begun before anyone asked for their layer.
        loaded: loads completed.
        abandoned: loads given up because everyone who waited was cancelled, a demand needed the room, or
            the transport was closed.
        failed: loads that ended in an error.
        corrupt: how many of ``failed`` were due to wrong bytes in the cache.
        evictions: resident layers that had to make room.
    """

    resident: int
    leased: int
    loading: int
    waiting: int
    draining: int
    demands: int
    hits: int
    joins: int
    misses: int
    read_ahead: int
    loaded: int
    abandoned: int
    failed: int
    corrupt: int
    evictions: int


@dataclass(frozen=True, slots=True)
class TimeStatistics:
    """What a transport waited for since it was opened, in seconds that add up to that time.

    At each instant it is one of these: the furthest stage downstream that has a backlog, that is two slots or more, or
    one and no work behind it. Times are those at which the event loop learned of things.

    Attributes:
        disk_s: for reads, while no more than one slot was being copied or decoded.
        slot_s: for a free slot: reads were queued and none was under way, and no more than one slot was being copied
            or decoded. A larger ring would help.
        copy_s: for slots to be copied to the device, each counted from when it was filled until its copy was done.
            Zero on the CPU, where slots are decoded from where they are.
        decode_s: for slots to be decoded, each counted from the end of its copy until its checksums were there; on the
            CPU from when it was filled.
        consumer_s: for whoever uses the layers: nothing was on its way, either because nothing was asked for or
            foreseen, or because the arena was full of layers in use.
    """

    disk_s: float
    slot_s: float
    copy_s: float
    decode_s: float
    consumer_s: float


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """A snapshot of a transport.

    Attributes:
        device: where layers are decoded to, as torch writes it.
        io: the driver: which one, whether buffers are fixed, bytes read directly and in all.
        ring: the staging ring.
        arena: the memory that layers are decoded into.
        residency: the layers in it.
        time: what was waited for, and how long.
        layers: layers in the cache.
        direct_files: packs that are read past the page cache, except for what it holds already.
        files: packs.
        direct_bytes: bytes read past the page cache.
        buffered_bytes: bytes read through it.
        mapped_bytes: bytes that were not read, since they could be decoded from where the page cache has them.
        host_bytes: bytes that came from the host tier instead.
        host: the host tier, shared or not; None without one.
        wire_bytes: encoded bytes decoded so far, headers included, without what reads brought beside them.
        decoded_bytes: bytes decoded so far.
        fallbacks: for each better way that could not be taken, what and why; empty if none.
    """

    device: str
    io: DriverStatistics
    ring: RingStatistics
    arena: ArenaStatistics
    residency: ResidencyStatistics
    time: TimeStatistics
    layers: int
    direct_files: int
    files: int
    direct_bytes: int
    buffered_bytes: int
    mapped_bytes: int
    host_bytes: int
    host: HostCacheStatistics | None
    wire_bytes: int
    decoded_bytes: int
    fallbacks: tuple[str, ...]
