"""What is in a cache, from its manifest alone: the answer of ``inspect``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from splitzip_aio.cache import Entry, SplitZipShardCache
from splitzip_aio.cache.manifest import MANIFEST_NAME, Manifest

__all__ = ["CacheSummary", "Group", "SourceSummary", "summarize"]


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """A file that the cache was built from, as it was then."""

    name: str
    size: int
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one dtype and one schedule; ``encoded_bytes`` counts tied ones once, ``raw_bytes`` each time."""

    dtype: str
    schedule: str
    tensors: int
    raw_bytes: int
    encoded_bytes: int


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """A cache as a whole, and each of its tensors.

    Attributes:
        root: the cache's directory.
        format: of the manifest.
        sources: what it was built from.
        packs: how many files hold the segments.
        layers: names, in execution order.
        raw_bytes: bytes of all tensors, tied ones each time.
        compressed_bytes: size of the cache on disk: packs and manifest.
        ratio: ``compressed_bytes`` over ``raw_bytes``.
        groups: tensors by dtype and schedule.
        tensors: each tensor, in execution order.
    """

    root: str
    format: int
    sources: tuple[SourceSummary, ...]
    packs: int
    layers: tuple[str, ...]
    raw_bytes: int
    compressed_bytes: int
    ratio: float
    groups: tuple[Group, ...]
    tensors: tuple[Entry, ...]


def summarize(root: Path) -> CacheSummary:
    """Read the manifest of the cache at ``root``.

    Raises:
        CacheError: there is no cache, or its manifest cannot be used.
    """
    with SplitZipShardCache(root) as cache:
        manifest, entries = cache.manifest, tuple(cache.tensors.values())
        layers = tuple(cache.layers)
    raw_bytes = sum(entry.nbytes for entry in entries)
    compressed_bytes = _size_on_disk(root, manifest)
    return CacheSummary(
        root=str(root),
        format=manifest.format,
        sources=tuple(SourceSummary(source.name, source.size, source.metadata) for source in manifest.sources),
        packs=len(manifest.packs),
        layers=layers,
        raw_bytes=raw_bytes,
        compressed_bytes=compressed_bytes,
        ratio=compressed_bytes / raw_bytes if raw_bytes else 1.0,
        groups=tuple(_groups(entries)),
        tensors=entries,
    )


def _size_on_disk(root: Path, manifest: Manifest) -> int:
    return (root / MANIFEST_NAME).stat().st_size + sum(pack.bytes for pack in manifest.packs)


def _groups(entries: Iterable[Entry]) -> Iterable[Group]:
    def kind(entry: Entry) -> tuple[str, str]:
        return entry.dtype, entry.schedule

    for (dtype, schedule), members in groupby(sorted(entries, key=kind), key=kind):
        group = list(members)
        distinct = {entry.key: entry.encoded_bytes for entry in group}
        raw_bytes = sum(entry.nbytes for entry in group)
        yield Group(dtype, schedule, len(group), raw_bytes, sum(distinct.values()))
