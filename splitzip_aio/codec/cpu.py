"""The CPU codec in use: segments in and out, checked."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec import reference
from splitzip_aio.codec.checksum import checksum
from splitzip_aio.codec.layout import HEADER_BYTES
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.errors import CorruptDataError

__all__ = ["decode_segment", "encode_segment", "histogram", "verify_segment"]

Bytes = NDArray[np.uint8]

histogram = reference.histogram
encode_segment = reference.encode_segment


def decode_segment(segment: Bytes | memoryview | bytes, out: Bytes, *, where: str) -> SegmentHeader:
    """Decode one segment, which may be followed by other bytes, into ``out``, (decoded_bytes,) uint8; return its header.

    ``where`` names the segment in errors.

    Raises:
        CorruptDataError: anything about the segment is wrong, or ``out`` is of another size. What ``out`` holds then is
            undefined.
    """
    view = np.frombuffer(segment, np.uint8)
    header = parse_header(view.data, where=where)
    if out.size != header.decoded_bytes:
        raise CorruptDataError(
            f"{where}: segment decodes to {header.decoded_bytes} bytes, expected {out.size}; rebuild the cache"
        )
    reference.decode_segment(header, view[: header.segment_bytes], out, where=where)
    found = checksum(out)
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
        raise CorruptDataError(
            f"{where}: encoded bytes fail their digest {header.digest:016x}; rebuild the cache"
        )
    return decode_segment(view, np.empty(header.decoded_bytes, np.uint8), where=where)
