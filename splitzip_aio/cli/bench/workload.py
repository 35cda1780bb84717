"""What benchmarks work on: a checkpoint and its cache, made once, and the page cache before each run."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import splitzip_aio
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.cli.output import Output, format_bytes
from splitzip_aio.cli.synthetic import Weight, header, write_weights

__all__ = ["Workload", "drop_from_page_cache", "load_into_page_cache", "prepare"]

_MATRICES = (("qkv", 3, 1), ("up", 4, 1), ("down", 1, 4))  # rows and columns in widths
_SQUARES = sum(rows * columns for _, rows, columns in _MATRICES)
_WIDEST = 4096
_NARROWEST = 64
_BLOCKS_AT_LEAST = 12
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Workload:
    """A checkpoint and the cache that was built of it.

    Attributes:
        checkpoint: a safetensors file, or a directory of them.
        cache: the cache's root.
        files: the checkpoint's files.
        packs: the cache's packs.
        raw_bytes: bytes of the tensors.
        compressed_bytes: bytes of the packs.
    """

    checkpoint: Path
    cache: Path
    files: tuple[Path, ...]
    packs: tuple[Path, ...]
    raw_bytes: int
    compressed_bytes: int

    @property
    def ratio(self) -> float:
        """Compressed bytes over raw ones."""
        return self.compressed_bytes / self.raw_bytes


def prepare(directory: Path, nbytes: int, *, checkpoint: Path | None, device: torch.device, output: Output) -> Workload:
    """Make a checkpoint of about ``nbytes`` bytes in ``directory``, or take ``checkpoint``, and a cache of it.

    What an earlier run made in the same directory with the same size is used again.

    Raises:
        SplitZipError: the checkpoint cannot be read, or the cache not be built.
        OSError: ``directory`` cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    source = checkpoint or directory / "bench.safetensors"
    weights = list(_blocks(nbytes))
    make = checkpoint is None and not _is_made(source, weights)
    if make:
        with output.progress(f"make a checkpoint of {format_bytes(_total(weights))}") as progress:
            write_weights(source, weights, device=device, progress=progress)
    contents = open_checkpoint(source)
    root = directory / "bench-cache"
    if make or not _is_built(root, {(file.name, file.identity.size, file.header_hash) for file in contents.files}):
        with output.progress("compress") as progress:
            splitzip_aio.build_cache(source, root, force=True, progress=progress)
        os.sync()  # what is still to be written is neither dropped from the page cache nor read past it
    packs = tuple(sorted((root / "packs").iterdir()))
    return Workload(
        checkpoint=source,
        cache=root,
        files=tuple(file.path for file in contents.files),
        packs=packs,
        raw_bytes=sum(tensor.nbytes for tensor in contents.tensors),
        compressed_bytes=sum(pack.stat().st_size for pack in packs),
    )


def _blocks(nbytes: int) -> Iterator[Weight]:
    """Transformer blocks, 4096 wide, or narrower if there would be too few of them."""
    width = _WIDEST
    while width > _NARROWEST and _BLOCKS_AT_LEAST * _block_bytes(width) > nbytes:
        width //= 2
    for block in range(max(1, round(nbytes / _block_bytes(width)))):
        for name, rows, columns in _MATRICES:
            yield Weight(f"blocks.{block}.{name}.weight", (rows * width, columns * width))


def _block_bytes(width: int) -> int:
    return 2 * _SQUARES * width * width


def _total(weights: Iterable[Weight]) -> int:
    return sum(2 * math.prod(weight.shape) for weight in weights)


def _is_made(path: Path, weights: list[Weight]) -> bool:
    """Whether ``path`` is what ``write_weights`` would make of ``weights``, as far as header and size tell."""
    expected = header(weights)
    if not path.is_file() or path.stat().st_size != len(expected) + _total(weights):
        return False
    with path.open("rb") as file:
        return file.read(len(expected)) == expected


def _is_built(root: Path, sources: set[tuple[str, int, str]]) -> bool:
    try:
        with splitzip_aio.SplitZipShardCache(root) as cache:
            return {(source.name, source.size, source.header_hash) for source in cache.manifest.sources} == sources
    except splitzip_aio.CacheError:
        return False


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    """Take files out of the page cache: all of it as root, else what the kernel drops when it is asked to."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        for path in paths:
            _advise_dropping(path)


def _advise_dropping(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def load_into_page_cache(paths: Iterable[Path]) -> None:
    """Read files through the page cache."""
    buffer = mmap.mmap(-1, _READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
