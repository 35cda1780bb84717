"""Streams a whole cache through the transport, layer by layer, and says how that went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import splitzip_aio
from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.codec import cpu
from splitzip_aio.drivers import DriverName
from splitzip_aio.telemetry import TransportStatistics

__all__ = ["StreamReport", "Visit", "best_device", "stream_cache"]

Visit = Callable[[Mapping[str, torch.Tensor]], None]
"""Called with the tensors of each layer, valid until it returns."""


@dataclass(frozen=True, slots=True)
class StreamReport:
    """One pass over a cache: what was streamed, how fast, and by which means.

    Attributes:
        cache: the cache's root.
        device: where tensors were decoded to; ``gpu`` is its name, None on the CPU.
        codec: what decoded: Triton kernels, or which of the CPU codecs.
        driver: which driver read.
        direct: nothing came from the page cache.
        fixed_buffers: the slots were registered with the kernel.
        pinned: the slots were page-locked for the GPU.
        layers, tensors: how many were handed out.
        raw_bytes: bytes of those tensors.
        wire_bytes: encoded bytes read and copied for them.
        raw_bytes_per_s, wire_bytes_per_s: those over ``seconds``.
        open_s: seconds to open the transport.
        seconds: seconds from the first request until the last layer was decoded.
        fallbacks: each better way that could not be taken, and why.
        statistics: the transport's own account.
    """

    cache: str
    device: str
    gpu: str | None
    codec: str
    driver: str
    direct: bool
    fixed_buffers: bool
    pinned: bool
    layers: int
    tensors: int
    raw_bytes: int
    wire_bytes: int
    open_s: float
    seconds: float
    raw_bytes_per_s: float
    wire_bytes_per_s: float
    fallbacks: tuple[str, ...]
    statistics: TransportStatistics


def best_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the first GPU if torch sees one and Triton is there, else the CPU."""
    if name == "auto":
        decodes = torch.cuda.is_available() and splitzip_aio.triton_available()
        return torch.device("cuda", 0) if decodes else torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as exc:
        raise splitzip_aio.InvalidArgumentError(f"device {name!r}: expected auto, cpu or cuda:0") from exc


async def stream_cache(
    root: Path,
    *,
    device: torch.device,
    driver: DriverName,
    total_bytes: int,
    progress: ProgressCallback,
    visit: Visit | None = None,
) -> StreamReport:
    """Ask for every layer in execution order, and give each to ``visit``; tell ``progress`` how
    many of ``total_bytes`` came.

    Raises:
        SplitZipError: the cache, the driver or the device cannot be used, or stored bytes are wrong.
    """
    tensors = raw_bytes = 0
    began = time.perf_counter()
    async with splitzip_aio.open_transport(root, device=device, driver=driver) as transport:
        opened = time.perf_counter()
        for layer in transport.layers:
            async with await transport.prefetch(layer) as lease:
                if visit is not None:
                    visit(lease.tensors)
                tensors += len(lease.tensors)
                raw_bytes += sum(tensor.nbytes for tensor in lease.tensors.values())
            progress(Progress(raw_bytes, total_bytes, layer))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - opened
        statistics = transport.statistics()
    return StreamReport(
        cache=str(root),
        device=str(device),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        codec="triton" if device.type == "cuda" else cpu.implementation(),
        driver=statistics.io.name,
        direct=statistics.buffered_bytes == statistics.mapped_bytes == 0,
        fixed_buffers=statistics.io.fixed_buffers,
        pinned=statistics.ring.pinned,
        layers=len(transport.layers),
        tensors=tensors,
        raw_bytes=raw_bytes,
        wire_bytes=statistics.wire_bytes,
        open_s=opened - began,
        seconds=seconds,
        raw_bytes_per_s=raw_bytes / seconds,
        wire_bytes_per_s=statistics.wire_bytes / seconds,
        fallbacks=statistics.fallbacks,
        statistics=statistics,
    )
