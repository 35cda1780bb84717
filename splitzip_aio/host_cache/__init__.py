"""The host tier: compressed extents kept in memory, so that they are read from the disk once and not each round."""

from __future__ import annotations

from splitzip_aio.host_cache.cache import HostCache, HostHold
from splitzip_aio.host_cache.tier import HostTier

__all__ = ["HostCache", "HostHold", "HostTier"]
