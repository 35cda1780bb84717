"""From packs to tensors on the CPU, with every byte checked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.cache.content import ContentHasher
from splitzip_aio.cache.entry import Entry, SegmentExtent
from splitzip_aio.cache.pack_files import PackFiles
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import element_format
from splitzip_aio.codec.layout import HEADER_BYTES
from splitzip_aio.codec.payload import SegmentHeader
from splitzip_aio.errors import CorruptDataError

__all__ = ["decode", "read_encoded", "verify_entry"]

Bytes = NDArray[np.uint8]


def read_encoded(files: PackFiles, entry: Entry) -> bytearray:
    """The encoded bytes of a tensor. Raises CorruptDataError, naming tensor and pack, if they are not all there."""
    where = repr(entry.name)
    if not entry.segments:
        return bytearray()
    files.check(entry.pack, entry.offset + entry.encoded_bytes, where=where)  # before the memory is allocated
    data = bytearray(entry.encoded_bytes)
    files.read_into(entry.pack, entry.offset, memoryview(data), where=where)
    return data


def decode(files: PackFiles, entry: Entry) -> Bytes:
    """The decoded bytes of a tensor, (nbytes,) uint8, read one segment at a time.

    Raises:
        CorruptDataError: a segment is missing, damaged or not the one that the manifest means.
    """
    if entry.segments:
        files.check(entry.pack, entry.offset + entry.encoded_bytes, where=repr(entry.name))
    out = np.empty(entry.nbytes, np.uint8)
    for extent, segment, where in _segments(files, entry):
        _decode(entry, segment, out[extent.start : extent.stop], where)
    return out


def verify_entry(files: PackFiles, entry: Entry) -> Iterator[int]:
    """Check every byte of a tensor and that it decodes to what was put in; yields decoded bytes, segment by segment.

    Raises:
        CorruptDataError: something is wrong.
    """
    hasher = ContentHasher(entry.dtype, entry.shape)
    scratch = np.empty(0, np.uint8)
    for extent, segment, where in _segments(files, entry):
        size = extent.stop - extent.start
        scratch = scratch if scratch.size >= size else np.empty(size, np.uint8)
        header = _decode(entry, segment, scratch[:size], where)
        if xxhash.xxh3_64_intdigest(segment[HEADER_BYTES:].data) != header.digest:
            raise CorruptDataError(f"{where}: encoded bytes fail their digest; rebuild the cache")
        hasher.update(scratch[:size])
        yield size
    if hasher.hexdigest() != entry.key:
        raise CorruptDataError(f"{entry.name!r}: is whole, but not what was put in: its content key differs; rebuild")


def _segments(files: PackFiles, entry: Entry) -> Iterator[tuple[SegmentExtent, Bytes, str]]:
    """Each segment with its place, and with words that name it in errors; valid until the next."""
    if not entry.segments:
        return
    path = files.path(entry.pack)
    files.check(entry.pack, entry.offset + entry.encoded_bytes, where=repr(entry.name))
    scratch = np.empty(max(entry.segments), np.uint8)
    for place, extent in enumerate(entry.extents()):
        where = f"{entry.name!r}, segment {place}: {path} at {extent.offset}"
        segment = scratch[: extent.nbytes]
        files.read_into(extent.pack, extent.offset, segment.data, where=repr(entry.name))
        yield extent, segment, where


def _decode(entry: Entry, segment: Bytes, out: Bytes, where: str) -> SegmentHeader:
    header = cpu.decode_segment(segment, out, where=where)
    found = (header.fmt, str(header.schedule), header.segment_bytes)
    expected = (element_format(entry.dtype), entry.schedule, segment.size)
    if found != expected:
        raise CorruptDataError(
            f"{where}: expected {expected[2]} bytes of {expected[0].name} by {expected[1]}, found {found[2]} bytes of "
            f"{found[0].name} by {found[1]}; rebuild the cache"
        )
    return header
