"""The headers of all segments of a slot at once, as columns.

A slot is on its way for a fraction of a millisecond, so its headers are checked together, with a fixed number of array
operations whatever their number. What is right is ``parse_header``'s to say: as soon as one header fails a check
here, it is given to that function, which raises the error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec.formats import RAW, ElementFormat, format_from_code
from splitzip_aio.codec.layout import (
    HEADER_BYTES,
    MAX_SEGMENT_ELEMENTS,
    SEGMENT_ALIGN,
    TAIL_SLACK,
    TILE_ELEMENTS,
    align,
)
from splitzip_aio.codec.payload import MAGIC, VERSION, parse_header, schedule_from_bytes
from splitzip_aio.codec.schedule import MAX_DEPTH, Method, Schedule
from splitzip_aio.errors import CorruptDataError

__all__ = ["CODEBOOKS_AT", "Coding", "SegmentHeaders"]

_CHECKED_BYTES = HEADER_BYTES - 8
_EVERY_BYTE = np.arange(HEADER_BYTES)
CODEBOOKS_AT = 72
_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("coding", "V6"),
        ("elements", "<u4"),
        ("decoded_bytes", "<u4"),
        ("segment_bytes", "<u4"),
        ("low", "<u4"),
        ("high", "<u4"),
        ("codes", "<u4"),
        ("index", "<u4"),
        ("tail", "<u4"),
        ("escapes", "<u4"),
        ("tail_bits", "<u8"),
        ("checksum", "<u8"),
        ("digest", "<u8"),
        ("codebooks", "u1", (64,)),
        ("tile_log2", "u1"),
        ("reserved", "u1", (15,)),
        ("header_checksum", "<u8"),
    ]
)
_TILE_LOG2 = TILE_ELEMENTS.bit_length() - 1
_FIXED = np.frombuffer(MAGIC + VERSION.to_bytes(2, "little") + bytes([_TILE_LOG2]) + bytes(15), np.uint8)
_FIXED_AT = np.r_[0:6, 136:152]
_CODING = slice(6, 12)


@dataclass(frozen=True, slots=True, eq=False)
class Coding:
    """A format and a schedule, and the bytes of a header's codebooks that this schedule leaves unused."""

    fmt: ElementFormat
    schedule: Schedule
    unused: NDArray[np.intp]

    @lru_cache(maxsize=4096)  # noqa: B019 - codings are few, and kept for good themselves
    def offsets(self, elements: int) -> tuple[int, int, int, int, int]:
        """Where the parts of a segment of ``elements`` elements start: low, high, codes, index, tail."""
        places = self.schedule.layout(self.fmt, elements, 0)
        return places.low, places.high, places.codes, places.index, places.tail


