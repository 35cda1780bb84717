"""The table that tells a GPU how to encode many segments: one upload, few launches.

It has three parts, all little endian:

* tiles, one i32 a program: the index of its segment;
* descriptors, one a segment (``_DESCRIPTOR``);
* 256 u32 for each tensor: what there is to know of each exponent (``exponent_entries``).

Programs that run the same code, by element format and schedule, are launched together. Counting has no need of the
last part. Where the same segments are then encoded together as were counted together, the tiles, by far the largest
part, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec.formats import RAW, ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, SEGMENT_ALIGN, TILE_ELEMENTS, align
from splitzip_aio.codec.schedule import STORED, Method, Schedule
from splitzip_aio.codec.segments import SegmentPlan

__all__ = [
    "ENCODE_WORDS",
    "ENTRIES_BYTES",
    "WINDOW_EXPONENTS",
    "EncodeLaunch",
    "EncodeTable",
    "Stretch",
    "exponent_entries",
]

_DESCRIPTOR = np.dtype(
    [
        ("source", "<i8"),  # device address, a multiple of 16
        ("destination", "<i8"),  # from the start of the output, a multiple of 32
        ("elements", "<i4"),  # of a stored segment: bytes
        ("first_tile", "<i4"),  # of the segment, in its launch
        ("row", "<i4"),  # of the segment's first tile, among all tiles of all segments
        ("entries", "<i4"),  # of its tensor's exponents, from the start of the table
        ("high", "<i4"),
        ("codes", "<i4"),
        ("index", "<i4"),
        ("tail", "<i4"),
        ("tail_bits", "<i4"),
        ("escapes", "<i4"),
        ("reserved", "<i8"),
    ]
)
ENCODE_WORDS = {name: field[1] // 4 for name, field in (_DESCRIPTOR.fields or {}).items()}
"""Where each field of a descriptor starts, in words of 4 bytes; under ``words``, how many there are."""
ENCODE_WORDS["words"] = _DESCRIPTOR.itemsize // 4

WINDOW_EXPONENTS = 32
"""Exponents that a tile counts quickly; see ``kernels/count.py``."""

ENTRIES_BYTES = 4 * 256
"""What a tensor's entries take in the table."""
_ALIGN_TILES = 4  # so that descriptors start at a multiple of 16
_WORDS = ENCODE_WORDS["words"]
_SOURCE, _DESTINATION = (ENCODE_WORDS[name] // 2 for name in ("source", "destination"))  # among words of 8 bytes
_ELEMENTS, _FIRST_TILE, _ROW = (ENCODE_WORDS[name] for name in ("elements", "first_tile", "row"))
_PLACES = slice(ENCODE_WORDS["entries"], ENCODE_WORDS["tail_bits"])  # entries, then where the planes start
_COUNTS = slice(ENCODE_WORDS["tail_bits"], ENCODE_WORDS["escapes"] + 1)
_STORED_TILE_BYTES = 2 * TILE_ELEMENTS
Kind: TypeAlias = tuple[ElementFormat, Schedule | None]
_Shape: TypeAlias = tuple[ElementFormat, int, int]


def exponent_entries(schedule: Schedule, codebooks: tuple[bytes, ...]) -> NDArray[np.uint32]:
    """(256,) entries, one for each exponent: four codes of 4 bits, first tier lowest, and from bit 24 on its tail bits.

    The code in a tier that the exponent does not reach is zero. Top16 is like one tier whose escapes have code 0, and
    1 in the second.
    """
    listed = np.frombuffer(b"".join(codebooks), np.uint8)
    by_rank = _entries_by_rank(schedule)
    entries = np.full(256, by_rank[listed.size])
    entries[listed[::-1]] = by_rank[: listed.size][::-1]  # of equal exponents the first counts
    return entries


@lru_cache
def _entries_by_rank(schedule: Schedule) -> NDArray[np.uint32]:
    """The entry of each place in the codebooks laid end to end, then that of an escape."""
    sizes = schedule.codebook_sizes
    places = np.arange(sum(sizes) + 1)
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    books = tuple(bytes(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    entries = schedule.tail_costs(books)[: places.size] << 24
    for tier, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        entries |= np.where(places >= start, np.minimum(places - start, size) & 15, 0) << (4 * tier)
    if schedule.method is Method.TOP16:
        entries[-1] |= 1 << 4
    return entries.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive elements on a device, to be cut into segments: all of a tensor, or whole segments of it.

    ``address`` is a multiple of 16, ``segment_bytes`` the decoded bytes of each segment but the last.
    """

    fmt: ElementFormat
    address: int
    nbytes: int
    segment_bytes: int

    @property
    def shape(self) -> _Shape:
        """All but where it is."""
        return self.fmt, self.nbytes, self.segment_bytes

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return -(-self.nbytes // self.segment_bytes)

    @property
    def stored_bytes(self) -> int:
        """No less than its segments take when they are stored, and when they are coded by choice."""
        return self.nbytes + self.segments * (HEADER_BYTES + SEGMENT_ALIGN)

    @property
    def last_bytes(self) -> int:
        """Decoded bytes of its last segment."""
        return self.nbytes - (self.segments - 1) * self.segment_bytes

    def decoded_bytes(self) -> NDArray[np.int64]:
        """(segments,) decoded bytes of each."""
        sizes = np.full(self.segments, self.segment_bytes)
        sizes[-1:] = self.last_bytes
        return sizes


@dataclass(frozen=True, slots=True)
class EncodeLaunch:
    """One kernel launch: ``tiles`` programs from byte ``first`` of the table on; ``schedule`` is None to count."""

    fmt: ElementFormat
    schedule: Schedule | None
    first: int
    tiles: int


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTable:
    """The parts of what is uploaded, in this order, and what the host needs to know of it.

    ``tiles`` has one array for each launch; ``segments`` are the descriptors, (segments, words) int32. ``rows`` counts
    the tiles of all segments, of coded and stored ones alike; ``descriptors`` is the byte at which they start. ``kept``
    says that the tiles are those of the table that counted the same segments.
    """

    tiles: tuple[NDArray[np.int32], ...]
    segments: NDArray[np.int32]
    entries: tuple[NDArray[np.uint32], ...]
    launches: tuple[EncodeLaunch, ...]
    descriptors: int
    rows: int
    kept: bool = False

    @classmethod
    def to_count(cls, stretches: Sequence[Stretch]) -> EncodeTable:
        """The table for counting exponents; ``RAW`` has none."""
        shared = _counting(tuple(stretch.shape for stretch in stretches))
        segments = shared.segments.copy()
        sources, stop = segments.view(np.int64)[:, _SOURCE], 0
        for stretch in stretches:
            start, stop = stop, stop + stretch.segments
            sources[start:stop] += stretch.address
        return replace(shared, segments=segments)

    @classmethod
    def to_encode(
        cls, stretches: Sequence[Stretch], plans: Sequence[SegmentPlan], counted: EncodeTable | None = None
    ) -> EncodeTable:
        """The table for encoding stretches, each by its plan; ``counted`` is what counted them, if they were."""
        table = counted or cls.to_count(stretches)
        segments = table.segments.copy()
        kinds = [_kind(stretch, plan.schedule) for stretch, plan in zip(stretches, plans, strict=True)]
        groups = list(dict.fromkeys(kinds))
        kept = counted is not None and [fmt for fmt, _ in groups] == [launch.fmt for launch in counted.launches]
        if counted is not None and kept:
            tiles = dict(zip(groups, counted.tiles, strict=True))
        else:
            _count_stored_bytes(segments, stretches, kinds)
            tiles = _assign(segments, stretches, kinds)
        descriptors = _end(tiles)
        entries_at = descriptors + segments.nbytes
        stop = 0
        for stretch, plan in zip(stretches, plans, strict=True):
            start, stop = stop, stop + stretch.segments
            _place(segments[start:stop], stretch, plan, entries_at)
            entries_at += ENTRIES_BYTES
        sizes = plans[0].numbers[0] if len(plans) == 1 else np.concatenate([plan.numbers[0] for plan in plans])
        segments.view(np.int64)[1:, _DESTINATION] = sizes[:-1].cumsum()
        entries = tuple(exponent_entries(plan.schedule, plan.codebooks) for plan in plans)
        return cls(tuple(tiles.values()), segments, entries, _launches(tiles), descriptors, table.rows, kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.descriptors + self.segments.nbytes + len(self.entries) * ENTRIES_BYTES

    def write(self, out: NDArray[np.uint8]) -> None:
        """Write the table to (nbytes,) uint8, or where the tiles are kept, from ``descriptors`` on."""
        tiles = [] if self.kept else [*self.tiles, np.zeros(-sum(map(len, self.tiles)) % _ALIGN_TILES, np.int32)]
        np.concatenate([part.reshape(-1).view(np.uint8) for part in (*tiles, self.segments, *self.entries)], out=out)


def _end(tiles: dict[Kind, NDArray[np.int32]]) -> int:
    """Where the tiles end and descriptors start."""
    return align(sum(part.nbytes for part in tiles.values()), 4 * _ALIGN_TILES)


@lru_cache(maxsize=16)
def _counting(shapes: tuple[_Shape, ...]) -> EncodeTable:
    """``EncodeTable.to_count`` of stretches that start at address 0; layers of a model often have the same shapes."""
    stretches = [Stretch(fmt, 0, nbytes, segment_bytes) for fmt, nbytes, segment_bytes in shapes]
    segments = np.zeros((sum(stretch.segments for stretch in stretches), _WORDS), np.int32)
    stop = 0
    for stretch in stretches:
        start, stop = stop, stop + stretch.segments
        part, element_bytes = segments[start:stop], stretch.fmt.element_bytes
        part.view(np.int64)[:, _SOURCE] = np.arange(0, stretch.nbytes, stretch.segment_bytes)
        part[:, _ELEMENTS] = stretch.segment_bytes // element_bytes
        part[-1, _ELEMENTS] = stretch.last_bytes // element_bytes
    counts = -(-segments[:, _ELEMENTS] // TILE_ELEMENTS)
    segments[:, _ROW] = counts.cumsum() - counts
    kinds = [None if stretch.fmt == RAW else (stretch.fmt, None) for stretch in stretches]
    tiles = _assign(segments, stretches, kinds)
    return EncodeTable(tuple(tiles.values()), segments, (), _launches(tiles), _end(tiles), int(counts.sum()))


def _count_stored_bytes(segments: NDArray[np.int32], stretches: Sequence[Stretch], kinds: Sequence[Kind]) -> None:
    """The elements of a stored segment are bytes."""
    stop = 0
    for stretch, (_, schedule) in zip(stretches, kinds, strict=True):
        start, stop = stop, stop + stretch.segments
        if schedule == STORED:
            segments[start:stop, _ELEMENTS] *= stretch.fmt.element_bytes


def _place(part: NDArray[np.int32], stretch: Stretch, plan: SegmentPlan, entries: int) -> None:
    """Fill in what follows from a stretch's plan; planes start at the same bytes in all segments but the last."""
    element_bytes = stretch.fmt.element_bytes
    part[:, _PLACES] = entries, *_planes(plan.schedule, stretch.fmt, stretch.segment_bytes // element_bytes)
    part[-1, _PLACES] = entries, *_planes(plan.schedule, stretch.fmt, stretch.last_bytes // element_bytes)
    part[:, _COUNTS] = plan.numbers[1:].T


@lru_cache(maxsize=256)
def _planes(schedule: Schedule, fmt: ElementFormat, elements: int) -> tuple[int, int, int, int]:
    """Where the planes after the first, the index and the tail of a segment start."""
    places = schedule.layout(fmt, elements, 0)
    return places.high, places.codes, places.index, places.tail


def _assign(
    segments: NDArray[np.int32], stretches: Sequence[Stretch], kinds: Sequence[Kind | None]
) -> dict[Kind, NDArray[np.int32]]:
    """The tiles of each kind, but None, which are launched together; notes the first tile of each segment."""
    members: dict[Kind, list[NDArray[np.int32]]] = {}
    stop = 0
    for stretch, kind in zip(stretches, kinds, strict=True):
        start, stop = stop, stop + stretch.segments
        if kind is not None:
            members.setdefault(kind, []).append(np.arange(start, stop, dtype=np.int32))
    tiles = {}
    for kind, groups in members.items():
        numbers = groups[0] if len(groups) == 1 else np.concatenate(groups)
        which = slice(None) if len(numbers) == len(segments) else numbers  # a slice is several times faster
        tile = _STORED_TILE_BYTES if kind[1] == STORED else TILE_ELEMENTS
        counts = -(-segments[which, _ELEMENTS] // tile)
        segments[which, _FIRST_TILE] = counts.cumsum() - counts
        tiles[kind] = numbers.repeat(counts)
    return tiles


def _launches(tiles: dict[Kind, NDArray[np.int32]]) -> tuple[EncodeLaunch, ...]:
    """A launch for each kind, whose tiles are one after another from the table's start on."""
    launches, start = [], 0
    for (fmt, schedule), part in tiles.items():
        launches.append(EncodeLaunch(fmt, schedule, start, part.size))
        start += part.nbytes
    return tuple(launches)


def _kind(stretch: Stretch, schedule: Schedule) -> Kind:
    """What determines the kernel; stored segments are copied as bytes, whatever their format."""
    return (RAW if schedule == STORED else stretch.fmt, schedule)
