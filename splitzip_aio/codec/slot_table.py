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
from splitzip_aio.codec.headers import CODEBOOKS_AT, Coding, SegmentHeaders
from splitzip_aio.codec.layout import TILE_ELEMENTS, align
from splitzip_aio.codec.schedule import CANDIDATES, TOP16, Method, Schedule

__all__ = ["DESCRIPTOR_WORDS", "MAX_SLOT_SEGMENTS", "TOP16_TILE_ELEMENTS", "Launch", "SlotTable", "table_capacity"]

MAX_SLOT_SEGMENTS = 1024
TOP16_TILE_ELEMENTS = (
    4096  # half a tile: its chunks do not depend on each other, and small shares fill a GPU more evenly
)
_STORED_TILE_BYTES = 2 * TILE_ELEMENTS
_LEAST_TILE_BYTES = TOP16_TILE_ELEMENTS // 2  # an element takes 4 bits or more: residual and code of E5M2

_DESCRIPTOR = np.dtype(
    [
        ("source", "<i8"),  # from the start of the slot
        ("destination", "<i8"),  # device address, a multiple of 16
        ("elements", "<i4"),
        ("coding", "<i4"),  # place in CANDIDATES; -1 for a schedule outside it
        ("first_tile", "<i4"),  # of the segment, in its launch
        ("high", "<i4"),
        ("codes", "<i4"),
        ("index", "<i4"),
        ("tail", "<i4"),
        ("last_word", "<i4"),  # of the tail, that a code can start in
        ("decoded_bytes", "<i4"),
        ("escapes", "<i4"),
        ("reserved", "<i4", (2,)),
        ("codebooks", "u1", (64,)),
    ]
)
DESCRIPTOR_WORDS = {name: field[1] // 4 for name, field in (_DESCRIPTOR.fields or {}).items()}
"""Where each field of a descriptor starts, in words of 4 bytes; under ``words``, how many there are."""
DESCRIPTOR_WORDS["words"] = _DESCRIPTOR.itemsize // 4
_ELEMENTS, _CODING, _FIRST_TILE, _HIGH, _LAST_WORD, _DECODED_BYTES, _ESCAPES = (
    DESCRIPTOR_WORDS[name]
    for name in ("elements", "coding", "first_tile", "high", "last_word", "decoded_bytes", "escapes")
)


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


@dataclass(slots=True, eq=False)
class SlotTable:
    """A slot's table: where its parts are, from the table's start, and what the checksums must come to.

    ``contents`` are its bytes, with destinations that count from the address it was last ``written_for``.
    """

    launches: tuple[Launch, ...]
    results: int
    tiles: int
    nbytes: int
    checksums: NDArray[np.uint64]
    contents: NDArray[np.uint8]
    written_for: int = 0

    @classmethod
    def build(
        cls,
        headers: SegmentHeaders,
        sources: Sequence[int] | NDArray[np.int64],
        destinations: Sequence[int] | NDArray[np.int64],
        view: memoryview,
    ) -> SlotTable:
        """Make the table of a slot's segments, and write it into ``view``.

        ``sources`` are byte offsets in the slot, multiples of 32; ``destinations`` device addresses, multiples of 16.
        """
        table = cls.of(headers, sources, destinations)
        table.write(view, 0)
        return table

    @classmethod
    def of(
        cls,
        headers: SegmentHeaders,
        sources: Sequence[int] | NDArray[np.int64],
        destinations: Sequence[int] | NDArray[np.int64],
    ) -> SlotTable:
        """Make the table of a slot's segments; ``destinations`` count from the address that ``write`` is given."""
        descriptors = _descriptors(headers, sources, destinations)
        words = descriptors.view("<i4").reshape(len(headers), -1)
        tiles = np.empty(len(headers), np.int64)
        for coding, members in headers.groups.items():
            standard = coding.schedule in CANDIDATES
            words[members, _CODING] = CANDIDATES.index(coding.schedule) if standard else -1
            tiles[members] = -(-headers.numbers[members, 1] // _tile_bytes(coding))
        owners, launches, first = [], [], 0
        for (fmt, schedule), members in _launches(headers).items():
            stops = tiles[members].cumsum()
            words[members, _FIRST_TILE] = stops - tiles[members]
            owners.append(members.astype("<i4").repeat(tiles[members]))
            launches.append(Launch(fmt, schedule, first, int(stops[-1])))
            first += launches[-1].tiles
        parts = [descriptors, np.zeros(len(headers), np.uint64), *owners]
        contents = np.concatenate([part.view(np.uint8) for part in parts])
        results = descriptors.nbytes
        tiles_at = results + 8 * len(headers)
        return cls(tuple(launches), results, tiles_at, contents.size, headers.checksums, contents)

    def write(self, view: memoryview, address: int) -> None:
        """Write the table into ``view``, for segments that are decoded to where ``address`` is the start."""
        if address != self.written_for:
            self.contents[: self.results].view(_DESCRIPTOR)["destination"] += address - self.written_for
            self.written_for = address
        view[: self.nbytes] = self.contents.data

    def failures(self, results: NDArray[np.uint64]) -> list[int]:
        """Indices of the segments whose checksum, from the device, is not what their header says."""
        return np.flatnonzero(results != self.checksums).tolist()


def _descriptors(
    headers: SegmentHeaders,
    sources: Sequence[int] | NDArray[np.int64],
    destinations: Sequence[int] | NDArray[np.int64],
) -> NDArray[np.void]:
    """(segments,) descriptors, but for what depends on the coding."""
    numbers = headers.numbers
    descriptors = np.zeros(len(headers), _DESCRIPTOR)
    descriptors["source"] = sources
    descriptors["destination"] = destinations
    words = descriptors.view("<i4").reshape(len(headers), -1)
    words[:, _ELEMENTS] = numbers[:, 0]
    words[:, _HIGH : _HIGH + 4] = numbers[:, 4:8]  # high, codes, index, tail
    words[:, _LAST_WORD] = np.maximum((headers.tail_bits - 1) >> 5, 0)
    words[:, _DECODED_BYTES] = numbers[:, 1]
    words[:, _ESCAPES] = numbers[:, 8]
    descriptors["codebooks"] = headers.heads[:, CODEBOOKS_AT : CODEBOOKS_AT + 64]
    return descriptors


def _tile_bytes(coding: Coding) -> int:
    """Decoded bytes of one program's tile."""
    if coding.schedule.method is Method.STORED:
        return _STORED_TILE_BYTES
    top16 = coding.schedule.method is Method.TOP16
    return (TOP16_TILE_ELEMENTS if top16 else TILE_ELEMENTS) * coding.fmt.element_bytes


def _launches(headers: SegmentHeaders) -> dict[tuple[ElementFormat, Schedule | None], NDArray[np.intp]]:
    """Segments by launch. Stored ones, which any kernel copies, join the first."""
    stored: list[NDArray[np.intp]] = []
    kinds: dict[tuple[ElementFormat, Schedule | None], list[tuple[Schedule, NDArray[np.intp]]]] = {}
    for coding, members in headers.groups.items():
        if coding.schedule.method is Method.STORED:
            stored.append(members)
        else:
            own = coding.schedule if coding.schedule not in CANDIDATES else None
            kinds.setdefault((coding.fmt, own), []).append((coding.schedule, members))
    launches: dict[tuple[ElementFormat, Schedule | None], list[NDArray[np.intp]]] = {}
    for (fmt, own), parts in kinds.items():
        shared = own or (parts[0][0] if len(parts) == 1 else None)
        launches[fmt, shared] = [members for _, members in parts]
    if not launches:
        launches[BF16, TOP16] = []
    next(iter(launches.values())).extend(stored)
    return {kind: np.concatenate(parts) for kind, parts in launches.items()}
