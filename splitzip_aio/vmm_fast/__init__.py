"""The drop-in for the vmm_fast route of diffusers-dynamic-offloader.

::

    loaded = from_pretrained_with_dynamic_offload(directory, ..., dynamic_offload_config=config, apply_dynamic=True)
    with enable_splitzip_fast_transport(loaded.hook, "cache/", host_cache_bytes="4GiB"):
        loaded.module(...)

That route keeps a model's weights in files, and brings those of an execution unit into an arena of virtual memory just
before the unit runs. Its native transport reads raw bytes when they are asked for. This one learns the order in which
units run, reads ahead of them from a compressed cache, decodes on the GPU, and has only a copy within its memory left
to do when a unit is asked for.
"""

from __future__ import annotations

from splitzip_aio.vmm_fast.enabling import bind_slice_aliases, enable_splitzip_fast_transport
from splitzip_aio.vmm_fast.shard_transport import SplitZipNativeShardTransport
from splitzip_aio.vmm_fast.statistics import VmmFastStatistics

__all__ = [
    "SplitZipNativeShardTransport",
    "VmmFastStatistics",
    "bind_slice_aliases",
    "enable_splitzip_fast_transport",
]
