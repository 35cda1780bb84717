"""Source checkpoints: safetensors files, directories of them, and shards listed by an index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.cache.checks import is_file_name
from splitzip_aio.cache.files import read_at
from splitzip_aio.cache.header import (
    MAX_HEADER_BYTES,
    FileIdentity,
    SourceFile,
    SourceTensor,
    parse_json,
    read_header,
)
from splitzip_aio.cache.layers import natural_key
from splitzip_aio.errors import CheckpointError, SourceChangedError

__all__ = ["Checkpoint", "CheckpointReader", "FileTensor", "Sources", "open_checkpoint"]

Sources: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A ``.safetensors`` file, an index of shards, a directory holding either, or several of these."""

_INDEX_SUFFIX = ".safetensors.index.json"
_USUAL_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files with distinct names, and the tensors in them, also with distinct names."""

    files: tuple[SourceFile, ...]

    @property
    def tensors(self) -> list[SourceTensor]:
        """Every tensor, file by file."""
        return [tensor for file in self.files for tensor in file.tensors]


def open_checkpoint(sources: Sources) -> Checkpoint:
    """Find the files that ``sources`` stand for, and read and check their headers.

    A directory stands for the shards of its index if it has one, else for all its ``.safetensors`` files.

    Raises:
        CheckpointError: nothing there, a file is damaged, a shard is missing or lacks a tensor that the index promises,
            or two files or two tensors have the same name.
    """
    given = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not given:
        raise CheckpointError("no source given; name a .safetensors file or a directory")
    files = [file for source in given for file in _expand(Path(source))]
    _refuse_twins(files)
    return Checkpoint(tuple(files))


def _expand(source: Path) -> list[SourceFile]:
    if source.name.endswith(_INDEX_SUFFIX):
        return _indexed(source)
    if not source.is_dir():
        return [read_header(source)]
    try:
        names = sorted((entry.name for entry in source.iterdir()), key=natural_key)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from error
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if _USUAL_INDEX in indexes:
        return _indexed(source / _USUAL_INDEX)
    if len(indexes) > 1:
        raise CheckpointError(f"{source}: has several indexes, {', '.join(indexes)}; name the one that is meant")
    if indexes:
        return _indexed(source / indexes[0])
    shards = [name for name in names if name.endswith(".safetensors")]
    if not shards:
        raise CheckpointError(f"{source}: expected .safetensors files, found none")
    return [read_header(source / name) for name in shards]


def _indexed(index: Path) -> list[SourceFile]:
    files = {}
    for shard, promised in _shards(index).items():
        if not _exists(index.parent / shard):
            raise CheckpointError(
                f"{index}: weight_map names shard {shard!r}, which is not in {index.parent}; fetch it"
            )
        files[shard] = read_header(index.parent / shard)
        missing = promised - {tensor.name for tensor in files[shard].tensors}
        if missing:
            raise CheckpointError(
                f"{index}: weight_map places {min(missing)!r} in {shard!r}, which has no such tensor; index and shards "
                "are of different checkpoints: fetch both again"
            )
    return list(files.values())


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no file can have such a name, or this one cannot be looked at
        return False


def _shards(index: Path) -> dict[str, set[str]]:
    """Names of the tensors of each shard, by shard in natural order, as an index tells it."""
    try:
        with index.open("rb") as file:
            raw = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{index}: expected at most {MAX_HEADER_BYTES} bytes; this is no index of shards")
    content = parse_json(raw, index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: weight_map: expected an object from tensor to shard; fetch the index again")
    shards: dict[str, set[str]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or not is_file_name(shard):
            raise CheckpointError(
                f"{index}: weight_map: {name!r}: expected the name of a file beside the index, found {shard!r}"
            )
        shards.setdefault(shard, set()).add(name)
    return {shard: shards[shard] for shard in sorted(shards, key=natural_key)}


def _refuse_twins(files: list[SourceFile]) -> None:
    paths: dict[str, Path] = {}
    owners: dict[str, Path] = {}
    for file in files:
        other = paths.setdefault(file.name, file.path)
        if other is not file.path:
            raise CheckpointError(
                f"{file.path}: has the same file name as {other}; slices are looked up by it: rename one"
            )
        for tensor in file.tensors:
            owner = owners.setdefault(tensor.name, file.path)
            if owner is not file.path:
                raise CheckpointError(f"{file.path}: tensor {tensor.name!r} is also in {owner}; give only one of them")


class CheckpointReader:
    """Reads tensors of a checkpoint piece by piece, one open file at a time. Close it, or use ``with``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files: Mapping[str, SourceFile] = {file.name: file for file in checkpoint.files}
        self._open: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read_into(self, tensor: SourceTensor, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``, (n,) uint8, with the bytes of ``tensor`` from its byte ``offset`` on.

        Raises:
            SourceChangedError: the file is not the one whose header was read.
            CheckpointError: the file ends early.
            ReadError: the operating system failed the read.
        """
        file = self._files[tensor.file]
        count = read_at(self._descriptor(file), out.data, tensor.offset + offset, file.path)
        if count != out.size:
            self.check_unchanged()
            raise CheckpointError(
                f"{file.path}: {tensor.name!r}: expected {out.size} bytes at {tensor.offset + offset}, found {count}; "
                "the file was truncated"
            )

    def check_unchanged(self) -> None:
        """Compare every file with what it was when its header was read.

        Raises:
            SourceChangedError: a file was written to, replaced or removed.
        """
        for file in self._files.values():
            try:
                found: FileIdentity | None = FileIdentity.of(file.path.stat())
            except OSError:
                found = None
            if found != file.identity:
                raise _changed(file, found)

    def close(self) -> None:
        """Close the open file, if any. Idempotent."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _descriptor(self, file: SourceFile) -> int:
        if self._open is not None and self._open[0] == file.name:
            return self._open[1]
        self.close()
        try:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceChangedError(f"{file.path}: was readable, now is not: {error.strerror}") from error
        self._open = file.name, descriptor
        found = FileIdentity.of(os.fstat(descriptor))
        if found != file.identity:
            raise _changed(file, found)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a checkpoint together with the reader of its bytes."""

    reader: CheckpointReader
    tensor: SourceTensor

    @property
    def dtype(self) -> str:
        """Safetensors dtype name."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.tensor.nbytes

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``, (n,) uint8, from byte ``offset`` on."""
        self.reader.read_into(self.tensor, offset, out)


def _changed(file: SourceFile, found: FileIdentity | None) -> SourceChangedError:
    state = "gone" if found is None else f"{found.size} bytes, modified at {found.mtime_ns} ns, inode {found.inode}"
    was = file.identity
    return SourceChangedError(
        f"{file.path}: changed while it was read: expected {was.size} bytes, modified at {was.mtime_ns} ns, inode "
        f"{was.inode}, found {state}; build again once it is complete"
    )
