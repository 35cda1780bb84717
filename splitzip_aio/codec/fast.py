"""The CPU codec compiled by numba: the bytes of the reference, at the speed of memory.

A segment is the unit of work: kernels run without the GIL and share nothing, so segments are coded in parallel by
calling from several threads. One segment of 2 MiB takes about a millisecond, too little to divide further.

The kernels compile when they are first called and are then kept on disk. They take their arrays as contiguous uint8;
inputs are passed as read-only, so that each kernel is compiled once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec import fast_encode, reference, simd
from splitzip_aio.codec.checksum import GROUP, GROUP_BYTES
from splitzip_aio.codec.fast_decode import DecodePlan, decode_tiers, decode_top16
from splitzip_aio.codec.fast_encode import EncodePlan, count_exponents, count_frequent, encode_tiers, encode_top16
from splitzip_aio.codec.formats import RAW, ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, TILE_ELEMENTS, Layout
from splitzip_aio.codec.payload import SegmentHeader
from splitzip_aio.codec.schedule import MAX_DEPTH, Method, Schedule
from splitzip_aio.errors import CorruptDataError

__all__ = ["FastCodec"]

Bytes = NDArray[np.uint8]
_BOOK_BYTES = 64  # the entries of four codebooks, at most 15 each
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class FastCodec:
    """Histogram, encoding and decoding of segments; ``portable`` codes one element at a time, on any machine."""

    portable: bool

    def histogram(self, data: Bytes, fmt: ElementFormat) -> NDArray[np.int64]:
        """(256,) counts of the exponents of (n * element_bytes,) bytes; of ``RAW`` all bytes count as 0."""
        if fmt == RAW:
            return reference.histogram(data, fmt)
        source, elements = _read_only(data), data.size // fmt.element_bytes
        counts = np.zeros((4, 256), np.int64)
        sample = min(elements, TILE_ELEMENTS) if fmt.element_bytes == 2 else elements
        count_exponents(source, 0, sample, fmt.element_bytes, fmt.exponent_bits, fmt.mantissa_bits, counts)
        if sample < elements:
            frequent = np.argsort(-counts.sum(axis=0))[:16]
            count_frequent(source, sample, fmt.exponent_bits, fmt.mantissa_bits, frequent, counts)
        total: NDArray[np.int64] = counts.sum(axis=0)
        return total

    def encode_segment(
        self, data: Bytes, fmt: ElementFormat, schedule: Schedule, codebooks: tuple[bytes, ...]
    ) -> Bytes:
        """What :func:`reference.encode_segment` returns, byte for byte."""
        source, elements = _read_only(data), data.size // fmt.element_bytes
        longest = elements * (sum(schedule.widths[1:]) + schedule.escape_bits)
        places = schedule.layout(fmt, elements, longest)
        segment = np.empty(places.segment_bytes + fast_encode.SLACK, np.uint8)
        plan = _encode_plan(fmt, places, elements, schedule)
        escapes, tail_bits = 0, 0
        if schedule.method is Method.STORED:
            segment[places.low : places.low + data.size] = data
            words = simd.sum_all_words(source)
        elif schedule.method is Method.TOP16:
            lookup, escaped = _lookup(schedule, codebooks), np.empty(elements, np.uint8)
            escapes, words = encode_top16(
                source, segment, plan, lookup.selectors, lookup.windows, lookup.firsts, escaped, self._mode
            )
            tail_bits = escapes * schedule.escape_bits
            segment[places.tail + 2 * escapes : places.tail + 3 * escapes] = escaped[:escapes]
        else:
            lookup = _lookup(schedule, codebooks)
            escapes, tail_bits, words = encode_tiers(
                source,
                segment,
                plan,
                _widths(schedule),
                lookup.selectors,
                lookup.windows,
                lookup.firsts,
                lookup.tables,
                self._mode,
            )
        return _sealed(segment, data.size, int(words), fmt, schedule, codebooks, escapes, tail_bits)

    def decode_segment(self, header: SegmentHeader, segment: Bytes, out: Bytes, *, where: str) -> int:
        """Decode (segment_bytes,) with a parsed header into ``out``, contiguous (decoded_bytes,); return its checksum.

        Raises:
            CorruptDataError: an index or a count contradicts the data; nothing outside the segment is read.
        """
        places, schedule = header.layout, header.schedule
        if schedule.method is Method.STORED:
            out[:] = segment[places.low : places.low + out.size]
            return _checksum(int(simd.sum_all_words(_read_only(out))), out.size)
        source, book = _read_only(segment), _book(header.codebooks)
        plan = _decode_plan(header, places)
        if schedule.method is Method.TOP16:
            whole, words = decode_top16(source, out, plan, book, self._mode)
        else:
            whole, words = decode_tiers(source, out, plan, _widths(schedule), book, self._mode)
        if not whole:
            reference.decode_segment(header, segment, out, where=where)  # knows the words for it
            raise CorruptDataError(f"{where}: counts contradict each other; rebuild the cache")
        return _checksum(int(words), out.size)

    def __str__(self) -> str:
        return "numba, portable" if self.portable else "numba, BMI2"

    @property
    def _mode(self) -> bool | None:
        """How kernels are told: they leave the machine's own instructions out of the code unless this is None."""
        return True if self.portable else None


