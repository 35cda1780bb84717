"""The table that tells a GPU how to decode a slot: one launch, no header parsed on the device.

It lies behind the payload, so that one copy carries both, and has three parts, all little endian:

* descriptors, 128 bytes a segment (``_DESCRIPTOR``);
* results, one zeroed u64 a segment, to which the tiles add their checksums;
* tiles, one i32 a program: the index of its segment.

Segments whose codings cannot share a kernel (several element formats, or schedules outside the standard set) get a
launch for each kind; a slot of ordinary BF16 weights, stored tensors among them, is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.layout import TILE_ELEMENTS, align
from splitzip_aio.codec.payload import SegmentHeader
from splitzip_aio.codec.schedule import CANDIDATES, TOP16, Method, Schedule

__all__ = ["DESCRIPTOR_WORDS", "MAX_SLOT_SEGMENTS", "TOP16_TILE_ELEMENTS", "Launch", "SlotTable", "table_capacity"]

MAX_SLOT_SEGMENTS = 1024
TOP16_TILE_ELEMENTS = 4096  # top16 has an index entry a chunk, and small tiles fill a GPU more evenly
_STORED_TILE_BYTES = 2 * TILE_ELEMENTS
_LEAST_TILE_BYTES = TOP16_TILE_ELEMENTS // 2  # an element takes 4 bits or more: residual and code of E5M2

_DESCRIPTOR = np.dtype(
    [
        ("source", "<i8"),  # from the start of the slot
        ("destination", "<i8"),  # device address, a multiple of 16
        ("elements", "<i4"),
        ("coding", "<i4"),  # place in CANDIDATES; -1 for a schedule outside it
        ("first_tile", "<i4"),  # of the segment, in its launch
        ("format", "<i4"),
        ("high", "<i4"),
        ("codes", "<i4"),
        ("index", "<i4"),
        ("tail", "<i4"),
        ("last_word", "<i4"),  # of the tail, that a code can start in
        ("decoded_bytes", "<i4"),
        ("escapes", "<i4"),
        ("reserved", "<i4"),
        ("codebooks", "V64"),
    ]
)
DESCRIPTOR_WORDS = {name: field[1] // 4 for name, field in (_DESCRIPTOR.fields or {}).items()}
"""Where each field of a descriptor starts, in words of 4 bytes; under ``words``, how many there are."""
DESCRIPTOR_WORDS["words"] = _DESCRIPTOR.itemsize // 4


def table_capacity(slot_bytes: int) -> int:
    """Bytes to keep behind a slot of ``slot_bytes`` for the largest table it can need."""
    tiles = slot_bytes // _LEAST_TILE_BYTES + MAX_SLOT_SEGMENTS
    return align(MAX_SLOT_SEGMENTS * (_DESCRIPTOR.itemsize + 8) + 4 * tiles, 4096)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: ``tiles`` programs from ``first`` in the table's tile list.

    ``schedule`` is the one coding of all its coded segments, or None where they mix standard ones.
    """

    fmt: ElementFormat
    schedule: Schedule | None
    first: int
    tiles: int


@dataclass(frozen=True, slots=True)
class SlotTable:
    """A slot's table: where its parts are, from the table's start, and what the checksums must come to."""

    launches: tuple[Launch, ...]
    results: int
    tiles: int
    nbytes: int
    checksums: NDArray[np.uint64]

    @classmethod
    def build(
        cls,
        headers: Sequence[SegmentHeader],
        sources: Sequence[int],
        destinations: Sequence[int],
        view: memoryview,
    ) -> SlotTable:
        """Write the table of a slot's segments into ``view``.

        ``sources`` are byte offsets in the slot, multiples of 32; ``destinations`` device addresses, multiples of 16.
        """
        groups = _groups(headers)
        descriptors = np.zeros(len(headers), _DESCRIPTOR)
        owners, launches, first = [], [], 0
        for (fmt, schedule), members in groups.items():
            counts = np.array([_tiles(headers[i]) for i in members])
            starts = np.cumsum(counts) - counts
            for i, start in zip(members, starts.tolist(), strict=True):
                descriptors[i] = _describe(headers[i], sources[i], destinations[i], start)
            owners.append(np.repeat(np.array(members, "<i4"), counts))
            launches.append(Launch(fmt, schedule, first, int(counts.sum())))
            first += launches[-1].tiles
        results = descriptors.nbytes
        tiles = results + 8 * len(headers)
        table = np.frombuffer(view, np.uint8)
        table[:results] = descriptors.view(np.uint8)
        table[results:tiles] = 0
        nbytes = tiles + 4 * first
        table[tiles:nbytes] = np.concatenate(owners).view(np.uint8)
        sums = np.array([header.checksum for header in headers], np.uint64)
        return cls(tuple(launches), results, tiles, nbytes, sums)

    def failures(self, results: NDArray[np.uint64]) -> list[int]:
        """Indices of the segments whose checksum, from the device, is not what their header says."""
        return np.flatnonzero(results != self.checksums).tolist()


def _tiles(header: SegmentHeader) -> int:
    if header.schedule.method is Method.STORED:
        return -(-header.decoded_bytes // _STORED_TILE_BYTES)
    tile = TOP16_TILE_ELEMENTS if header.schedule.method is Method.TOP16 else TILE_ELEMENTS
    return -(-header.elements // tile)


def _groups(headers: Sequence[SegmentHeader]) -> dict[tuple[ElementFormat, Schedule | None], list[int]]:
    """Segments by launch. Stored ones, which any kernel copies, join the first."""
    coded: dict[tuple[ElementFormat, Schedule | None], list[int]] = {}
    stored = []
    for i, header in enumerate(headers):
        if header.schedule.method is Method.STORED:
            stored.append(i)
        else:
            shared = header.schedule if header.schedule not in CANDIDATES else None
            coded.setdefault((header.fmt, shared), []).append(i)
    if not coded:
        return {(BF16, TOP16): stored}
    groups = {}
    for (fmt, schedule), members in coded.items():
        kinds = {headers[i].schedule for i in members}
        groups[fmt, schedule or (kinds.pop() if len(kinds) == 1 else None)] = members
    next(iter(groups.values())).extend(stored)
    return groups


def _describe(header: SegmentHeader, source: int, destination: int, first_tile: int) -> tuple[object, ...]:
    places = header.layout
    return (
        source,
        destination,
        header.elements,
        CANDIDATES.index(header.schedule) if header.schedule in CANDIDATES else -1,
        first_tile,
        header.fmt.code,
        places.high,
        places.codes,
        places.index,
        places.tail,
        max((header.tail_bits - 1) // 32, 0),
        header.decoded_bytes,
        header.escapes,
        0,
        b"".join(book.ljust(16, b"\0") for book in header.codebooks).ljust(64, b"\0"),
    )
