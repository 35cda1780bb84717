"""What this machine offers the pipeline: each finding with its cause, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import torch

import splitzip_aio
from splitzip_aio.abc import DriverStatistics
from splitzip_aio.cli.output import format_bytes
from splitzip_aio.codec import cpu
from splitzip_aio.drivers import DriverName
from splitzip_aio.errors import UnsupportedError
from splitzip_aio.host_cache.headroom import group_headroom, headroom

__all__ = ["Check", "Examination", "examine"]

Status: TypeAlias = Literal["ok", "warn", "fail"]
"""Works at its best; works, but slower or on less; nothing works without it."""

_RING_BYTES = 256 << 20  # what a transport pins unless it is told otherwise
_PROBE_BYTES = 64 << 10
_ROOT = 0
_OLDEST_TORCH = (2, 8)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it is, and what would better it (empty where nothing needs to)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings; ``healthy`` unless one of them failed."""

    healthy: bool
    checks: tuple[Check, ...]


def examine(directory: Path) -> Examination:
    """Look at the interpreter, the libraries, the GPU and the kernel, and read a small file in ``directory``."""
    looks: tuple[Callable[[], Check], ...] = (
        _package,
        _python,
        _torch,
        _cuda,
        _triton,
        _cpu_codec,
        _memory,
        _locked_memory,
        lambda: anyio.run(_io_uring, directory),
        lambda: anyio.run(_direct_io, directory),
    )
    checks = tuple(look() for look in looks)
    return Examination(all(check.status != "fail" for check in checks), checks)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package() -> Check:
    return Check("splitzip-aio", "ok", f"{splitzip_aio.__version__} in {Path(splitzip_aio.__file__).parent}")


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def _torch() -> Check:
    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        return Check("torch", "fail", detail, "pip install 'torch>=2.8'")
    return Check("torch", "ok", detail)


def _cuda() -> Check:
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        named = ", ".join(f"{device.name} ({format_bytes(device.total_memory)})" for device in devices)
        return Check("cuda", "ok", f"CUDA {torch.version.cuda}: {named}")
    if torch.version.cuda is None:
        cause, remedy = "this build of torch has no CUDA", "on a machine with a GPU, install a CUDA build of torch"
    else:
        cause, remedy = f"torch for CUDA {torch.version.cuda} sees no device", "see what nvidia-smi says"
    return Check("cuda", "warn", f"{cause}; tensors are decoded on the CPU", remedy)


def _triton() -> Check:
    version = _version_of("triton")
    if version is not None:
        return Check("triton", "ok", version)
    if not torch.cuda.is_available():
        return Check("triton", "ok", "not installed, and not needed without a GPU")
    return Check(
        "triton",
        "warn",
        "not installed; tensors are decoded on the CPU and copied",
        "pip install triton",
    )


def _cpu_codec() -> Check:
    codec = cpu.implementation()
    if codec.startswith("numba"):
        return Check("cpu codec", "ok", f"{codec}, numba {_version_of('numba')}")
    try:
        import numba
    except ImportError as exc:
        cause = str(exc)
    else:
        cause = f"numba {numba.__version__} does not serve here"
    return Check("cpu codec", "warn", f"{codec}, fifty times slower: {cause}", "pip install --upgrade numba")


def _memory() -> Check:
    machine, group = headroom(), group_headroom()
    left = f"{format_bytes(machine.available_bytes)} left"
    if group is None:
        return Check("memory", "ok", f"{left}, no limit by a control group")
    detail = f"{left}, a control group (a container) limits this process to {format_bytes(group.total_bytes)}"
    if group.available_bytes > 2 * _RING_BYTES:
        return Check("memory", "ok", detail)
    return Check(
        "memory",
        "warn",
        f"{detail}: little for a staging ring of {format_bytes(_RING_BYTES)}, and what exceeds it is killed",
        "raise the container's memory limit, or pass smaller ring_bytes, arena_bytes and host_cache_bytes",
    )


def _locked_memory() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    if os.geteuid() == _ROOT:
        return Check("locked memory", "ok", f"limit {format_bytes(limit)}, which does not bind root")
    if limit >= _RING_BYTES:
        return Check("locked memory", "ok", f"limit {format_bytes(limit)}")
    return Check(
        "locked memory",
        "warn",
        f"limit {format_bytes(limit)}: the kernel cannot register a staging ring of {format_bytes(_RING_BYTES)}",
        "raise it (ulimit -l, or memlock in /etc/security/limits.conf), or pass a smaller ring_bytes",
    )


async def _io_uring(directory: Path) -> Check:
    try:
        statistics, _ = await _read_back("uring", directory)
    except (UnsupportedError, OSError) as exc:
        return Check("io_uring", "warn", str(exc), "nothing must be done: the threads driver reads instead")
    if statistics.fallbacks:
        return Check("io_uring", "warn", "; ".join(statistics.fallbacks), "raise the limit that the reason names")
    return Check(
        "io_uring",
        "ok",
        f"through {statistics.binding} ({statistics.binding_reason}), buffers registered with the kernel",
    )


async def _direct_io(directory: Path) -> Check:
    name = f"direct I/O in {directory}"
    try:
        statistics, reason = await _read_back("threads", directory)
    except (UnsupportedError, OSError) as exc:
        return Check(name, "warn", str(exc), "run doctor in the directory that will hold the cache")
    if statistics.direct_bytes_read == 0:
        return Check(name, "warn", reason, "put caches on a local disk (ext4, xfs, btrfs) to bypass the page cache")
    return Check(name, "ok", reason)


async def _read_back(driver_name: DriverName, directory: Path) -> tuple[DriverStatistics, str]:
    """Read a new file of ``directory`` with a driver: what the driver says of it, and of how the file was opened."""
    slot = memoryview(mmap.mmap(-1, _PROBE_BYTES))
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".splitzip-doctor-") as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        async with splitzip_aio.open_driver(driver_name, buffers=[slot], queue_depth=1) as driver:
            handle = driver.open(file.name)
            await driver.read(handle, 0, 0, offset=0, nbytes=_PROBE_BYTES)
            return driver.statistics(), handle.reason
