"""Caches on disk: built from safetensors checkpoints, found by name, content or slice, read with every byte checked."""

from __future__ import annotations

from splitzip_aio.cache.build import build_cache
from splitzip_aio.cache.builder import SplitZipShardCacheBuilder
from splitzip_aio.cache.contents import BuildReport
from splitzip_aio.cache.entry import Entry, SegmentExtent
from splitzip_aio.cache.layers import LayerRule, layer_name
from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.cache.shard_cache import SplitZipShardCache
from splitzip_aio.cache.verify import Damage, VerifyReport

__all__ = [
    "BuildReport",
    "Damage",
    "Entry",
    "LayerRule",
    "Progress",
    "ProgressCallback",
    "SegmentExtent",
    "SplitZipShardCache",
    "SplitZipShardCacheBuilder",
    "VerifyReport",
    "build_cache",
    "layer_name",
]
