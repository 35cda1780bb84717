"""The CPU codec in use: segments in and out, checked.

Compiled code (``splitzip_aio.codec.fast``) where numba can be imported, else the reference in plain numpy, which
is some fifty times slower; both give the same bytes.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec import reference
from splitzip_aio.codec.checksum import checksum
from splitzip_aio.codec.formats import ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError

__all__ = [
    "coding_memory",
    "decode_segment",
    "encode_segment",
    "encoding_room",
    "histogram",
    "implementation",
    "verify_segment",
]

Bytes = NDArray[np.uint8]
_log = logging.getLogger(__name__)
_LARGE, _HUGE_PAGE = 1 << 20, 2 << 20
_ASKED_FOR = 4 << 20  # from this size on, numpy asks the system for huge pages


class _Codec(Protocol):
    """What the codecs have in common; ``decode_segment`` returns the checksum of what it decoded."""

    def histogram(self, data: Bytes, fmt: ElementFormat) -> NDArray[np.int64]: ...

    def encoding_room(self, data_bytes: int, fmt: ElementFormat, schedule: Schedule) -> int: ...

    def encode_segment(
        self, data: Bytes, fmt: ElementFormat, schedule: Schedule, codebooks: tuple[bytes, ...], *, out: Bytes
    ) -> Bytes: ...

    def decode_segment(self, header: SegmentHeader, segment: Bytes, out: Bytes, *, where: str) -> int: ...

    def __str__(self) -> str: ...


class _Reference:
    """The reference behind the surface of the fast codec."""

    def histogram(self, data: Bytes, fmt: ElementFormat) -> NDArray[np.int64]:
        return reference.histogram(data, fmt)

    def encoding_room(self, data_bytes: int, fmt: ElementFormat, schedule: Schedule) -> int:
        elements = data_bytes // fmt.element_bytes
        return schedule.layout(fmt, elements, schedule.tail_bounds(elements, elements)[1]).segment_bytes

    def encode_segment(
        self, data: Bytes, fmt: ElementFormat, schedule: Schedule, codebooks: tuple[bytes, ...], *, out: Bytes
    ) -> Bytes:
        segment = reference.encode_segment(data, fmt, schedule, codebooks)
        out[: segment.size] = segment
        return out[: segment.size]

    def decode_segment(self, header: SegmentHeader, segment: Bytes, out: Bytes, *, where: str) -> int:
        reference.decode_segment(header, segment, out, where=where)
        return checksum(out)

    def __str__(self) -> str:
        return "numpy reference"


@cache
def _codec() -> _Codec:
    """The codec in use: numba is imported when first something is coded, and compiles then unless it has before."""
    reason = f"byte order {sys.byteorder}" if sys.byteorder != "little" else ""
    if not reason:
        try:
            from splitzip_aio.codec.fast import FastCodec
            from splitzip_aio.codec.simd import has_bit_scatter

            return FastCodec(portable=not has_bit_scatter())
        except ImportError as exc:
            reason = str(exc)
    _log.warning("the CPU codec runs without compiled code, about fifty times slower: %s", reason)
    return _Reference()


def implementation() -> str:
    """What codes on the CPU here, in words: ``numba, BMI2``, ``numba, portable`` or ``numpy reference``."""
    return str(_codec())


def histogram(data: Bytes, fmt: ElementFormat) -> NDArray[np.int64]:
    """(256,) counts of the exponents of (n * element_bytes,) bytes; for ``RAW`` the count of its bytes is under 0."""
    return _codec().histogram(data, fmt)


def encoding_room(data_bytes: int, fmt: ElementFormat, schedule: Schedule) -> int:
    """Bytes of memory that encoding any ``data_bytes`` bytes of elements takes; only what is used is touched."""
    return _codec().encoding_room(data_bytes, fmt, schedule)


def coding_memory(nbytes: int) -> Bytes:
    """(nbytes,) uint8 to encode from and into, for use again and again.

    From 1 MiB on it starts on a page of 2 MiB, where the system has such pages: encoding then waits less for addresses
    to be translated.
    """
    if nbytes < _LARGE:
        return np.empty(nbytes, np.uint8)
    whole = np.empty(max(nbytes + _HUGE_PAGE, _ASKED_FOR), np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + nbytes]


def encode_segment(
    data: Bytes,
    fmt: ElementFormat,
    schedule: Schedule,
    codebooks: tuple[bytes, ...],
    *,
    out: Bytes | None = None,
) -> Bytes:
    """Encode (elements * element_bytes,) bytes into one segment, (segment_bytes,).

    ``codebooks`` are the tensor's, from ``Schedule.codebooks``; empty for ``STORED``. The segment is the start of
    ``out``, contiguous uint8 of ``encoding_room`` bytes or more, by default new. Who encodes many is twice as fast with
    memory that has been used before: the system takes as long to provide new pages as encoding does to fill them.

    Raises:
        InvalidArgumentError: ``out`` is too small or not contiguous.
    """
    room = encoding_room(data.size, fmt, schedule)
    if out is None:
        out = np.empty(room, np.uint8)
    elif out.size < room or not out.flags.c_contiguous:
        raise InvalidArgumentError(
            f"out: {out.size} bytes with strides {out.strides}, expected {room} contiguous bytes (encoding_room)"
        )
    return _codec().encode_segment(data, fmt, schedule, codebooks, out=out)


def decode_segment(segment: Bytes | memoryview | bytes, out: Bytes, *, where: str) -> SegmentHeader:
    """Decode one segment, which may be followed by other bytes, into ``out``; return its header.

    ``out`` is contiguous (decoded_bytes,) uint8. ``where`` names the segment in errors. Segments are independent and
    the work is done without the GIL: to use several cores, call this from several threads.

    Raises:
        CorruptDataError: anything about the segment is wrong, or ``out`` is of another size. What ``out`` holds then is
            undefined.
        InvalidArgumentError: ``out`` is not contiguous.
    """
    view = np.frombuffer(segment, np.uint8)
    header = parse_header(view.data, where=where)
    if not out.flags.c_contiguous:
        raise InvalidArgumentError(f"{where}: the output has strides {out.strides}, expected contiguous bytes")
    if out.size != header.decoded_bytes:
        raise CorruptDataError(
            f"{where}: segment decodes to {header.decoded_bytes} bytes, expected {out.size}; rebuild the cache"
        )
    found = _codec().decode_segment(header, view, out, where=where)
    if found != header.checksum:
        raise CorruptDataError(
            f"{where}: decoded bytes have checksum {found:016x}, expected {header.checksum:016x}; rebuild the cache"
        )
    return header


def verify_segment(segment: Bytes | memoryview | bytes, *, where: str) -> SegmentHeader:
    """Check every byte of one segment, padding included, by digest and by decoding it into scratch memory.

    Raises:
        CorruptDataError: a byte is wrong.
    """
    view = np.frombuffer(segment, np.uint8)
    header = parse_header(view.data, where=where)
    if xxhash.xxh3_64_intdigest(view[HEADER_BYTES : header.segment_bytes].data) != header.digest:
        raise CorruptDataError(f"{where}: encoded bytes fail their digest {header.digest:016x}; rebuild the cache")
    return decode_segment(view, np.empty(header.decoded_bytes, np.uint8), where=where)
