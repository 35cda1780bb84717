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
from splitzip_aio.codec.layout import HEADER_BYTES, MAX_SEGMENT_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.payload import MAGIC, VERSION, parse_header, schedule_from_bytes
from splitzip_aio.codec.schedule import MAX_DEPTH, Schedule
from splitzip_aio.errors import CorruptDataError

__all__ = ["Coding", "SegmentHeaders"]

_CHECKED_BYTES = HEADER_BYTES - 8
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
_PLACES = ("low", "high", "codes", "index", "tail", "segment_bytes")
_TILE_LOG2 = TILE_ELEMENTS.bit_length() - 1


@dataclass(frozen=True, slots=True, eq=False)
class Coding:
    """A format and a schedule, and the codebook bytes of a header that this schedule leaves unused."""

    fmt: ElementFormat
    schedule: Schedule
    unused: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SegmentHeaders:
    """Headers of (segments,) segments, all valid.

    ``fields`` has a column for each field of a header; ``groups`` maps each coding to the indices of its segments.
    """

    fields: NDArray[np.void]
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
        heads = contents[starts[:, None] + np.arange(HEADER_BYTES)]
        fields = heads.view(_HEADER)[:, 0]
        groups = _groups(fields)
        if groups is None or not (
            _sealed(heads, fields) and all(_fits(fields, room, *item) for item in groups.items())
        ):
            raise _failure(contents, starts, room, where)
        return cls(fields, groups)

    def __len__(self) -> int:
        return int(self.fields.size)


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


def _sealed(heads: NDArray[np.uint8], fields: NDArray[np.void]) -> bool:
    """Whether what is the same in all headers is, and each passes its own checksum."""
    fixed = (
        (fields["magic"] == MAGIC)
        & (fields["version"] == VERSION)
        & (fields["tile_log2"] == _TILE_LOG2)
        & ~fields["reserved"].any(axis=1)
    )
    found = [xxhash.xxh64_intdigest(head) for head in heads[:, :_CHECKED_BYTES].copy()]
    return bool(fixed.all()) and found == fields["header_checksum"].tolist()


def _groups(fields: NDArray[np.void]) -> dict[Coding, NDArray[np.intp]] | None:
    """Indices of the segments of each coding; None if one is no coding at all."""
    places: dict[bytes, list[int]] = {}
    for place, key in enumerate(fields["coding"].tolist()):
        places.setdefault(key, []).append(place)
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
    return Coding(fmt, schedule, unused.ravel())


def _fits(fields: NDArray[np.void], room: NDArray[np.int64], coding: Coding, members: NDArray[np.intp]) -> bool:
    """Whether the counts and offsets of these headers agree with each other and with the bytes that are there."""
    some, fmt, schedule = fields[members], coding.fmt, coding.schedule
    elements, escapes = some["elements"].astype(np.int64), some["escapes"].astype(np.int64)
    limit = MAX_SEGMENT_ELEMENTS * (4 if fmt == RAW else 1)
    if elements.min() < 1 or elements.max() > limit or some["tail_bits"].max() >= 1 << 62:
        return False
    tail_bits = some["tail_bits"].astype(np.int64)
    least, most = schedule.tail_bounds(elements, escapes)
    places = schedule.layout(fmt, elements, tail_bits)
    ok = (
        (escapes <= (elements if schedule.codebook_sizes else 0))
        & (least <= tail_bits)
        & (tail_bits <= most)
        & (some["decoded_bytes"] == elements * fmt.element_bytes)
        & (some["segment_bytes"] <= room[members])
        & ~some["codebooks"][:, coding.unused].any(axis=1)
    )
    for name in _PLACES:
        ok &= some[name] == getattr(places, name)
    return bool(ok.all())
