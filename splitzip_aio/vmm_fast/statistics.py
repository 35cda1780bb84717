"""What the drop-in says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from splitzip_aio.telemetry import TransportStatistics
from splitzip_aio.vmm_fast.streamer import Counters

__all__ = ["VmmFastStatistics"]


@dataclass(frozen=True, slots=True)
class VmmFastStatistics:
    """A snapshot, counted since the last ``reset_stats``.

    Attributes:
        uploads: weights that came from the cache.
        upload_bytes: their decoded bytes.
        native_uploads: weights that the cache does not have, left to the native transport.
        native_bytes: their bytes.
        waits: how often an upload had to wait for bytes that were not decoded yet.
        wait_s: how long it waited altogether, in seconds; the consumer's thread stood still meanwhile.
        demands: groups of weights that were asked for.
        foreseen: how many of them were decoded or on their way when they were asked for.
        host_share: share of the extents read since then that were in the host tier; 0 without one.
        transport: the transport below, counted since it was opened.
    """

    uploads: int
    upload_bytes: int
    native_uploads: int
    native_bytes: int
    waits: int
    wait_s: float
    demands: int
    foreseen: int
    host_share: float
    transport: TransportStatistics

    @property
    def found_share(self) -> float:
        """Share of the demands that waited for no disk: foreseen, or in the host tier; 1 where nothing was asked for.

        Of the demands that were not foreseen, as many count as in the host tier as of all extents were.
        """
        if not self.demands:
            return 1.0
        foreseen = self.foreseen / self.demands
        return foreseen + (1 - foreseen) * self.host_share

    @classmethod
    def between(cls, origin: TransportStatistics, now: TransportStatistics, counters: Counters) -> VmmFastStatistics:
        """What happened since ``origin``, when ``counters`` were zero."""
        residency, before = now.residency, origin.residency
        return cls(
            uploads=counters.uploads,
            upload_bytes=counters.upload_bytes,
            native_uploads=counters.native_uploads,
            native_bytes=counters.native_bytes,
            waits=counters.waits,
            wait_s=counters.wait_s,
            demands=residency.demands - before.demands,
            foreseen=residency.hits + residency.joins - before.hits - before.joins,
            host_share=_host_share(origin, now),
            transport=now,
        )


def _host_share(origin: TransportStatistics, now: TransportStatistics) -> float:
    if now.host is None or origin.host is None:
        return 0.0
    hits = now.host.hits - origin.host.hits
    asked = hits + now.host.misses - origin.host.misses
    return hits / asked if asked else 0.0
