"""Tensors that outlive the cache they come from: ``load_file``, and what it is made of."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from splitzip_aio.blocking import BlockingLease, BlockingTransport, PendingLease
from splitzip_aio.cache import Entry, SplitZipShardCache, build_cache
from splitzip_aio.cache.manifest import MANIFEST_NAME
from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.errors import CacheError, CacheNotFoundError, InvalidArgumentError, SourceChangedError

__all__ = ["cache_path", "copy_tensors", "find_cache", "load_file"]

_CHUNK_BYTES = 64 << 20  # asked for at once: few enough to be cheap, small enough for several to be on their way
_AHEAD = 3
_UNWANTED = "(not asked for)"

PathLike = str | os.PathLike[str]


def load_file(
    path: PathLike,
    device: str | torch.device = "cpu",
    *,
    build: bool = False,
    cache_home: PathLike | None = None,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by way of its cache: ``safetensors.torch.load_file``, with fewer bytes to read.

    Each tensor has memory of its own, and is the caller's to keep and to change.

    Args:
        path: a cache; or a checkpoint, a file or a directory, that has its cache beside it or in ``cache_home``
            (see ``cache_path``). The checkpoint itself need not be there any more; if it is, it must be the one that
            the cache was built from.
        device: where the tensors go, such as ``"cuda"``.
        build: make the cache if there is none, or one of an older checkpoint.
        cache_home: a directory of caches, for checkpoints in places that nobody should write to.
        progress: called as bytes arrive, and while a cache is built.
        options: for a GPU, as for ``open_transport``: ``ring_bytes``, ``driver``, ``io``.

    Raises:
        CacheNotFoundError: there is no cache, and nobody asked to build one.
        SourceChangedError: the checkpoint is not the one that the cache was built from.
        CheckpointError: ``build``, and there is no usable checkpoint.
        CorruptDataError: stored bytes are wrong.
        UnsupportedError: there is no such device here.
    """
    root = find_cache(path, build=build, cache_home=cache_home, progress=progress)
    with SplitZipShardCache(root) as cache:
        return copy_tensors(cache, cache.tensors, device, progress=progress, **options)


def cache_path(checkpoint: PathLike, cache_home: PathLike | None = None) -> Path:
    """Where the cache of a checkpoint is looked for, and built.

    Beside it, as ``model.safetensors.splitzip``; in a ``cache_home`` with a hash of the checkpoint's full path, since
    most files are named ``model.safetensors``.
    """
    path = Path(os.path.abspath(checkpoint))
    if cache_home is None:
        return path.with_name(f"{path.name}.splitzip")
    return Path(cache_home) / f"{path.name}-{blake3(os.fsencode(path)).hexdigest()[:16]}.splitzip"


