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
    entries = schedule.tail_costs(codebooks) << 24
    reaches = np.ones(256, bool)
    for tier, book in enumerate(codebooks):
        codes = np.full(256, len(book))
        codes[list(book[::-1])] = np.arange(len(book) - 1, -1, -1)  # of equal entries the first counts
        entries |= np.where(reaches, (codes & 15) << (4 * tier), 0)
        reaches &= codes == len(book)
    if schedule.method is Method.TOP16:
        entries |= reaches.astype(np.int64) << 4
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
    def rows(self) -> int:
        """How many tiles its segments have."""
        return int((-(-self.decoded_bytes() // (TILE_ELEMENTS * self.fmt.element_bytes))).sum())

    def decoded_bytes(self) -> NDArray[np.int64]:
        """(segments,) decoded bytes of each."""
        sizes = np.full(self.segments, self.segment_bytes)
        sizes[-1:] = self.nbytes - (self.segments - 1) * self.segment_bytes
        return sizes


@dataclass(frozen=True, slots=True)
class EncodeLaunch:
    """One kernel launch: ``tiles`` programs from byte ``first`` of the table on; ``schedule`` is None to count."""

    fmt: ElementFormat
    schedule: Schedule | None
    first: int
    tiles: int


@dataclass(frozen=True, slots=True)
class EncodeTable:
    """What is uploaded, (bytes,) uint8 with ``descriptors`` at that byte, and what the host needs to know of it.

    ``segments`` counts segments, ``rows`` their tiles, of coded and stored segments alike.
    """

    contents: NDArray[np.uint8]
    descriptors: int
    launches: tuple[EncodeLaunch, ...]
    segments: int
    rows: int

    @classmethod
    def to_count(cls, stretches: Sequence[Stretch]) -> EncodeTable:
        """The table for counting exponents; ``RAW`` has none."""
        descriptors = _describe(stretches)
        kinds = [None if stretch.fmt == RAW else (stretch.fmt, None) for stretch in stretches]
        return _assemble(descriptors, stretches, kinds, [])

    @classmethod
    def to_encode(cls, stretches: Sequence[Stretch], plans: Sequence[SegmentPlan]) -> EncodeTable:
        """The table for encoding stretches, each by its plan."""
        descriptors = _describe(stretches)
        stop = destination = 0
        for number, (stretch, plan) in enumerate(zip(stretches, plans, strict=True)):
            start, stop = stop, stop + stretch.segments
            part = descriptors[start:stop]
            _place(part, stretch, plan)
            part["entries"] = number * _ENTRIES_BYTES
            ends = np.cumsum(plan.segments)
            part["destination"] = destination + ends - plan.segments
            destination += int(ends[-1])
        kinds = [_kind(stretch, plan.schedule) for stretch, plan in zip(stretches, plans, strict=True)]
        entries = [exponent_entries(plan.schedule, plan.codebooks) for plan in plans]
        return _assemble(descriptors, stretches, kinds, entries)


def _describe(stretches: Sequence[Stretch]) -> NDArray[np.void]:
    """Descriptors of all segments, with what is known from the start."""
    descriptors = np.zeros(sum(stretch.segments for stretch in stretches), _DESCRIPTOR)
    stop = 0
    for stretch in stretches:
        start, stop = stop, stop + stretch.segments
        part = descriptors[start:stop]
        part["source"] = stretch.address + np.arange(stretch.segments) * stretch.segment_bytes
        part["elements"] = stretch.decoded_bytes() // stretch.fmt.element_bytes
    rows = -(-descriptors["elements"] // TILE_ELEMENTS)
    descriptors["row"] = np.cumsum(rows) - rows
    return descriptors


def _place(part: NDArray[np.void], stretch: Stretch, plan: SegmentPlan) -> None:
    """Fill in what follows from a stretch's plan."""
    tail_bits = np.array(plan.tail_bits, np.int64)
    places = plan.schedule.layout(stretch.fmt, part["elements"].astype(np.int64), tail_bits)
    for name in ("high", "codes", "index", "tail"):
        part[name] = getattr(places, name)
    part["tail_bits"] = tail_bits
    part["escapes"] = plan.escapes
    if plan.schedule == STORED:
        part["elements"] = stretch.decoded_bytes()


def _assemble(
    descriptors: NDArray[np.void],
    stretches: Sequence[Stretch],
    kinds: Sequence[Kind | None],
    entries: Sequence[NDArray[np.uint32]],
) -> EncodeTable:
    """Give the segments of each kind, but None, a launch, and put the parts of the table together."""
    segments_of: dict[Kind, list[NDArray[np.int64]]] = {}
    stop = 0
    for stretch, kind in zip(stretches, kinds, strict=True):
        start, stop = stop, stop + stretch.segments
        if kind is not None:
            segments_of.setdefault(kind, []).append(np.arange(start, stop))
    parts = [np.empty(0, np.uint32), *entries]
    place = len(entries) * _ENTRIES_BYTES + descriptors.nbytes
    launches, tiles = [], []
    for (fmt, schedule), members in segments_of.items():
        segments = np.concatenate(members)
        tile = _STORED_TILE_BYTES if schedule == STORED else TILE_ELEMENTS
        counts = -(-descriptors["elements"][segments] // tile)
        descriptors["first_tile"][segments] = np.cumsum(counts) - counts
        tiles.append(np.repeat(segments.astype("<i4"), counts))
        launches.append(EncodeLaunch(fmt, schedule, place, tiles[-1].size))
        place += tiles[-1].nbytes
    contents = np.concatenate([part.view(np.uint8) for part in (*parts, descriptors, *tiles)])
    rows = sum(stretch.rows for stretch in stretches)
    return EncodeTable(contents, len(entries) * _ENTRIES_BYTES, tuple(launches), len(descriptors), rows)


def _kind(stretch: Stretch, schedule: Schedule) -> Kind:
    """What determines the kernel; stored segments are copied as bytes, whatever their format."""
    return (RAW if schedule == STORED else stretch.fmt, schedule)