@dataclass(frozen=True, slots=True)
class SegmentHeaders:
    """Headers of (segments,) segments, all valid.

    Attributes:
        heads: their bytes, (segments, 160) uint8.
        numbers: (segments, 9) int64: elements, decoded bytes, segment bytes, offsets of low, high, codes, index and
            tail, escapes.
        tail_bits: (segments,) int64.
        groups: for each coding, the indices of its segments.
    """

    heads: NDArray[np.uint8]
    numbers: NDArray[np.int64]
    tail_bits: NDArray[np.int64]
    groups: dict[Coding, NDArray[np.intp]]

    @classmethod
    def parse(
        cls,
        memory: memoryview | bytes | bytearray,
        sources: Sequence[int] | NDArray[np.int64],
        sizes: Sequence[int] | NDArray[np.int64],
        *,
        where: Callable[[int], str],
    ) -> SegmentHeaders:
        """Read and check the headers of the segments that start at ``sources`` and have ``sizes`` bytes at most.

        ``where`` names a segment, given by its index, in errors.

        Raises:
            CorruptDataError: a header is not valid, or its segment is longer than its size or the memory.
        """
        starts, room = np.asarray(sources, np.int64), np.asarray(sizes, np.int64)
        contents = np.frombuffer(memory, np.uint8)
        if not (starts.size and starts.min() >= 0 and (starts + np.maximum(room, HEADER_BYTES)).max() <= contents.size):
            raise _failure(contents, starts, room, where)
        heads = contents[starts[:, None] + _EVERY_BYTE]
        groups = _groups(heads)
        if groups is None or (heads[:, _FIXED_AT] != _FIXED).any():
            raise _failure(contents, starts, room, where)
        headers = cls(heads, heads.view("<u4")[:, 3:12].astype(np.int64), heads.view("<i8")[:, 6], groups)
        if not all(headers._fit(room, coding, members) for coding, members in groups.items()):
            raise _failure(contents, starts, room, where)
        return headers

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def fields(self) -> NDArray[np.void]:
        """(segments,) headers, field by field."""
        return self.heads.view(_HEADER)[:, 0]

    @property
    def checksums(self) -> NDArray[np.uint64]:
        """(segments,) checksums of the decoded bytes."""
        return self.heads.view("<u8")[:, 7].copy()

    def _fit(self, room: NDArray[np.int64], coding: Coding, members: NDArray[np.intp]) -> bool:
        """Whether the counts and offsets of these headers agree with each other and with the bytes that are there."""
        fmt, schedule = coding.fmt, coding.schedule
        some = self.numbers if len(self.groups) == 1 else self.numbers[members]
        heads = self.heads if len(self.groups) == 1 else self.heads[members]
        tail_bits, room = (self.tail_bits, room) if len(self.groups) == 1 else (self.tail_bits[members], room[members])
        elements, decoded, segment_bytes, tail, escapes = some[:, 0], some[:, 1], some[:, 2], some[:, 7], some[:, 8]
        limit = MAX_SEGMENT_ELEMENTS * (4 if fmt == RAW else 1)
        if elements.min() < 1 or elements.max() > limit or tail_bits.min() < 0 or tail_bits.max() >= 1 << 62:
            return False
        least, most = schedule.tail_bounds(elements, escapes)
        stored = schedule.method is Method.STORED
        end = tail if stored else tail + ((tail_bits + 31) >> 5) * 4 + TAIL_SLACK
        right = (
            (some[:, 3:8] == [coding.offsets(count) for count in elements.tolist()]).all(axis=1)
            & (segment_bytes == align(end, SEGMENT_ALIGN))
            & (segment_bytes <= room)
            & (decoded == elements * fmt.element_bytes)
            & (escapes <= (elements if schedule.codebook_sizes else 0))
            & (least <= tail_bits)
            & (tail_bits <= most)
        )
        return bool(right.all()) and not heads[:, coding.unused].any()


def _failure(
    contents: NDArray[np.uint8], starts: NDArray[np.int64], room: NDArray[np.int64], where: Callable[[int], str]
) -> CorruptDataError:
    """The error of the first header that is not valid."""
    for place, (start, size) in enumerate(zip(starts.tolist(), room.tolist(), strict=True)):
        try:
            parse_header(contents[start : start + size].data, where=where(place))
        except CorruptDataError as error:
            return error
    return CorruptDataError(
        f"{where(0) if starts.size else 'slot'}: its segments do not lie inside it; rebuild the cache"
    )


def _groups(heads: NDArray[np.uint8]) -> dict[Coding, NDArray[np.intp]] | None:
    """Indices of the segments of each coding; None if one is no coding, or a header fails its own checksum."""
    places: dict[bytes, list[int]] = {}
    contents = heads.tobytes()
    for place, sealed in enumerate(heads.view("<u8")[:, 19].tolist()):
        head = contents[place * HEADER_BYTES : place * HEADER_BYTES + _CHECKED_BYTES]
        if xxhash.xxh64_intdigest(head) != sealed:
            return None
        places.setdefault(head[_CODING], []).append(place)
    groups = {}
    for key, members in places.items():
        coding = _coding(key)
        if coding is None:
            return None
        groups[coding] = np.array(members)
    return groups


@lru_cache(maxsize=512)
def _coding(key: bytes) -> Coding | None:
    """What format, method and widths in a header stand for."""
    fmt, schedule = format_from_code(key[0]), schedule_from_bytes(key[1], key[2:])
    if fmt is None or schedule is None or not schedule.applies_to(fmt):
        return None
    unused = np.ones((MAX_DEPTH, 16), np.bool_)
    for tier, size in enumerate(schedule.codebook_sizes):
        unused[tier, :size] = False
    return Coding(fmt, schedule, CODEBOOKS_AT + np.flatnonzero(unused))
