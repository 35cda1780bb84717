"""The table that tells a GPU how to encode many segments: one upload, few launches.

It has three parts, all little endian:

* 256 u32 for each tensor: what there is to know of each exponent (``exponent_entries``);
* descriptors, one a segment (``_DESCRIPTOR``);
* tiles, one i32 a program: the index of its segment.

Programs that run the same code, by element format and schedule, are launched together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec.formats import RAW, ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, SEGMENT_ALIGN, TILE_ELEMENTS
from splitzip_aio.codec.schedule import STORED, Method, Schedule
from splitzip_aio.codec.segments import SegmentPlan

__all__ = ["ENCODE_WORDS", "WINDOW_EXPONENTS", "EncodeLaunch", "EncodeTable", "Stretch", "exponent_entries"]

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

_ENTRIES_BYTES = 4 * 256
_STORED_TILE_BYTES = 2 * TILE_ELEMENTS
Kind: TypeAlias = tuple[ElementFormat, Schedule | None]


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

    ``segments`` are the descriptors; ``tiles`` has one array for each launch. ``rows`` counts the tiles of all
    segments, of coded and stored ones alike.
    """

    entries: tuple[NDArray[np.uint32], ...]
    segments: NDArray[np.void]
    tiles: tuple[NDArray[np.int32], ...]
    launches: tuple[EncodeLaunch, ...]
    rows: int

    @classmethod
    def to_count(cls, stretches: Sequence[Stretch]) -> EncodeTable:
        """The table for counting exponents; ``RAW`` has none."""
        segments, rows = _describe(stretches)
        kinds = [None if stretch.fmt == RAW else (stretch.fmt, None) for stretch in stretches]
        tiles = _assign(segments, stretches, kinds)
        return cls((), segments, tuple(tiles.values()), _launches(tiles, segments.nbytes), rows)

    @classmethod
    def to_encode(
        cls, stretches: Sequence[Stretch], plans: Sequence[SegmentPlan], counted: EncodeTable | None = None
    ) -> EncodeTable:
        """The table for encoding stretches, each by its plan; ``counted`` is what counted them, if they were."""
        segments, rows = (counted.segments.copy(), counted.rows) if counted else _describe(stretches)
        stop = 0
        for number, (stretch, plan) in enumerate(zip(stretches, plans, strict=True)):
            start, stop = stop, stop + stretch.segments
            _place(segments[start:stop], stretch, plan)
            segments["entries"][start:stop] = number * _ENTRIES_BYTES
        sizes = np.array([size for plan in plans for size in plan.segments], np.int64)
        segments["destination"] = np.cumsum(sizes) - sizes
        kinds = [_kind(stretch, plan.schedule) for stretch, plan in zip(stretches, plans, strict=True)]
        entries = [exponent_entries(plan.schedule, plan.codebooks) for plan in plans]
        groups = list(dict.fromkeys(kinds))
        if counted and [fmt for fmt, _ in groups] == [launch.fmt for launch in counted.launches]:
            tiles = dict(zip(groups, counted.tiles, strict=True))  # the same segments as were counted together
        else:
            tiles = _assign(segments, stretches, kinds)
        start = len(entries) * _ENTRIES_BYTES + segments.nbytes
        return cls(tuple(entries), segments, tuple(tiles.values()), _launches(tiles, start), rows)

    @property
    def descriptors(self) -> int:
        """At which byte the descriptors start."""
        return len(self.entries) * _ENTRIES_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.descriptors + self.segments.nbytes + sum(part.nbytes for part in self.tiles)

    def write(self, out: NDArray[np.uint8]) -> None:
        """Write the table to (nbytes,) uint8."""
        np.concatenate([part.view(np.uint8) for part in (*self.entries, self.segments, *self.tiles)], out=out)


def _describe(stretches: Sequence[Stretch]) -> tuple[NDArray[np.void], int]:
    """Descriptors of all segments, with what is known from the start, and how many tiles they have."""
    segments = np.zeros(sum(stretch.segments for stretch in stretches), _DESCRIPTOR)
    stop = 0
    for stretch in stretches:
        start, stop = stop, stop + stretch.segments
        part, first, size = segments[start:stop], stretch.address, stretch.segment_bytes
        part["source"] = np.arange(first, first + stretch.nbytes, size)
        part["elements"] = size // stretch.fmt.element_bytes
        part["elements"][-1:] = stretch.last_bytes // stretch.fmt.element_bytes
    tiles = -(-segments["elements"] // TILE_ELEMENTS)
    ends = np.cumsum(tiles)
    segments["row"] = ends - tiles
    return segments, int(ends[-1])


def _place(part: NDArray[np.void], stretch: Stretch, plan: SegmentPlan) -> None:
    """Fill in what follows from a stretch's plan; planes start at the same bytes in all segments but the last."""
    for some, nbytes in ((part[:-1], stretch.segment_bytes), (part[-1:], stretch.last_bytes)):
        places = plan.schedule.layout(stretch.fmt, nbytes // stretch.fmt.element_bytes, 0)
        for name in ("high", "codes", "index", "tail"):
            some[name] = getattr(places, name)
        if plan.schedule == STORED:
            some["elements"] = nbytes
    part["tail_bits"] = plan.tail_bits
    part["escapes"] = plan.escapes


def _assign(
    segments: NDArray[np.void], stretches: Sequence[Stretch], kinds: Sequence[Kind | None]
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
        numbers = np.concatenate(groups)
        tile = _STORED_TILE_BYTES if kind[1] == STORED else TILE_ELEMENTS
        counts = -(-segments["elements"][numbers] // tile)
        segments["first_tile"][numbers] = np.cumsum(counts) - counts
        tiles[kind] = np.repeat(numbers, counts)
    return tiles


def _launches(tiles: dict[Kind, NDArray[np.int32]], start: int) -> tuple[EncodeLaunch, ...]:
    """A launch for each kind, whose tiles are one after another from byte ``start`` of the table on."""
    launches = []
    for (fmt, schedule), part in tiles.items():
        launches.append(EncodeLaunch(fmt, schedule, start, part.size))
        start += part.nbytes
    return tuple(launches)


def _kind(stretch: Stretch, schedule: Schedule) -> Kind:
    """What determines the kernel; stored segments are copied as bytes, whatever their format."""
    return (RAW if schedule == STORED else stretch.fmt, schedule)
