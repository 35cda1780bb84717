"""Damage to segments: by accident, and by someone who then makes the checksums of the bytes agree."""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, TILE_ELEMENTS
from splitzip_aio.codec.payload import SegmentHeader
from splitzip_aio.codec.schedule import Schedule
from tests.codec.data import Bytes

DIGEST_OFFSET = 64
CHECKED_BYTES = 152


def encode(data: Bytes, fmt: ElementFormat, schedule: Schedule) -> Bytes:
    """One segment with its own codebook."""
    return cpu.encode_segment(data, fmt, schedule, schedule.codebooks(cpu.histogram(data, fmt), fmt))


def seal(segment: Bytes) -> Bytes:
    """Make a segment's digest and header checksum agree with its bytes, in place."""
    digest = xxhash.xxh3_64_intdigest(segment[HEADER_BYTES:].tobytes())
    struct.pack_into("<Q", segment, DIGEST_OFFSET, digest)
    return seal_header(segment)


def seal_header(segment: Bytes) -> Bytes:
    """Make a segment's header checksum agree with its header, in place."""
    struct.pack_into("<Q", segment, CHECKED_BYTES, xxhash.xxh64_intdigest(segment[:CHECKED_BYTES].tobytes()))
    return segment


def parts(header: SegmentHeader) -> dict[str, tuple[int, int]]:
    """Start and stop of each part of a segment that has bytes, with all padding as a part of its own kind."""
    places, fmt, count = header.layout, header.fmt, header.elements
    entries = -(-count // TILE_ELEMENTS) + 1
    coded = header.codebooks != ()
    sizes = {
        "header": (0, HEADER_BYTES),
        "low": (places.low, (count * fmt.low_bits + 7) // 8 if coded else header.decoded_bytes),
        "high": (places.high, (count * fmt.high_bits + 7) // 8 if coded else 0),
        "codes": (places.codes, (count * (header.schedule.widths or (4,))[0] + 7) // 8 if coded else 0),
        "index": (places.index, 4 * entries if coded else 0),
        "tail": (places.tail, (header.tail_bits + 7) // 8),
    }
    found = {name: (start, start + size) for name, (start, size) in sizes.items() if size}
    stops = [stop for _, stop in found.values()]
    starts = [*(start for start, _ in found.values()), header.segment_bytes][1:]
    for number, (stop, start) in enumerate(zip(stops, starts, strict=True)):
        if start > stop:
            found[f"padding {number}"] = (stop, start)
    return found


def flip(segment: Bytes, place: int, rng: np.random.Generator) -> Bytes:
    """A copy with another value in one byte."""
    damaged = segment.copy()
    damaged[place] ^= rng.integers(1, 256, dtype=np.uint8)
    return damaged