def _read_only(array: Bytes) -> Bytes:
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _checksum(words: int, size: int) -> int:
    """The checksum of ``size`` bytes from their sum of word times key."""
    return (words + -(-size // GROUP_BYTES) * GROUP) % 2**64


@lru_cache(maxsize=64)
def _widths(schedule: Schedule) -> NDArray[np.int64]:
    return np.array((*schedule.widths, 8, *[0] * (MAX_DEPTH - len(schedule.widths))), np.int64)


@lru_cache(maxsize=64)
def _book(codebooks: tuple[bytes, ...]) -> Bytes:
    return np.frombuffer(b"".join(codebooks).ljust(_BOOK_BYTES, b"\0"), np.uint8)


def _decode_plan(header: SegmentHeader, places: Layout[int]) -> DecodePlan:
    fmt = header.fmt
    return DecodePlan(
        places.low,
        places.high,
        places.codes,
        places.index,
        places.tail,
        header.tail_bits,
        header.elements,
        header.escapes,
        len(header.schedule.widths),
        sum(header.schedule.codebook_sizes),
        fmt.element_bytes,
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.low_bits,
        fmt.high_bits,
    )


def _encode_plan(fmt: ElementFormat, places: Layout[int], elements: int, schedule: Schedule) -> EncodePlan:
    return EncodePlan(
        places.low,
        places.high,
        places.codes,
        places.index,
        places.tail,
        elements,
        len(schedule.widths),
        sum(schedule.codebook_sizes),
        fmt.element_bytes,
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.low_bits,
        fmt.high_bits,
    )


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What exponents and selectors are looked up in: see :func:`~splitzip_aio.codec.fast_encode.encode_tiers`."""

    selectors: Bytes
    windows: Bytes
    firsts: Bytes
    tables: Bytes


@lru_cache(maxsize=64)
def _lookup(schedule: Schedule, codebooks: tuple[bytes, ...]) -> _Lookup:
    listed = b"".join(codebooks)
    selectors = np.full(256, len(listed), np.uint8)
    for selector in reversed(range(len(listed))):  # of equal entries the first counts
        selectors[listed[selector]] = selector
    firsts: list[int] = []
    for exponent in np.flatnonzero(selectors != len(listed)).tolist():
        if not firsts or exponent >= firsts[-1] + _WINDOW:
            firsts.append(exponent)
    relative = np.concatenate((selectors ^ np.uint8(len(listed)), np.zeros(_WINDOW, np.uint8)))
    windows = np.concatenate([relative[first : first + _WINDOW] for first in firsts])
    return _Lookup(selectors, windows, np.array(firsts, np.uint8), _tier_tables(schedule.widths))


def _tier_tables(widths: tuple[int, ...]) -> Bytes:
    """Code and mask of the selectors 0..15 in each tier, one row each; row 1, a mask nobody needs, marks escapes."""
    tables, base, selectors = np.zeros((2 * MAX_DEPTH, 16), np.uint8), 0, np.arange(16)
    for tier, width in enumerate(widths):
        sentinel = (1 << width) - 1
        tables[2 * tier] = np.clip(selectors - base, 0, sentinel)
        tables[2 * tier + 1] = np.where(selectors >= base, sentinel, 0)
        base += sentinel
    tables[1] = selectors == base
    return tables.ravel()


def _sealed(
    segment: Bytes,
    data_bytes: int,
    words: int,
    fmt: ElementFormat,
    schedule: Schedule,
    codebooks: tuple[bytes, ...],
    escapes: int,
    tail_bits: int,
) -> Bytes:
    """Cut a segment to its length, with zeros for padding and its header."""
    elements, coded = data_bytes // fmt.element_bytes, schedule.method is not Method.STORED
    places = schedule.layout(fmt, elements, tail_bits)
    entries = -(-elements // schedule.tile_elements) + 1 if coded else 0
    code_bits = (schedule.widths or (4,))[0] if coded else 0
    low_bits = fmt.low_bits if coded else 8 * fmt.element_bytes
    ends = (
        (places.low + (elements * low_bits + 7) // 8, places.high),
        (places.high + (elements * fmt.high_bits + 7) // 8, places.codes),
        (places.codes + (elements * code_bits + 7) // 8, places.index),
        (places.index + 4 * entries, places.tail),
        (places.tail + (tail_bits + 7) // 8, places.segment_bytes),
    )
    for end, start in ends:
        segment[end:start] = 0
    segment = segment[: places.segment_bytes]
    digest = xxhash.xxh3_64_intdigest(segment[HEADER_BYTES:].data)
    checksum = _checksum(words, data_bytes)
    header = SegmentHeader(fmt, schedule, elements, escapes, tail_bits, checksum, digest, codebooks if coded else ())
    segment[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return segment
