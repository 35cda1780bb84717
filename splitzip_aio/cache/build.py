"""``build_cache``: a checkpoint on disk in, a cache out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple

import msgspec
from blake3 import blake3

from splitzip_aio.cache.builder import PACK_BYTES, SplitZipShardCacheBuilder
from splitzip_aio.cache.checkpoint import Checkpoint, CheckpointReader, FileTensor, Sources, open_checkpoint
from splitzip_aio.cache.contents import BuildReport
from splitzip_aio.cache.header import SourceTensor
from splitzip_aio.cache.layers import LayerRule, execution_key, layer_name
from splitzip_aio.cache.manifest import FORMAT, Source
from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.codec.layout import SEGMENT_ELEMENTS
from splitzip_aio.codec.payload import VERSION
from splitzip_aio.codec.schedule import Schedule

__all__ = ["build_cache"]


def build_cache(
    sources: Sources,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    schedule: str | Sequence[int] | Schedule | None = None,
    coverage_min: float | None = None,
    segment_elements: int = SEGMENT_ELEMENTS,
    pack_bytes: int = PACK_BYTES,
    device: str = "auto",
    layer_of: LayerRule | None = None,
    progress: ProgressCallback | None = None,
) -> BuildReport:
    """Compress a checkpoint into a cache that holds every tensor of it, losslessly.

    Memory stays at a few segments, or with a GPU a few batches of 32 MiB, however large the checkpoint. Tensors are
    placed by layer and name in natural order (``blocks.2`` before ``blocks.10``). A build that was killed continues
    where it was when it is started again with the same sources and options; one that fails or is interrupted removes
    what it made.

    Args:
        sources: a ``.safetensors`` file, a ``.safetensors.index.json``, a directory with either, or several of these.
        out: directory of the cache; new, empty, or with ``force`` a cache, which serves readers until it is replaced.
        force: replace a cache.
        schedule: how to code exponents, such as ``"top16"``, ``"2,3"`` or ``(2, 3)``, where that applies to the dtype
            and is not larger than storing; by default the smallest for each tensor.
        coverage_min: store tensors whose 16 most frequent exponents make up less than this share; by default none.
        segment_elements: elements of a segment, the unit of reading and checking.
        pack_bytes: size at which another pack file is begun.
        device: what encodes: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``, a GPU where one can be used. The cache
            is the same.
        layer_of: from a tensor's name to its layer's; by default ``splitzip_aio.cache.layer_name``.
        progress: called after each segment.

    Raises:
        CheckpointError: a source is missing, damaged or contradicts its index; nothing was made.
        SourceChangedError: a source changed during the build.
        CacheExistsError: ``out`` holds something that is no cache, or a cache and not ``force``.
        CacheBusyError: another builder is at work in ``out``.
        CacheError: ``out`` cannot be written, as when the disk is full.
        ReadError: the operating system failed a read.
        InvalidArgumentError: an option is out of range.
        UnsupportedError: ``device`` names a GPU that is not there, or Triton is missing.
    """
    checkpoint = open_checkpoint(sources)
    rule = layer_of or layer_name
    tensors = sorted(checkpoint.tensors, key=lambda tensor: execution_key(tensor.name, rule))
    options = (None if schedule is None else str(Schedule.parse(schedule)), coverage_min, segment_elements, pack_bytes)
    builder = SplitZipShardCacheBuilder(
        out,
        force=force,
        schedule=schedule,
        coverage_min=coverage_min,
        segment_elements=segment_elements,
        pack_bytes=pack_bytes,
        device=device,
        layer_of=rule,
        sources=[
            Source(file.name, file.identity.size, file.header_hash, dict(file.metadata)) for file in checkpoint.files
        ],
    )
    with builder, CheckpointReader(checkpoint) as reader:
        done = builder.resume(_plan(checkpoint, tensors, rule, options))
        _add(builder, reader, tensors, done, [file.name for file in checkpoint.files], progress)
        reader.check_unchanged()
        return builder.finish()


def _add(
    builder: SplitZipShardCacheBuilder,
    reader: CheckpointReader,
    tensors: Sequence[SourceTensor],
    start: int,
    files: Sequence[str],
    progress: ProgressCallback | None,
) -> None:
    total = sum(tensor.nbytes for tensor in tensors)
    done = sum(tensor.nbytes for tensor in tensors[:start])
    index = {name: place for place, name in enumerate(files)}
    for tensor in tensors[start:]:

        def advance(nbytes: int, name: str = tensor.name) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(Progress(done, total, name))

        origin = (index[tensor.file], tensor.offset)
        builder.add(tensor.name, FileTensor(reader, tensor), origin=origin, advance=advance)


def _plan(checkpoint: Checkpoint, tensors: Sequence[SourceTensor], rule: LayerRule, options: tuple[object, ...]) -> str:
    """Stands for all that determines the cache: formats, options, the files as they are, the order."""
    files = [(str(file.path.resolve()), astuple(file.identity), file.header_hash) for file in checkpoint.files]
    order = [(tensor.name, rule(tensor.name)) for tensor in tensors]
    return blake3(msgspec.json.encode((FORMAT, VERSION, options, files, order))).hexdigest()
