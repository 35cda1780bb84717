"""Safetensors headers, parsed with every claim checked against the file that makes it.

A file is an 8-byte little-endian header length, a JSON object, and the data of its tensors without gap or overlap.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from blake3 import blake3

from splitzip_aio.codec.dtypes import DTYPE_BITS, tensor_bytes
from splitzip_aio.errors import CheckpointError

__all__ = ["MAX_HEADER_BYTES", "FileIdentity", "SourceFile", "SourceTensor", "parse_json", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors format sets itself."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Identity of a file by its status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor in a safetensors file: ``nbytes`` bytes at ``offset`` from the start of the file named ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A safetensors file whose header is valid.

    ``header_hash`` is the BLAKE3, in hexadecimal, of its first 8 bytes and its header. ``tensors`` are in the order of
    the header.
    """

    path: Path
    identity: FileIdentity
    header_hash: str
    metadata: Mapping[str, str]
    tensors: tuple[SourceTensor, ...]

    @property
    def name(self) -> str:
        """The file's name without directories: what slice keys call it."""
        return self.path.name


class _Header:
    """One header under inspection: knows the file, so that every complaint names it."""

    def __init__(self, path: Path, data_bytes: int) -> None:
        self.path = path
        self.data_bytes = data_bytes

    def fail(self, field: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {field}: {problem}; the file is damaged: fetch or save it again")

    def tensor(self, name: str, entry: Any, data_start: int) -> SourceTensor:
        if not isinstance(entry, dict):
            self.fail(repr(name), f"expected an object, found {_shown(entry)}")
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if not isinstance(dtype, str):
            self.fail(f"{name!r}.dtype", f"expected a dtype name, found {_shown(dtype)}")
        if not _is_int_list(shape):
            self.fail(f"{name!r}.shape", f"expected a list of integers, found {_shown(shape)}")
        if not (_is_int_list(offsets) and len(offsets) == 2 and 0 <= offsets[0] <= offsets[1]):
            self.fail(f"{name!r}.data_offsets", f"expected [begin, end], found {_shown(offsets)}")
        begin, end = offsets
        if end > self.data_bytes:
            self.fail(f"{name!r}.data_offsets", f"ends at {end}, but the file has {self.data_bytes} bytes of data")
        if dtype not in DTYPE_BITS:
            self.fail(f"{name!r}.dtype", f"expected one of {', '.join(DTYPE_BITS)}, found {_shown(dtype)}")
        try:
            nbytes = tensor_bytes(dtype, shape)
        except ValueError as error:
            self.fail(f"{name!r}.shape", str(error))
        if nbytes != end - begin:
            self.fail(
                f"{name!r}.data_offsets",
                f"{dtype} {_shown(shape)} has {nbytes} bytes, found {end - begin} between {begin} and {end}",
            )
        return SourceTensor(name, dtype, tuple(shape), self.path.name, data_start + begin, nbytes)

    def check_cover(self, tensors: list[SourceTensor], data_start: int) -> None:
        """Refuse overlaps, gaps, and data that no tensor claims."""
        reached, previous = data_start, "the header"
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset != reached:
                relation = "overlaps" if tensor.offset < reached else "leaves a gap after"
                self.fail(
                    f"{tensor.name!r}.data_offsets",
                    f"{relation} {previous}: expected begin {reached - data_start}, found {tensor.offset - data_start}",
                )
            reached, previous = tensor.offset + tensor.nbytes, repr(tensor.name)
        if reached != data_start + self.data_bytes:
            self.fail(
                "data", f"tensors end at {reached - data_start}, but the file has {self.data_bytes} bytes of data"
            )


def read_header(path: Path) -> SourceFile:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file cannot be read or is not a valid safetensors file; names file and field.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: expected a regular file; give a .safetensors file or a directory")
            prefix = file.read(_LENGTH_BYTES)
            length = _header_length(path, prefix, status.st_size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) != length:
        raise CheckpointError(f"{path}: header: expected {length} bytes, found {len(raw)}; the file was truncated")
    start = _LENGTH_BYTES + length
    metadata, tensors = _parse(_Header(path, status.st_size - start), raw, start)
    digest = blake3(prefix + raw).hexdigest()
    return SourceFile(path, FileIdentity.of(status), digest, MappingProxyType(metadata), tuple(tensors))


def parse_json(raw: bytes, path: Path) -> Any:
    """Parse JSON that others wrote: UTF-8, no duplicate keys, no NaN, no nesting that exhausts the stack.

    Raises:
        CheckpointError: it is none; names the file and what is wrong.
    """
    try:
        return json.loads(raw.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(
            f"{path}: header: expected JSON, found {_shown(raw)}: {reason}; the file is damaged: fetch or save it again"
        ) from error


def _header_length(path: Path, prefix: bytes, file_bytes: int) -> int:
    length = int.from_bytes(prefix, "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES)
    if len(prefix) < _LENGTH_BYTES or not 2 <= length <= limit:
        raise CheckpointError(
            f"{path}: header length: expected 2 to {max(limit, 2)} in a file of {file_bytes} bytes, found "
            f"{length if len(prefix) == _LENGTH_BYTES else 'none'}; the file is truncated or not safetensors"
        )
    return length


def _parse(header: _Header, raw: bytes, start: int) -> tuple[dict[str, str], list[SourceTensor]]:
    entries = parse_json(raw, header.path)
    if not isinstance(entries, dict):
        header.fail("header", f"expected an object, found {_shown(entries)}")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        header.fail("__metadata__", f"expected an object of strings, found {_shown(metadata)}")
    tensors = [header.tensor(name, entry, start) for name, entry in entries.items()]
    header.check_cover(tensors, start)
    return metadata, tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} occurs twice")
    lone = next((key for key, value in pairs if _has_surrogate(key) or _has_surrogate(value)), None)
    if lone is not None:
        raise ValueError(f"{lone!r} holds half of a surrogate pair, which is no text")
    return found


_SURROGATE = re.compile("[\ud800-\udfff]")


def _has_surrogate(value: Any) -> bool:
    return isinstance(value, str) and _SURROGATE.search(value) is not None


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _shown(value: Any) -> str:
    text = repr(value[:60] if isinstance(value, (bytes, str, list)) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
