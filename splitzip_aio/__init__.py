"""Losslessly compressed checkpoints, streamed asynchronously and decoded bit for bit.

Every public name is here. All but the errors are imported when they are first used: importing the package
itself loads neither torch nor triton nor liburing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from splitzip_aio.errors import (
    BusyError,
    CacheBusyError,
    CacheError,
    CacheExistsError,
    CacheNotFoundError,
    CheckpointError,
    ClosedError,
    CorruptDataError,
    DriverUnavailableError,
    InvalidArgumentError,
    LayerTooLargeError,
    LeaseReleasedError,
    ManifestError,
    ReadError,
    SourceChangedError,
    SplitZipError,
    TransportError,
    UnknownLayerError,
    UnsupportedError,
    WrongEventLoopError,
)

if TYPE_CHECKING:
    from splitzip_aio.abc import Arena, ReadDriver
    from splitzip_aio.arena import CudaArena, HostArena
    from splitzip_aio.blocking import BlockingLease, BlockingTransport
    from splitzip_aio.cache import BuildReport, SplitZipShardCache, SplitZipShardCacheBuilder, build_cache
    from splitzip_aio.codec import (
        GpuSplitZipDecoder,
        GpuSplitZipEncoder,
        PayloadMeta,
        Schedule,
        SplitZipCodebook,
        calibrate_codebook,
        decode_torch,
        encode_torch,
        triton_available,
    )
    from splitzip_aio.drivers import open_driver
    from splitzip_aio.drivers.faults import FaultKind, FaultSchedule, faulty_driver
    from splitzip_aio.host_cache import HostCache
    from splitzip_aio.materialize import cache_path, load_file
    from splitzip_aio.offloading import OffloadStatistics, OffloadWarning, detach, offload, offload_statistics
    from splitzip_aio.timeline import Timeline
    from splitzip_aio.transport import Lease, Transport, open_transport
    from splitzip_aio.vmm_fast import (
        SplitZipNativeShardTransport,
        bind_slice_aliases,
        enable_splitzip_fast_transport,
    )

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "BlockingLease",
    "BlockingTransport",
    "BuildReport",
    "BusyError",
    "CacheBusyError",
    "CacheError",
    "CacheExistsError",
    "CacheNotFoundError",
    "CheckpointError",
    "ClosedError",
    "CorruptDataError",
    "CudaArena",
    "DriverUnavailableError",
    "FaultKind",
    "FaultSchedule",
    "GpuSplitZipDecoder",
    "GpuSplitZipEncoder",
    "HostArena",
    "HostCache",
    "InvalidArgumentError",
    "LayerTooLargeError",
    "Lease",
    "LeaseReleasedError",
    "ManifestError",
    "OffloadStatistics",
    "OffloadWarning",
    "PayloadMeta",
    "ReadDriver",
    "ReadError",
    "Schedule",
    "SourceChangedError",
    "SplitZipCodebook",
    "SplitZipError",
    "SplitZipNativeShardTransport",
    "SplitZipShardCache",
    "SplitZipShardCacheBuilder",
    "Timeline",
    "Transport",
    "TransportError",
    "UnknownLayerError",
    "UnsupportedError",
    "WrongEventLoopError",
    "__version__",
    "bind_slice_aliases",
    "build_cache",
    "cache_path",
    "calibrate_codebook",
    "decode_torch",
    "detach",
    "enable_splitzip_fast_transport",
    "encode_torch",
    "faulty_driver",
    "load_file",
    "offload",
    "offload_statistics",
    "open_driver",
    "open_transport",
    "triton_available",
]

_LAZY = {
    "abc": ("Arena", "ReadDriver"),
    "arena": ("CudaArena", "HostArena"),
    "blocking": ("BlockingLease", "BlockingTransport"),
    "cache": ("BuildReport", "SplitZipShardCache", "SplitZipShardCacheBuilder", "build_cache"),
    "codec": (
        "GpuSplitZipDecoder",
        "GpuSplitZipEncoder",
        "PayloadMeta",
        "Schedule",
        "SplitZipCodebook",
        "calibrate_codebook",
        "decode_torch",
        "encode_torch",
        "triton_available",
    ),
    "drivers": ("open_driver",),
    "drivers.faults": ("FaultKind", "FaultSchedule", "faulty_driver"),
    "host_cache": ("HostCache",),
    "materialize": ("cache_path", "load_file"),
    "offloading": ("OffloadStatistics", "OffloadWarning", "detach", "offload", "offload_statistics"),
    "timeline": ("Timeline",),
    "transport": ("Lease", "Transport", "open_transport"),
    "vmm_fast": ("SplitZipNativeShardTransport", "bind_slice_aliases", "enable_splitzip_fast_transport"),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
