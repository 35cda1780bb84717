"""A finished cache, open for looking things up and reading them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitzip_aio.cache.checks import is_file_name
from splitzip_aio.cache.content import content_key
from splitzip_aio.cache.decode import decode, read_encoded
from splitzip_aio.cache.entry import Entry
from splitzip_aio.cache.files import DirectoryLock, open_root, writing
from splitzip_aio.cache.header import read_header
from splitzip_aio.cache.layers import LayerRule, layer_name
from splitzip_aio.cache.manifest import MANIFEST_NAME, Alias, Manifest, load_manifest, save_manifest
from splitzip_aio.cache.pack_files import PackFiles
from splitzip_aio.cache.progress import ProgressCallback
from splitzip_aio.cache.verify import VerifyReport, verify_cache
from splitzip_aio.codec.dtypes import tensor_contents, torch_view
from splitzip_aio.errors import (
    CacheError,
    CheckpointError,
    ClosedError,
    InvalidArgumentError,
    SourceChangedError,
)

if TYPE_CHECKING:
    import torch

__all__ = ["SplitZipShardCache"]

_ALIAS_WAIT_S = 10.0

Slice = tuple[str, int, int]


class SplitZipShardCache:
    """A cache on disk, found by name, by content or by slice of a source file.

    The cache is treated as untrusted: its manifest is checked before anything in it is followed, no file outside
    ``root`` is opened, and every byte that is decoded is covered by a checksum. It is read as it was when it was
    opened, also after a rebuild. Methods may be called from several threads; close it, or leave its ``with`` block,
    after the last of them has returned.

    Args:
        root: the cache's directory.
        layer_of: from a tensor's name to its layer's; by default as the cache was built.

    Raises:
        CacheNotFoundError: there is no complete cache.
        ManifestError: the manifest is damaged, of another format, or hostile.
        ReadError: the operating system failed a read.
    """

    def __init__(self, root: str | os.PathLike[str], *, layer_of: LayerRule | None = None) -> None:
        self._root = Path(root)
        self._layer_of = layer_of
        self._lock = threading.Lock()
        self._closed = False
        self._manifest, self._files = _open(self._root)
        manifest = self._manifest
        self._entries: Mapping[str, Entry] = MappingProxyType(
            {
                tensor.name: Entry.of(
                    tensor,
                    manifest.blobs[tensor.blob],
                    self._layer(tensor.name, tensor.layer),
                    manifest.segment_elements,
                )
                for tensor in manifest.tensors
            }
        )
        self._by_blob = {tensor.blob: self._entries[tensor.name] for tensor in reversed(manifest.tensors)}
        self._by_key = {entry.key: entry for entry in self._by_blob.values()}
        self._by_slice = self._slices(manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def root(self) -> Path:
        """The cache's directory."""
        return self._root

    @property
    def manifest(self) -> Manifest:
        """All that the manifest says."""
        return self._manifest

    @property
    def tensors(self) -> Mapping[str, Entry]:
        """Every tensor by name, in execution order."""
        return self._entries

    @property
    def layers(self) -> Mapping[str, tuple[Entry, ...]]:
        """The tensors of each layer, layers and tensors in execution order."""
        grouped: dict[str, list[Entry]] = {}
        for entry in self._entries.values():
            grouped.setdefault(entry.layer, []).append(entry)
        return MappingProxyType({layer: tuple(entries) for layer, entries in grouped.items()})

    @property
    def metadata(self) -> Mapping[str, Mapping[str, str]]:
        """The ``__metadata__`` of each source, by file name."""
        return MappingProxyType({source.name: MappingProxyType(source.metadata) for source in self._manifest.sources})

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def lookup(self, tensor: torch.Tensor) -> Entry | None:
        """The entry with this dtype, shape and content, or None. Reads the whole tensor.

        Raises:
            UnsupportedError: safetensors has no such dtype, or the tensor has no data.
        """
        return self._by_key.get(content_key(*tensor_contents(tensor)))

    def lookup_by_name(self, name: str) -> Entry | None:
        """The entry of this tensor, or None."""
        return self._entries.get(name)

    def lookup_by_slice(self, shard_name: str, offset_bytes: int, size_bytes: int) -> Entry | None:
        """The entry of the tensor that a source file holds at exactly this place, or None.

        Args:
            shard_name: name of the file, without directories.
            offset_bytes: from the start of the file, header included.
            size_bytes: size of the tensor.
        """
        return self._by_slice.get((shard_name, offset_bytes, size_bytes))

    def alias_slice(
        self, tensor_or_key: torch.Tensor | str, shard_name: str, offset_bytes: int, size_bytes: int
    ) -> bool:
        """Let ``lookup_by_slice`` find a tensor at one more place, now and in later openings of the cache.

        Args:
            tensor_or_key: the tensor, found by content, or its content key.
            shard_name: name of a file, without directories.
            offset_bytes: from the start of the file.
            size_bytes: size of the tensor.

        Returns:
            Whether the slice was added: False if it was known already, or the cache has no such content.

        Raises:
            InvalidArgumentError: the slice is known to hold another tensor, or cannot hold this one.
            CacheBusyError: the cache is being rebuilt.
            CacheError: it was rebuilt since it was opened, or cannot be written.
        """
        return self.alias_slices([(tensor_or_key, shard_name, offset_bytes, size_bytes)]) == 1

    def alias_slices(self, slices: Iterable[tuple[torch.Tensor | str, str, int, int]]) -> int:
        """Add several slices, each as for ``alias_slice``, with one write; return how many were added."""
        wanted: dict[Slice, Entry] = {}
        for tensor_or_key, shard_name, offset_bytes, size_bytes in slices:
            key = tensor_or_key if isinstance(tensor_or_key, str) else content_key(*tensor_contents(tensor_or_key))
            entry = self._by_key.get(key)
            if entry is not None:
                wanted[_checked_slice(entry, shard_name, offset_bytes, size_bytes)] = entry
        with self._lock:
            self._check_open()
            if all(self._known(place, entry) for place, entry in wanted.items()):
                return 0
            with DirectoryLock(self._root, wait_s=_ALIAS_WAIT_S):
                return self._persist(wanted)

    def read_blob(self, tensor: torch.Tensor | Entry | str, size_bytes: int | None = None) -> bytearray:
        """The encoded bytes of a tensor: its segments, one after another.

        Args:
            tensor: an entry, a tensor's name, or a tensor to find by content.
            size_bytes: how many bytes are expected; by default what the manifest says.

        Raises:
            CacheError: the cache has no such tensor.
            InvalidArgumentError: ``size_bytes`` is not the encoded size.
            CorruptDataError: the pack is missing or truncated.
        """
        entry = self._entry(tensor)
        if size_bytes is not None and size_bytes != entry.encoded_bytes:
            raise InvalidArgumentError(
                f"{entry.name!r}: size_bytes: expected {entry.encoded_bytes} encoded bytes, found {size_bytes}"
            )
        self._check_open()
        return read_encoded(self._files, entry)

    def load_bytes(self, tensor: Entry | str) -> NDArray[np.uint8]:
        """The decoded bytes of a tensor, (nbytes,) uint8, one segment read and checked at a time.

        Raises:
            CacheError: the cache has no such tensor.
            CorruptDataError: a byte is wrong or missing; names tensor, pack and offset.
        """
        entry = self._entry(tensor)
        self._check_open()
        return decode(self._files, entry)

    def load_tensor(self, tensor: Entry | str) -> torch.Tensor:
        """A tensor on the CPU, decoded; a dtype that torch lacks comes as (nbytes,) uint8.

        Raises as ``load_bytes`` does.
        """
        import torch

        entry = self._entry(tensor)
        return torch_view(torch.from_numpy(self.load_bytes(entry)), entry.dtype, entry.shape)

    def verify(self, progress: ProgressCallback | None = None) -> VerifyReport:
        """Check every byte of every pack, and that each tensor decodes to what was put in."""
        self._check_open()
        return verify_cache(self._files, self._entries.values(), len(self._manifest.packs), progress)

    def check_source(self, path: str | os.PathLike[str]) -> None:
        """Compare a source file with its fingerprint: size and header.

        Raises:
            SourceChangedError: it differs, or is gone or damaged.
            CacheError: the cache was not built from a file of this name.
        """
        file = Path(path)
        source = next((source for source in self._manifest.sources if source.name == file.name), None)
        if source is None:
            raise CacheError(f"{self._root}: was not built from a file named {file.name!r}")
        try:
            found = read_header(file)
        except CheckpointError as error:
            raise SourceChangedError(f"{file}: is not what the cache was built from: {error}") from error
        if found.identity.size != source.size:
            problem = f"expected {source.size} bytes, found {found.identity.size}"
        elif found.header_hash != source.header_hash:
            problem = f"expected a header with hash {source.header_hash}, found {found.header_hash}"
        else:
            return
        raise SourceChangedError(f"{file}: changed since the cache was built: {problem}; rebuild the cache")

    def check_sources(self, directory: str | os.PathLike[str]) -> None:
        """Compare all sources, in ``directory``, with their fingerprints.

        Raises:
            SourceChangedError: names each that differs, is gone or is damaged.
        """
        problems = []
        for source in self._manifest.sources:
            try:
                self.check_source(Path(directory) / source.name)
            except SourceChangedError as error:
                problems.append(str(error))
        if problems:
            raise SourceChangedError("\n".join(problems))

    def pack_path(self, pack: int) -> Path:
        """Where a pack was when the cache was opened, for messages; ``open_pack`` is how to read it."""
        return self._files.path(pack)

    def open_pack(self, pack: int, flags: int = 0) -> int:
        """A new read-only descriptor of a pack, with ``flags`` such as ``os.O_DIRECT``; the caller closes it.

        Raises:
            CorruptDataError: the pack is missing.
            ReadError: it cannot be opened so.
        """
        self._check_open()
        return self._files.reopen(pack, flags)

    def close(self) -> None:
        """Close all files. Idempotent."""
        with self._lock:
            self._closed = True
            self._files.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._root}: the cache is closed")

    def _layer(self, name: str, recorded: str) -> str:
        return self._layer_of(name) if self._layer_of else recorded or layer_name(name)

    def _entry(self, tensor: torch.Tensor | Entry | str) -> Entry:
        if isinstance(tensor, Entry):
            return tensor
        entry = self._entries.get(tensor) if isinstance(tensor, str) else self.lookup(tensor)
        if entry is None:
            what = f"no tensor {tensor!r}" if isinstance(tensor, str) else "no tensor of this dtype, shape and content"
            raise CacheError(f"{self._root}: the cache has {what}")
        return entry

    def _slices(self, manifest: Manifest) -> dict[Slice, Entry]:
        slices = {
            (manifest.sources[source].name, offset, size): self._by_blob[place]
            for place, blob in enumerate(manifest.blobs)
            for source, offset, size in blob.slices
        }
        slices |= {(alias.file, alias.offset, alias.size): self._by_blob[alias.blob] for alias in manifest.aliases}
        return slices

    def _known(self, place: Slice, entry: Entry) -> bool:
        known = self._by_slice.get(place)
        if known is not None and known.key != entry.key:
            raise InvalidArgumentError(
                f"slice {place}: is known to hold {known.name!r}, so it cannot hold {entry.name!r}, which differs"
            )
        return known is not None

    def _persist(self, wanted: Mapping[Slice, Entry]) -> int:
        """Merge slices with those that others have added since, and write the manifest; return how many were new."""
        with open_root(self._root) as directory:
            current = load_manifest(self._root, directory)
        if (current.packs, current.tensors) != (self._manifest.packs, self._manifest.tensors):
            raise CacheError(f"{self._root}: the cache was rebuilt since it was opened; open it again")
        self._by_slice = self._slices(current)
        blobs = {entry.key: blob for blob, entry in self._by_blob.items()}
        new = [Alias(*place, blobs[entry.key]) for place, entry in wanted.items() if not self._known(place, entry)]
        if new:
            current = msgspec.structs.replace(current, aliases=(*current.aliases, *new), checksum="")
            with writing(self._root / MANIFEST_NAME):
                save_manifest(self._root, current)
        self._manifest = current
        self._by_slice = self._slices(current)
        return len(new)


def _checked_slice(entry: Entry, shard_name: str, offset_bytes: int, size_bytes: int) -> Slice:
    if not is_file_name(shard_name):
        raise InvalidArgumentError(f"shard_name: expected a file name without directories, found {shard_name!r}")
    if offset_bytes < 0 or size_bytes != entry.nbytes or not size_bytes:
        raise InvalidArgumentError(
            f"slice of {shard_name}: expected an offset from 0 on and the {entry.nbytes} bytes of {entry.name!r}, more "
            f"than none, found {size_bytes} at {offset_bytes}"
        )
    return shard_name, offset_bytes, size_bytes


def _open(root: Path) -> tuple[Manifest, PackFiles]:
    """Manifest and packs that belong together, though a rebuild may replace both meanwhile."""
    with open_root(root) as directory:
        manifest = load_manifest(root, directory)
        while True:
            files = PackFiles(root, directory, manifest.packs)
            if not files.missing:
                return manifest, files
            read, manifest = manifest, load_manifest(root, directory)
            if manifest == read:
                return manifest, files  # missing for good, which concerns only who reads that pack
            files.close()