def find_cache(
    path: PathLike,
    *,
    build: bool = False,
    cache_home: PathLike | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """The cache that ``path`` is, or that belongs to the checkpoint at ``path``; see ``load_file``."""
    if (Path(path) / MANIFEST_NAME).exists():
        return Path(path)
    root = cache_path(path, cache_home)
    stale = _stale(Path(path), root)
    if stale is None:
        return root
    if not build:
        raise stale
    build_cache(path, root, force=True, progress=progress)
    return root


def copy_tensors(
    cache: SplitZipShardCache,
    names: Iterable[str],
    device: str | torch.device,
    *,
    progress: ProgressCallback | None = None,
    room_bytes: int | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The tensors of these names, each in memory of its own on the device, ready for any stream.

    Meanwhile a GPU holds up to ``room_bytes`` more, or what the largest tensor needs; by default what is fast.

    Raises:
        CacheError: the cache has no such tensor.
        UnsupportedError, CorruptDataError, ReadError: as ``open_transport`` and ``Transport.prefetch``.
    """
    entries = list(_entries(cache, names))
    try:
        target = torch.device(device)
    except RuntimeError as exc:
        raise InvalidArgumentError(f"device: expected 'cpu' or one like 'cuda:0', found {device!r}") from exc
    meter = _Meter(sum(entry.nbytes for entry in entries), progress)
    if target.type == "cpu":
        return _decode(cache, entries, meter)
    return _stream(cache, entries, target, meter, room_bytes, options)


class _Meter:
    """Adds up what arrived, in whichever thread."""

    def __init__(self, total_bytes: int, progress: ProgressCallback | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, entry: Entry) -> None:
        with self._lock:
            self._done_bytes += entry.nbytes
            if self._progress is not None:
                self._progress(Progress(self._done_bytes, self._total_bytes, entry.name))


def _stale(checkpoint: Path, root: Path) -> CacheError | None:
    """Why the cache at ``root`` cannot stand for the checkpoint; None if it can."""
    if not (root / MANIFEST_NAME).exists():
        return CacheNotFoundError(
            f"{checkpoint}: is no cache, and has none at {root}; make one with build=True, or "
            f"splitzip-aio build {checkpoint} {root}"
        )
    if checkpoint.exists():
        with SplitZipShardCache(root) as cache:
            try:
                cache.check_sources(checkpoint if checkpoint.is_dir() else checkpoint.parent)
            except SourceChangedError as exc:
                return exc
    return None


def _entries(cache: SplitZipShardCache, names: Iterable[str]) -> Iterator[Entry]:
    """Entries in execution order, which is that of the packs."""
    wanted = set(names)
    missing = sorted(wanted - cache.tensors.keys())
    if missing:
        raise CacheError(f"{cache.root}: the cache has no tensor {missing[0]!r}")
    return (entry for name, entry in cache.tensors.items() if name in wanted)


def _decode(cache: SplitZipShardCache, entries: Sequence[Entry], meter: _Meter) -> dict[str, torch.Tensor]:
    """Decode to where the tensors stay, several at a time: reading and decoding leave the GIL alone."""

    def load(entry: Entry) -> torch.Tensor:
        tensor = cache.load_tensor(entry)
        meter.add(entry)
        return tensor

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="splitzip_aio_load") as pool:
        futures = [pool.submit(load, entry) for entry in entries]
        try:
            return {entry.name: future.result() for entry, future in zip(entries, futures, strict=True)}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _stream(
    cache: SplitZipShardCache,
    entries: Sequence[Entry],
    device: torch.device,
    meter: _Meter,
    room_bytes: int | None,
    options: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Stream chunk by chunk through a small arena, and copy each out of it on the device."""
    chunks = _chunks(entries)
    chunk_of = {entry.name: label for label, members in chunks.items() for entry in members}
    largest = max((sum(entry.nbytes for entry in members) for members in chunks.values()), default=0)
    # Of all tensors, the cache's own order is the right one; it ends, and a given one would start again.
    order = None if len(entries) == len(cache.tensors) else list(chunks)
    arena_bytes = largest + _AHEAD * (_CHUNK_BYTES + (1 << 20))
    if room_bytes is not None:
        arena_bytes = max(largest + (1 << 20), min(arena_bytes, room_bytes))
    tensors: dict[str, torch.Tensor] = {}
    with BlockingTransport(
        cache,
        device=device,
        layer_of=lambda name: chunk_of.get(name, _UNWANTED),
        order=order,
        arena_bytes=arena_bytes,
        **options,
    ) as transport:
        for lease in _in_turn(transport, list(chunks)):
            with lease:
                for entry in chunks[lease.layer]:
                    tensors[entry.name] = lease.tensors[entry.name].clone()
                    meter.add(entry)
        if transport.device.type == "cuda":
            torch.cuda.synchronize(transport.device)
    return tensors


def _chunks(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Tensors that follow each other, together until they are enough; a large one alone."""
    chunks: dict[str, list[Entry]] = {}
    label, size = "", _CHUNK_BYTES
    for entry in entries:
        if size + entry.nbytes > _CHUNK_BYTES:
            label, size = f"from {entry.name}", 0
        chunks.setdefault(label, []).append(entry)
        size += entry.nbytes
    return chunks


def _in_turn(transport: BlockingTransport, layers: Sequence[str]) -> Iterator[BlockingLease]:
    """A lease on each layer, with the next ones asked for."""
    pending: deque[PendingLease] = deque()
    coming = iter(layers)
    try:
        while True:
            while len(pending) <= _AHEAD and (layer := next(coming, None)) is not None:
                pending.append(transport.begin(layer))
            if not pending:
                return
            yield pending.popleft().wait()
    finally:
        for each in pending:
            each.cancel()
