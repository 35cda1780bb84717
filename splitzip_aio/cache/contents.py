"""What a cache under construction holds so far, and what its builder reports in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitzip_aio.cache.journal import Record
from splitzip_aio.cache.manifest import FORMAT, Blob, Manifest, Pack, Source, Tensor
from splitzip_aio.codec.dtypes import tensor_bytes
from splitzip_aio.codec.schedule import STORED

__all__ = ["BuildReport", "Contents"]


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made.

    Attributes:
        root: the cache's directory.
        tensors: tensors in the cache: ``encoded`` plus ``stored``.
        encoded: tensors whose exponents are coded.
        stored: tensors kept as they are, empty ones included.
        tied: tensors whose bytes another tensor had brought already, so that they take no space.
        resumed: tensors that a killed build had left and this one took over.
        raw_bytes: bytes of all tensors, tied ones each time.
        tied_bytes: how many of ``raw_bytes`` belong to tied tensors.
        compressed_bytes: size of the cache on disk, everything counted: packs with their padding, and the manifest.
        encoded_bytes: what of it are the tensors themselves: segments with headers, indices and padding.
        schedules: tensors by schedule.
        seconds: from the start to the durable manifest.
    """

    root: Path
    tensors: int
    encoded: int
    stored: int
    tied: int
    resumed: int
    raw_bytes: int
    tied_bytes: int
    compressed_bytes: int
    encoded_bytes: int
    schedules: Mapping[str, int]
    seconds: float

    @property
    def ratio(self) -> float:
        """``compressed_bytes`` over ``raw_bytes``; 1 for a checkpoint without bytes."""
        return self.compressed_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @property
    def encoded_ratio(self) -> float:
        """``encoded_bytes`` over ``raw_bytes``: what a large model comes to, whose manifest weighs nothing."""
        return self.encoded_bytes / self.raw_bytes if self.raw_bytes else 1.0


class Contents:
    """Tensors and blobs in the order they were added; equal content is one blob."""

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._sources = sources
        self._tensors: dict[str, Tensor] = {}
        self._blobs: list[Blob] = []
        self._slices: list[list[tuple[int, int, int]]] = []
        self._by_key: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def blobs(self) -> int:
        """Number of blobs, which is the index of the next."""
        return len(self._blobs)

    def blob_of(self, key: str) -> int | None:
        """Index of the blob with this content, if there is one."""
        return self._by_key.get(key)

    def add(self, record: Record) -> None:
        """Add a tensor, and its blob if that is new."""
        tensor = record.tensor
        if record.blob is not None:
            self._by_key[record.blob.key] = len(self._blobs)
            self._blobs.append(record.blob)
            self._slices.append([])
        if record.origin is not None:
            self._slices[tensor.blob].append((*record.origin, tensor_bytes(tensor.dtype, tensor.shape)))
        self._tensors[tensor.name] = tensor

    def manifest(self, segment_elements: int, packs: tuple[Pack, ...]) -> Manifest:
        """All of it as a manifest."""
        blobs = (
            msgspec.structs.replace(blob, slices=tuple(slices))
            for blob, slices in zip(self._blobs, self._slices, strict=True)
        )
        return Manifest(FORMAT, segment_elements, self._sources, packs, tuple(blobs), tuple(self._tensors.values()))

    def report(self, root: Path, *, compressed_bytes: int, resumed: int, seconds: float) -> BuildReport:
        """Counts and sizes."""
        tensors = self._tensors.values()
        schedules = Counter(self._blobs[tensor.blob].schedule for tensor in tensors)
        stored = schedules.get(str(STORED), 0)
        raw_bytes = sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in tensors)
        distinct = {tensor.blob: tensor_bytes(tensor.dtype, tensor.shape) for tensor in tensors}
        return BuildReport(
            root=root,
            tensors=len(tensors),
            encoded=len(tensors) - stored,
            stored=stored,
            tied=len(tensors) - len(distinct),
            resumed=resumed,
            raw_bytes=raw_bytes,
            tied_bytes=raw_bytes - sum(distinct.values()),
            compressed_bytes=compressed_bytes,
            encoded_bytes=sum(blob.bytes for blob in self._blobs),
            schedules=dict(schedules),
            seconds=seconds,
        )
