"""Segment headers: what a segment says of itself, and the checks that make it safe to decode.

``parse_header`` is the only way in: it checks a header against the bytes that are really there before anyone follows an
offset, so that a damaged or hostile segment ends in one clear error. ``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from splitzip_aio.codec.formats import RAW, ElementFormat, format_from_code
from splitzip_aio.codec.layout import (
    HEADER_BYTES,
    MAX_SEGMENT_ELEMENTS,
    SEGMENT_ALIGN,
    TILE_ELEMENTS,
    Layout,
)
from splitzip_aio.codec.schedule import MAX_DEPTH, Method, Schedule
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError

__all__ = ["MAGIC", "VERSION", "SegmentHeader", "parse_header", "schedule_from_bytes"]

MAGIC = b"SZPS"
VERSION = 2

# magic, version, format, method, widths, elements, decoded bytes, segment bytes, plane offsets, escapes, tail bits,
# checksum, digest, codebooks (16 bytes a tier), log2 of the tile, reserved (zero); the header checksum follows.
_FIELDS = struct.Struct("<4sHBB4sIII5IIQQQ64sB15s")
_CHECK = struct.Struct("<Q")
_BOOK_BYTES = 16
_RESERVED = bytes(15)
_METHODS = {int(method): method for method in Method}
_TILE_LOG2 = TILE_ELEMENTS.bit_length() - 1


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's header, validated.

    ``elements`` counts elements of ``fmt``; ``escapes`` the exponents that no codebook holds; ``checksum`` covers the
    decoded bytes (``codec.checksum``), ``digest`` is XXH3-64 of everything between header and ``segment_bytes``.
    """

    fmt: ElementFormat
    schedule: Schedule
    elements: int
    escapes: int
    tail_bits: int
    checksum: int
    digest: int
    codebooks: tuple[bytes, ...]

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded elements."""
        return self.elements * self.fmt.element_bytes

    @property
    def layout(self) -> Layout[int]:
        """Where the planes are."""
        return self.schedule.layout(self.fmt, self.elements, self.tail_bits)

    @property
    def segment_bytes(self) -> int:
        """Bytes of the whole segment, header and padding included."""
        return self.layout.segment_bytes

    def pack(self) -> bytes:
        """The 160 bytes of the header, its own checksum last."""
        places = self.layout
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.fmt.code,
            self.schedule.method,
            bytes(self.schedule.widths).ljust(MAX_DEPTH, b"\0"),
            self.elements,
            self.decoded_bytes,
            places.segment_bytes,
            places.low,
            places.high,
            places.codes,
            places.index,
            places.tail,
            self.escapes,
            self.tail_bits,
            self.checksum,
            self.digest,
            _packed(self.codebooks),
            _TILE_LOG2,
            _RESERVED,
        )
        return fields + _CHECK.pack(xxhash.xxh64_intdigest(fields))


def parse_header(buffer: bytes | bytearray | memoryview, *, where: str) -> SegmentHeader:
    """Read and check the header of the segment that starts ``buffer``.

    ``buffer`` holds at least the whole segment; ``where`` names it in errors (file, offset, tensor).

    Raises:
        CorruptDataError: the bytes are no valid segment, or the segment is longer than the buffer.
    """
    if len(buffer) < HEADER_BYTES:
        raise CorruptDataError(
            f"{where}: segment header needs {HEADER_BYTES} bytes, found {len(buffer)}; rebuild the cache"
        )
    head = bytes(buffer[:HEADER_BYTES])
    if head[:4] != MAGIC:
        raise CorruptDataError(f"{where}: expected a segment ({MAGIC!r}), found {head[:4]!r}; rebuild the cache")
    (found,) = _CHECK.unpack_from(head, _FIELDS.size)
    if xxhash.xxh64_intdigest(head[: _FIELDS.size]) != found:
        raise CorruptDataError(f"{where}: segment header fails its checksum; rebuild the cache")
    (
        _,
        version,
        code,
        method,
        widths,
        elements,
        decoded,
        size,
        *offsets,
        escapes,
        tail_bits,
        check,
        digest,
        books,
        tile,
        reserved,
    ) = _FIELDS.unpack_from(head)
    if version != VERSION or tile != _TILE_LOG2:
        raise CorruptDataError(
            f"{where}: segment version {version} with tiles of 2**{tile} elements, this release reads version "
            f"{VERSION} with 2**{_TILE_LOG2}; rebuild the cache or use the release that wrote it"
        )
    fmt = format_from_code(code)
    schedule = schedule_from_bytes(method, widths)
    if fmt is None or schedule is None or not schedule.applies_to(fmt):
        raise CorruptDataError(
            f"{where}: no such coding: format {code}, method {method}, widths {tuple(widths)}; rebuild the cache"
        )
    header = SegmentHeader(fmt, schedule, elements, escapes, tail_bits, check, digest, _codebooks(schedule, books))
    _check_counts(header, decoded, size, offsets, len(buffer), where)
    if reserved != _RESERVED or books != _packed(header.codebooks):
        raise CorruptDataError(f"{where}: bytes of the segment header that must be zero are not; rebuild the cache")
    return header


def schedule_from_bytes(method: int, widths: bytes) -> Schedule | None:
    """The schedule that a header's method and (4,) widths stand for; None if there is none."""
    try:
        return Schedule(_METHODS[method], tuple(widths.rstrip(b"\0")))
    except (KeyError, InvalidArgumentError):
        return None


def _codebooks(schedule: Schedule, packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[_BOOK_BYTES * tier :][:size] for tier, size in enumerate(schedule.codebook_sizes))


def _packed(codebooks: tuple[bytes, ...]) -> bytes:
    """The codebooks as the header has them: 16 bytes a tier, zeros behind their entries."""
    books = b"".join(book.ljust(_BOOK_BYTES, b"\0") for book in codebooks)
    return books.ljust(MAX_DEPTH * _BOOK_BYTES, b"\0")


def _check_counts(
    header: SegmentHeader, decoded: int, size: int, offsets: list[int], available: int, where: str
) -> None:
    """Refuse a header whose counts contradict each other or the bytes that are there."""
    limit = MAX_SEGMENT_ELEMENTS * (4 if header.fmt == RAW else 1)
    if not 1 <= header.elements <= limit:
        raise CorruptDataError(
            f"{where}: {header.elements} elements in a segment, expected 1 to {limit}; rebuild the cache"
        )
    least, most = header.schedule.tail_bounds(header.elements, header.escapes)
    most_escapes = header.elements if header.codebooks else 0
    if header.escapes > most_escapes or not least <= header.tail_bits <= most:
        raise CorruptDataError(
            f"{where}: {header.escapes} escapes and a tail of {header.tail_bits} bits for {header.elements} elements; "
            f"expected {least} to {most} bits; rebuild the cache"
        )
    places = header.layout
    stated = (decoded, size, *offsets)
    derived = (
        header.decoded_bytes,
        places.segment_bytes,
        places.low,
        places.high,
        places.codes,
        places.index,
        places.tail,
    )
    if stated != derived:
        raise CorruptDataError(
            f"{where}: segment states sizes and offsets {stated}, expected {derived}; rebuild the cache"
        )
    if size > available or size % SEGMENT_ALIGN:
        raise CorruptDataError(
            f"{where}: segment of {size} bytes, found {available}; the pack is truncated; rebuild the cache"
        )
