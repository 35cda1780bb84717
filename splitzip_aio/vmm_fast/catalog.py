"""Which of a model's weights are in the cache, and how they are grouped for streaming.

What is streamed at a time is a *group*: a few consecutive tensors of one execution unit, in the order in which their
packs hold them, so that a group is read in few long reads. Whole units would do as well, but those of FLUX are as large
as 680 MB; single tensors would give each bias a read and a launch of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.cache.entry import Entry
from splitzip_aio.vmm_fast.consumer import FileSlice, Unit

__all__ = ["GROUP_BYTES", "Catalog", "Groups", "arena_bytes_of", "units_of"]

GROUP_BYTES = 176 << 20
"""What a group has at most, unless it is a single tensor: two slots of 64 MiB, compressed."""

_TENSOR_ALIGN = 256  # how a layer's tensors are placed in an arena


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of tensors, in the order of use.

    Attributes:
        sizes: bytes that each needs in an arena, by name.
        by_tensor: the group of each tensor that has one.
    """

    sizes: Mapping[str, int]
    by_tensor: Mapping[str, str]

    @classmethod
    def of(cls, units: Iterable[tuple[str, Sequence[Entry]]], *, group_bytes: int = GROUP_BYTES) -> Groups:
        """Group the tensors of units, given in the order of use. What two units share belongs to the first.

        Small tensors, such as a bias before its weight, make no group of their own, whatever comes next.
        """
        by_tensor: dict[str, str] = {}
        sizes: dict[str, int] = {}
        for unit, entries in units:
            group = ""
            new = {entry.name: entry for entry in entries if entry.name not in by_tensor}
            for entry in sorted(new.values(), key=lambda each: (each.pack, each.offset)):
                nbytes = arena_bytes_of(entry)
                if not group or (sizes[group] > group_bytes // 16 and sizes[group] + nbytes > group_bytes):
                    group = f"{unit}, group {len(sizes)}"
                    sizes[group] = 0
                sizes[group] += nbytes
                by_tensor[entry.name] = group
        return cls(sizes, by_tensor)

    @property
    def largest_bytes(self) -> int:
        """Bytes that the largest group needs."""
        return max(self.sizes.values(), default=0)

    def layer_of(self, tensor: str) -> str:
        """The rule for the transport: each tensor's group; one of its own for what no unit has."""
        return self.by_tensor.get(tensor, f"tensor {tensor}")

    def bytes_of(self, entry: Entry) -> int:
        """Bytes that the group of a tensor needs."""
        group = self.by_tensor.get(entry.name)
        return arena_bytes_of(entry) if group is None else self.sizes[group]


def arena_bytes_of(entry: Entry) -> int:
    """Bytes that a tensor needs in an arena."""
    return max(1, -(-entry.nbytes // _TENSOR_ALIGN)) * _TENSOR_ALIGN


class Catalog:
    """Finds weights in a cache by their place in a source file.

    Each source file is compared with the cache's fingerprint when it is first met.
    """

    def __init__(self, cache: SplitZipShardCache) -> None:
        self._cache = cache
        self._sources = {source.name for source in cache.manifest.sources}
        self._checked: dict[str, str] = {}

    def find(self, file_slice: FileSlice | None) -> Entry | None:
        """The cache's entry for a slice, or None.

        Raises:
            SourceChangedError: the file is not what the cache was built from.
        """
        if file_slice is None:
            return None
        path = os.fspath(file_slice.path)
        name = self._checked.get(path) or os.path.basename(path)
        entry = self._cache.lookup_by_slice(name, file_slice.offset_bytes, file_slice.size_bytes)
        if entry is not None and path not in self._checked:
            self._check(path, name)
        return entry

    def _check(self, path: str, name: str) -> None:
        """Compare a file that the cache was built from; one that it knows only by aliases has no fingerprint."""
        if name in self._sources:
            self._cache.check_source(path)
        self._checked[path] = name


def units_of(store: Any, adapter: Any | None, catalog: Catalog) -> list[tuple[str, list[Entry]]]:
    """The execution units of a store and their tensors that are in the cache, as nearly as can be in the order of use.

    With the adapter these are its units. A store alone knows the slices of its model and the names of units, and then
    tensors belong to the unit whose name theirs begins with, or else to their layer in the cache.

    Raises:
        SourceChangedError: a source file is not what the cache was built from.
    """
    if adapter is not None:
        return _of_adapter(adapter._execution_units, catalog)
    return _of_registry(getattr(store, "_file_slices", None), getattr(store, "_timeline_units", {}), catalog)


def _of_adapter(units: Sequence[Unit], catalog: Catalog) -> list[tuple[str, list[Entry]]]:
    """Sorted by place in the arena, which modules got in the order in which the model declares them."""
    placed = sorted(
        (unit for unit in units if unit.tensors), key=lambda unit: min(each.offset for each in unit.tensors)
    )
    found = [(unit.module_name, [catalog.find(binding.file_slice) for binding in unit.tensors]) for unit in placed]
    return [(name, [entry for entry in entries if entry is not None]) for name, entries in found]


def _of_registry(registry: Any, names: Mapping[int, str], catalog: Catalog) -> list[tuple[str, list[Entry]]]:
    units: dict[str, list[Entry]] = {}
    known = set(names.values())
    for file_slice in getattr(registry, "_slices", {}).values():
        entry = catalog.find(file_slice)
        if entry is not None:
            units.setdefault(_unit_of(entry, known), []).append(entry)
    return list(units.items())


def _unit_of(entry: Entry, units: set[str]) -> str:
    """The shortest prefix that is a unit: a list's item holds the modules in it."""
    parts = entry.name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in units), entry.layer)
