"""What is read for a layer, where it lands, and in which order layers come: arithmetic, no I/O.

A layer's blobs are consecutive extents of a pack, except where one equals a blob of an earlier layer. So a layer is a
few runs of whole segments, and a *read* is as much of a run as a staging slot holds, rounded outward to whole pages
for direct I/O. In the arena a layer is one range, its tensors at multiples of 256 bytes; tensors of one blob share
their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from splitzip_aio.abc import PlannedRead, PlannedSegment
from splitzip_aio.cache.entry import Entry
from splitzip_aio.cache.layers import LayerRule
from splitzip_aio.cache.segments import segment_bytes
from splitzip_aio.errors import InvalidArgumentError, UnknownLayerError

__all__ = ["ExecutionPlan", "LayerPlan", "PlannedTensor", "largest_read_bytes"]

READ_ALIGN = 4096
TENSOR_ALIGN = 256


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor: safetensors dtype and shape, and its bytes in the layer's range."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class LayerPlan:
    """A layer: its tensors, the bytes they need in the arena, and the reads that bring them."""

    name: str
    tensors: tuple[PlannedTensor, ...]
    nbytes: int
    reads: tuple[PlannedRead, ...]

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Where each tensor begins in the layer's range."""
        return MappingProxyType({tensor.name: tensor.offset for tensor in self.tensors})


class ExecutionPlan:
    """The layers of a cache, in execution order.

    Attributes:
        layers: their names.

    Args:
        entries: the cache's tensors, in execution order.
        packs: paths of the packs, by index.
        slot_bytes: the longest read.
        max_segments: the most segments of a read.
        layer_of: from a tensor's name to its layer's, instead of what the cache says.

    Raises:
        InvalidArgumentError: ``layer_of`` does not return names.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        packs: Sequence[str],
        slot_bytes: int,
        max_segments: int,
        layer_of: LayerRule | None = None,
    ) -> None:
        self._packs = packs
        self._slot_bytes = slot_bytes
        self._max_segments = max_segments
        self._members = _group(entries, layer_of)
        self._planned: dict[str, LayerPlan] = {}
        self.layers = tuple(self._members)

    @property
    def nbytes(self) -> int:
        """Bytes of an arena that holds all layers at once."""
        return sum(
            max(TENSOR_ALIGN, sum(_aligned(size) for size in {entry.key: entry.nbytes for entry in members}.values()))
            for members in self._members.values()
        )

    def layer(self, name: str) -> LayerPlan:
        """Plan of one layer, made when it is first asked for.

        Raises:
            UnknownLayerError: no layer of this name.
        """
        plan = self._planned.get(name)
        if plan is None:
            if name not in self._members:
                raise UnknownLayerError(f"no layer {name!r}; the cache has {_some(self.layers)}")
            plan = self._planned[name] = self._plan(name)
        return plan

    def _plan(self, name: str) -> LayerPlan:
        tensors: list[PlannedTensor] = []
        extents: list[_Extent] = []
        placed: dict[str, int] = {}
        end = 0
        for entry in self._members[name]:
            offset = placed.get(entry.key)
            if offset is None:
                offset = placed[entry.key] = end
                end += _aligned(entry.nbytes)
                extents += _extents(entry, offset)
            tensors.append(PlannedTensor(entry.name, entry.dtype, entry.shape, offset, entry.nbytes))
        extents.sort(key=lambda extent: (extent.pack, extent.offset))
        reads = _reads(extents, self._packs, self._slot_bytes, self._max_segments)
        return LayerPlan(name, tuple(tensors), end, tuple(reads))


def largest_read_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of the longest read that brings a single segment: what a staging slot must hold at least."""
    return max(
        (
            _page_up(extent.offset + extent.nbytes) - _page_down(extent.offset)
            for entry in entries
            for extent in entry.extents()
        ),
        default=0,
    )


class _Extent(NamedTuple):
    """A segment by its place in a pack; ``destination`` counts from the start of the layer's range."""

    pack: int
    offset: int
    nbytes: int
    destination: int
    decoded_bytes: int
    tensor: str


def _group(entries: Iterable[Entry], layer_of: LayerRule | None) -> Mapping[str, Sequence[Entry]]:
    """Tensors by layer; layers in the order of their first tensors."""
    members: dict[str, list[Entry]] = {}
    for entry in entries:
        layer = entry.layer if layer_of is None else layer_of(entry.name)
        if not isinstance(layer, str):
            raise InvalidArgumentError(f"layer_of: expected the name of a layer for {entry.name!r}, found {layer!r}")
        members.setdefault(layer, []).append(entry)
    return members


def _extents(entry: Entry, offset: int) -> Iterator[_Extent]:
    """Segments of a tensor that starts ``offset`` bytes into the layer's range."""
    place, left, step = entry.offset, entry.nbytes, segment_bytes(entry.dtype, entry.segment_elements)
    for nbytes in entry.segments:
        size = min(step, left)
        yield _Extent(entry.pack, place, nbytes, offset, size, entry.name)
        place, offset, left = place + nbytes, offset + size, left - size


def _reads(
    extents: Sequence[_Extent], packs: Sequence[str], slot_bytes: int, max_segments: int
) -> Iterator[PlannedRead]:
    """Divide segments, sorted by place, into reads: as few as slots allow, none that reads a page for nothing."""
    run: list[_Extent] = []
    start = stop = 0  # of the pages that the run takes
    for extent in extents:
        first, last = _page_down(extent.offset), _page_up(extent.offset + extent.nbytes)
        joins = run and extent.pack == run[0].pack and first <= stop
        if run and not (joins and last - start <= slot_bytes and len(run) < max_segments):
            yield _read(run, packs[run[0].pack])
            run = []
        if not run:
            start = first
        run.append(extent)
        stop = last
    if run:
        yield _read(run, packs[run[0].pack])


def _read(run: Sequence[_Extent], path: str) -> PlannedRead:
    start = _page_down(run[0].offset)
    nbytes = _page_up(run[-1].offset + run[-1].nbytes) - start
    segments = tuple(
        PlannedSegment(extent.offset - start, extent.nbytes, extent.destination, extent.decoded_bytes, extent.tensor)
        for extent in run
    )
    return PlannedRead(run[0].pack, path, start, nbytes, segments)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGN) * TENSOR_ALIGN


def _page_down(offset: int) -> int:
    return offset // READ_ALIGN * READ_ALIGN


def _page_up(offset: int) -> int:
    return -(-offset // READ_ALIGN) * READ_ALIGN


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
