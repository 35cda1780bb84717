"""The manifest: what a cache holds and where, as one JSON file that ends in a checksum of itself.

A manifest may come from anywhere, so nothing in it is believed: every number is checked against the others here, and
the sizes of packs against the files when they are opened. Fields with their default value are left out of the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from splitzip_aio.cache.checks import check_manifest
from splitzip_aio.cache.files import open_beneath, read_at, replace_file
from splitzip_aio.errors import CacheNotFoundError, ManifestError

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "MAX_MANIFEST_BYTES",
    "SCRATCH_NAME",
    "Alias",
    "Blob",
    "Manifest",
    "Pack",
    "Source",
    "Tensor",
    "decode_manifest",
    "encode_manifest",
    "load_manifest",
    "save_manifest",
]

FORMAT = 2
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 28

SCRATCH_NAME = ".manifest.json.new"
_CHECKSUM = re.compile(rb',"checksum":"([0-9a-f]{64})"}\n?\Z')
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_REBUILD = "rebuild the cache, or fetch it again"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file that tensors came from: its name without directories, its size, the BLAKE3 of its header, its metadata."""

    name: str
    size: int
    header_hash: str
    metadata: dict[str, str] = {}


class Pack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file of segments, relative to the root, and its size: a multiple of 4096."""

    file: str
    bytes: int


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor: safetensors dtype name, shape, index of its blob, and its layer where the usual rule gives another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blob: int
    layer: str = ""


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The encoded bytes of a tensor, or of several equal ones.

    ``segments`` are the sizes of its segments, one after another from ``offset``; their sum is ``bytes``. ``coverage``
    is the share of elements whose exponent is among the 16 most frequent; absent for dtypes without one. ``slices``
    are (index of source, offset, size) of the same bytes uncompressed.
    """

    key: str
    pack: int
    offset: int
    bytes: int
    segments: tuple[int, ...]
    schedule: str
    coverage: float | None = None
    slices: tuple[tuple[int, int, int], ...] = ()


class Alias(msgspec.Struct, frozen=True, array_like=True):
    """A slice added after the build: file name, offset and size, with the index of the blob it equals."""

    file: str
    offset: int
    size: int
    blob: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of a cache but its packs. Tensors are in execution order, and blobs in the order of the packs.

    Every segment decodes to ``segment_elements`` elements but the last of a tensor; of a dtype without a coded
    exponent, two bytes count as one. ``checksum`` is BLAKE3 of the file up to the comma before it.
    """

    format: int
    segment_elements: int
    sources: tuple[Source, ...]
    packs: tuple[Pack, ...]
    blobs: tuple[Blob, ...]
    tensors: tuple[Tensor, ...]
    aliases: tuple[Alias, ...] = ()
    checksum: str = ""


class _Format(msgspec.Struct):
    """What is read first: other formats may have other fields."""

    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The file's content; equal manifests give equal bytes."""
    body = msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))[:-1]
    return b'%s,"checksum":"%s"}\n' % (body, blake3(body).hexdigest().encode())


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest; ``where`` names it in errors.

    Raises:
        ManifestError: it is no manifest of this format, a field contradicts the others, or a byte was changed.
    """
    found = _typed(data, _Format, where).format
    if found != FORMAT:
        raise ManifestError(
            f"{where}: format: expected {FORMAT}, found {found}; rebuild the cache, or use the release that wrote it"
        )
    manifest = _typed(data, Manifest, where)
    check_manifest(manifest, where)
    stated = _CHECKSUM.search(data)
    if stated is None:
        raise ManifestError(f"{where}: checksum: expected at the end of the file; {_REBUILD}")
    if blake3(data[: stated.start()]).hexdigest() != manifest.checksum:
        raise ManifestError(f"{where}: checksum: differs from that of the content, which was changed; {_REBUILD}")
    return manifest


def load_manifest(root: Path, directory: int) -> Manifest:
    """Read the manifest of the cache at ``root``, which is open as the descriptor ``directory``.

    Raises:
        CacheNotFoundError: there is none.
        ManifestError: it cannot be used.
        ReadError: the operating system failed the read.
    """
    path = root / MANIFEST_NAME
    try:
        descriptor = open_beneath(directory, MANIFEST_NAME)
    except FileNotFoundError as error:
        raise CacheNotFoundError(f"{root}: has no {MANIFEST_NAME}, so no complete cache; build it first") from error
    except OSError as error:
        raise ManifestError(
            f"{path}: cannot be opened: {error.strerror}; it must be a readable regular file and no symbolic link"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{path}: expected at most {MAX_MANIFEST_BYTES} bytes, found {size}; {_REBUILD}")
        data = bytearray(size)
        count = read_at(descriptor, memoryview(data), 0, path)
    finally:
        os.close(descriptor)
    return decode_manifest(bytes(data[:count]), str(path))


def save_manifest(root: Path, manifest: Manifest) -> int:
    """Replace the manifest at ``root`` at one instant, durably; return its size in bytes. Raises OSError."""
    data = encode_manifest(manifest)
    replace_file(root / MANIFEST_NAME, data, root / SCRATCH_NAME)
    return len(data)


def _typed(data: bytes, kind: type[_Struct], where: str) -> _Struct:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        problem, _, field = str(error).partition(" - at `$.")
        raise ManifestError(f"{where}: {field.rstrip('`') or 'top level'}: {problem}; {_REBUILD}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where}: expected JSON: {error}; {_REBUILD}") from error
