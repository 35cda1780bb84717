"""The CPU codec in plain numpy: the ground truth that every faster path is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec.bits import pack_bits, to_bits, unpack_bits
from splitzip_aio.codec.checksum import checksum
from splitzip_aio.codec.formats import RAW, ElementFormat
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, HEADER_BYTES, TILE_ELEMENTS
from splitzip_aio.codec.payload import SegmentHeader
from splitzip_aio.codec.schedule import Method, Schedule
from splitzip_aio.errors import CorruptDataError

__all__ = ["assemble", "decode_segment", "encode_segment", "histogram", "join", "split"]

Bytes = NDArray[np.uint8]
REBUILD = "rebuild the cache"


def split(data: Bytes, fmt: ElementFormat) -> tuple[Bytes, Bytes, NDArray[np.uint16]]:
    """Exponents, low and high residuals, each (n,), of (n * element_bytes,) bytes of elements."""
    words = data.view(f"<u{fmt.element_bytes}").astype(np.uint32)
    exponents = (words >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    signs = words >> (fmt.mantissa_bits + fmt.exponent_bits)
    residual = (words & ((1 << fmt.mantissa_bits) - 1)) | (signs << fmt.mantissa_bits)
    low = residual & ((1 << fmt.low_bits) - 1)
    return exponents.astype(np.uint8), low.astype(np.uint8), (residual >> fmt.low_bits).astype(np.uint16)


def join(exponents: Bytes, low: Bytes, high: NDArray[np.uint16], fmt: ElementFormat) -> Bytes:
    """Inverse of ``split``: (n * element_bytes,) bytes."""
    residual = low.astype(np.uint32) | (high.astype(np.uint32) << fmt.low_bits)
    mantissa = residual & ((1 << fmt.mantissa_bits) - 1)
    signs = residual >> fmt.mantissa_bits
    words = mantissa | (exponents.astype(np.uint32) << fmt.mantissa_bits)
    words |= signs << (fmt.mantissa_bits + fmt.exponent_bits)
    return words.astype(f"<u{fmt.element_bytes}").view(np.uint8)


def histogram(data: Bytes, fmt: ElementFormat) -> NDArray[np.int64]:
    """(256,) counts of exponents; for ``RAW`` the count of its bytes is under 0."""
    if fmt == RAW:
        counts = np.zeros(256, np.int64)
        counts[0] = data.size
        return counts
    return np.bincount(split(data, fmt)[0], minlength=256)


def encode_segment(data: Bytes, fmt: ElementFormat, schedule: Schedule, codebooks: tuple[bytes, ...]) -> Bytes:
    """Encode (elements * element_bytes,) bytes into one segment, (segment_bytes,).

    ``codebooks`` are the tensor's, from ``Schedule.codebooks``; empty for ``STORED``.
    """
    if schedule.method is Method.STORED:
        return assemble(data, fmt, schedule, (), escapes=0, tail_bits=0, planes={"low": data})
    exponents, low, high = split(data, fmt)
    encode = _encode_top16 if schedule.method is Method.TOP16 else _encode_tiers
    coded = encode(exponents, schedule, codebooks)
    planes = {
        "low": pack_bits(low, fmt.low_bits),
        "high": pack_bits(high, fmt.high_bits),
        "codes": coded.codes,
        "index": coded.index.astype("<u4").view(np.uint8),
        "tail": coded.tail,
    }
    return assemble(data, fmt, schedule, codebooks, escapes=coded.escapes, tail_bits=coded.tail_bits, planes=planes)


def assemble(
    data: Bytes,
    fmt: ElementFormat,
    schedule: Schedule,
    codebooks: tuple[bytes, ...],
    *,
    escapes: int,
    tail_bits: int,
    planes: dict[str, Bytes],
) -> Bytes:
    """Lay the planes out as one segment and put the header before them; ``data`` is what they decode to."""
    elements = data.size // fmt.element_bytes
    places = schedule.layout(fmt, elements, tail_bits)
    segment = np.zeros(places.segment_bytes, np.uint8)
    for name, plane in planes.items():
        start = getattr(places, name)
        segment[start : start + plane.size] = plane
    digest = xxhash.xxh3_64_intdigest(segment[HEADER_BYTES:].data)
    header = SegmentHeader(fmt, schedule, elements, escapes, tail_bits, checksum(data), digest, codebooks)
    segment[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return segment


@dataclass(frozen=True, slots=True)
class _Coded:
    """The coded exponents of a segment: first-tier plane, index, tail, and the counts the header states."""

    codes: Bytes
    index: NDArray[np.uint32]
    tail: Bytes
    escapes: int
    tail_bits: int


def _ranks(codebook: bytes, missing: int) -> NDArray[np.uint8]:
    """(256,) code of each exponent; ``missing`` where the codebook lacks it. Of equal entries the first counts."""
    table = np.full(256, missing, np.uint8)
    table[list(codebook[::-1])] = np.arange(len(codebook) - 1, -1, -1, dtype=np.uint8)
    return table


def _encode_tiers(exponents: Bytes, schedule: Schedule, codebooks: tuple[bytes, ...]) -> _Coded:
    tables = [_ranks(book, len(book)) for book in codebooks]
    first, bits, index, escapes, position = tables[0][exponents], [], [], 0, 0
    for start in range(0, exponents.size, CHUNK_ELEMENTS):
        if start % TILE_ELEMENTS == 0:
            index.append(position)
        codes, left = first[start : start + CHUNK_ELEMENTS], exponents[start : start + CHUNK_ELEMENTS]
        for tier, book in enumerate(codebooks):
            if tier:
                codes = tables[tier][left]
                bits.append(to_bits(codes, schedule.widths[tier]))
                position += bits[-1].size
            left = left[codes == len(book)]
        bits.append(to_bits(left, 8))
        position += bits[-1].size
        escapes += left.size
    index.append(position)
    tail = np.packbits(np.concatenate(bits), bitorder="little")
    return _Coded(pack_bits(first, schedule.widths[0]), np.array(index, np.uint32), tail, escapes, position)


def _encode_top16(exponents: Bytes, schedule: Schedule, codebooks: tuple[bytes, ...]) -> _Coded:
    ranks = _ranks(codebooks[0], 16)[exponents]
    escaped = ranks == 16
    codes = np.where(escaped, 0, ranks).astype(np.uint8)
    places = np.flatnonzero(escaped)
    tiles = -(-exponents.size // TILE_ELEMENTS)
    index = np.searchsorted(places, np.arange(tiles + 1) * TILE_ELEMENTS).astype(np.uint32)
    tail = np.concatenate(((places % TILE_ELEMENTS).astype("<u2").view(np.uint8), exponents[escaped]))
    return _Coded(_swap_nibbles(pack_bits(codes, 4)), index, tail, places.size, 24 * places.size)


def _swap_nibbles(plane: Bytes) -> Bytes:
    """Published SplitZip puts the even element in the high nibble; ``pack_bits`` puts it in the low one."""
    return (plane << np.uint8(4)) | (plane >> np.uint8(4))


def decode_segment(header: SegmentHeader, segment: Bytes, out: Bytes, *, where: str) -> None:
    """Decode a segment with a parsed header into ``out``, (decoded_bytes,); the caller compares the checksum.

    Raises:
        CorruptDataError: an index or a count contradicts the data; nothing outside the segment is read.
    """
    fmt, places = header.fmt, header.layout
    if header.schedule.method is Method.STORED:
        out[:] = segment[places.low : places.low + header.decoded_bytes]
        return
    decode = _decode_top16 if header.schedule.method is Method.TOP16 else _decode_tiers
    exponents = decode(header, segment, where)
    low = unpack_bits(segment[places.low :], fmt.low_bits, header.elements)
    high = unpack_bits(segment[places.high :], fmt.high_bits, header.elements)
    out[:] = join(exponents, low.astype(np.uint8), high, fmt)


def _index(header: SegmentHeader, segment: Bytes) -> NDArray[np.uint32]:
    entries = -(-header.elements // TILE_ELEMENTS) + 1
    start = header.layout.index
    return segment[start : start + 4 * entries].view("<u4")


def _decode_tiers(header: SegmentHeader, segment: Bytes, where: str) -> Bytes:
    places, widths = header.layout, header.schedule.widths
    tail, index = segment[places.tail :], _index(header, segment)
    exponents = np.empty(header.elements, np.uint8)
    books = [np.frombuffer(book.ljust(256, b"\0"), np.uint8) for book in (*header.codebooks, bytes(range(256)))]
    position, escapes = 0, 0
    for start in range(0, header.elements, CHUNK_ELEMENTS):
        if start % TILE_ELEMENTS == 0 and position != index[start // TILE_ELEMENTS]:
            raise CorruptDataError(
                f"{where}: tile {start // TILE_ELEMENTS} does not start where its index says; {REBUILD}"
            )
        reached = np.arange(start, min(start + CHUNK_ELEMENTS, header.elements))
        codes = unpack_bits(segment[places.codes :], widths[0], reached.size, start=start * widths[0])
        for tier, width in enumerate((*widths, 8)):
            if tier:
                if position + reached.size * width > header.tail_bits:
                    raise CorruptDataError(f"{where}: codes run past the tail of {header.tail_bits} bits; {REBUILD}")
                codes = unpack_bits(tail, width, reached.size, start=position)
                position += reached.size * width
            exponents[reached] = books[tier][codes]
            if tier < len(widths):
                reached = reached[codes == (1 << width) - 1]
        escapes += reached.size
    if position != index[-1] or position != header.tail_bits or escapes != header.escapes:
        raise CorruptDataError(
            f"{where}: tail of {position} bits and {escapes} escapes, "
            f"expected {header.tail_bits} bits and {header.escapes}; {REBUILD}"
        )
    return exponents


def _decode_top16(header: SegmentHeader, segment: Bytes, where: str) -> Bytes:
    places = header.layout
    plane = _swap_nibbles(segment[places.codes : places.codes + (header.elements + 1) // 2])
    exponents = np.frombuffer(header.codebooks[0], np.uint8)[unpack_bits(plane, 4, header.elements)]
    index = _index(header, segment).astype(np.int64)
    counts = np.diff(index)
    if index[0] != 0 or index[-1] != header.escapes or (counts < 0).any():
        raise CorruptDataError(f"{where}: the escape index does not count up to {header.escapes}; {REBUILD}")
    tail = segment[places.tail : places.tail + 3 * header.escapes]
    offsets, values = tail[: 2 * header.escapes].view("<u2"), tail[2 * header.escapes :]
    positions = np.repeat(np.arange(counts.size), counts) * TILE_ELEMENTS + offsets
    if (offsets >= TILE_ELEMENTS).any() or (positions >= header.elements).any():
        raise CorruptDataError(f"{where}: an escape lies outside its tile of {TILE_ELEMENTS} elements; {REBUILD}")
    exponents[positions] = values
    return exponents
