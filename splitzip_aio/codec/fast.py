"""The CPU codec compiled by numba: the bytes of the reference, at the speed of memory.

A segment is the unit of work: kernels run without the GIL and share nothing, so segments are coded in parallel by
calling from several threads. One segment of 2 MiB takes about a millisecond, too little to divide further.

The kernels compile when they are first called and are then kept on disk. They take their arrays as contiguous uint8;
inputs are passed as read-only, so that each kernel is compiled once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec import fast_decode, fast_encode, reference, simd
from splitzip_aio.codec.checksum import GROUP, GROUP_BYTES
from splitzip_aio.codec.fast_count import PAIRS, count_exponents
from splitzip_aio.codec.fast_decode import DecodePlan, decode_tiers, decode_top16
from splitzip_aio.codec.fast_encode import SLACK, EncodePlan, encode_tiers, encode_top16
from splitzip_aio.codec.formats import BF16, RAW, ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, Layout
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
    _of_thread: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    def histogram(self, data: Bytes, fmt: ElementFormat) -> NDArray[np.int64]:
        """(256,) counts of the exponents of (n * element_bytes,) bytes; of ``RAW`` all bytes count as 0."""
        if fmt == RAW:
            return reference.histogram(data, fmt)
        pairs, totals = self._pairs(), np.zeros(256, np.int64)
        mode = None if fmt == BF16 and not self.portable else True
        layout = (fmt.element_bytes, fmt.exponent_bits, fmt.mantissa_bits)
        count_exponents(_read_only(data), *layout, pairs, totals, mode)
        if data.size // fmt.element_bytes % 2:
            totals += reference.histogram(data[-fmt.element_bytes :], fmt)
        return totals

    def encoding_room(self, data_bytes: int, fmt: ElementFormat, schedule: Schedule) -> int:
        """Bytes of memory that a segment of any ``data_bytes`` may need while it is encoded."""
        return _longest(fmt, schedule, data_bytes // fmt.element_bytes).segment_bytes + SLACK

    def encode_segment(
        self, data: Bytes, fmt: ElementFormat, schedule: Schedule, codebooks: tuple[bytes, ...], *, out: Bytes
    ) -> Bytes:
        """What ``reference.encode_segment`` returns, byte for byte: the start of ``out``, (encoding_room,)."""
        source, elements, segment = _read_only(data), data.size // fmt.element_bytes, out
        if schedule.method is Method.STORED:
            segment[HEADER_BYTES : HEADER_BYTES + data.size] = data
            places = _longest(fmt, schedule, elements)
            segment[HEADER_BYTES + data.size : places.segment_bytes] = 0
            return _sealed(segment, data.size, simd.sum_all_words(source), fmt, schedule, (), 0, 0)
        plan, lookup, scratch = *_encoding(fmt, schedule, elements, codebooks), self._scratch()
        mode = self._mode(schedule)
        if schedule.method is Method.TOP16:
            escaped = segment[plan.tail + 2 * elements :]
            escapes, words = encode_top16(source, segment, scratch, lookup.selectors, escaped, plan, mode)
            tail_bits = escapes * schedule.escape_bits
        else:
            escapes, tail_bits, words = encode_tiers(
                source, segment, scratch, lookup.selectors, lookup.tables, plan, mode
            )
        return _sealed(segment, data.size, words, fmt, schedule, codebooks, escapes, tail_bits)

    def decode_segment(self, header: SegmentHeader, segment: Bytes, out: Bytes, *, where: str) -> int:
        """Decode (segment_bytes,) with a parsed header into ``out``, contiguous (decoded_bytes,); return its checksum.

        Raises:
            CorruptDataError: an index or a count contradicts the data; nothing outside the segment is read.
        """
        places, schedule = header.layout, header.schedule
        if schedule.method is Method.STORED:
            out[:] = segment[places.low : places.low + out.size]
            return _checksum(simd.sum_all_words(_read_only(out)), out.size)
        decode = decode_top16 if schedule.method is Method.TOP16 else decode_tiers
        scratch, book = np.empty(fast_decode.SCRATCH_BYTES, np.uint8), _book(header.codebooks)
        whole, words = decode(
            _read_only(segment), out, scratch, book, _decode_plan(header, places), self._mode(schedule)
        )
        if not whole:
            reference.decode_segment(header, segment, out, where=where)  # knows the words for it
            raise CorruptDataError(f"{where}: counts contradict each other; rebuild the cache")
        return _checksum(words, out.size)

    def _pairs(self) -> NDArray[np.uint32]:
        """What ``count_exponents`` counts in and leaves zeroed; memory from the system would be slower to get."""
        try:
            pairs: NDArray[np.uint32] = self._of_thread.pairs
        except AttributeError:
            pairs = self._of_thread.pairs = np.zeros(PAIRS, np.uint32)
        return pairs

    def _scratch(self) -> Bytes:
        """Memory for encoding, which stays in a cache from one segment to the next."""
        try:
            scratch: Bytes = self._of_thread.scratch
        except AttributeError:
            scratch = self._of_thread.scratch = np.empty(fast_encode.SCRATCH_BYTES, np.uint8)
        return scratch

    def __str__(self) -> str:
        return "numba, portable" if self.portable else "numba, BMI2"

    def _mode(self, schedule: Schedule) -> bool | None:
        """How kernels are told which code to take, by type: None for the machine's own instructions."""
        selectors = sum(schedule.codebook_sizes) + (schedule.method is Method.TIERS)
        return True if self.portable or selectors > 16 else None


@lru_cache(maxsize=64)
def _longest(fmt: ElementFormat, schedule: Schedule, elements: int) -> Layout[int]:
    """The layout if every element is an escape that reaches every tier."""
    return schedule.layout(fmt, elements, elements * (sum(schedule.widths[1:]) + schedule.escape_bits))


def _read_only(array: Bytes) -> Bytes:
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _checksum(words: int, size: int) -> int:
    """The checksum of ``size`` bytes from their sum of word times key."""
    return (int(words) + -(-size // GROUP_BYTES) * GROUP) % 2**64


@lru_cache(maxsize=64)
def _book(codebooks: tuple[bytes, ...]) -> Bytes:
    return np.frombuffer(b"".join(codebooks).ljust(_BOOK_BYTES, b"\0"), np.uint8)


def _decode_plan(header: SegmentHeader, places: Layout[int]) -> DecodePlan:
    return DecodePlan(
        places.low,
        places.high,
        places.codes,
        places.index,
        places.tail,
        header.tail_bits,
        header.elements,
        header.escapes,
        *_tiers(header.schedule),
        *_element(header.fmt),
    )


@lru_cache(maxsize=64)
def _tiers(schedule: Schedule) -> tuple[int, ...]:
    """Depth, entries and five widths, as the plans have them."""
    unused = (0,) * (MAX_DEPTH - len(schedule.widths))
    return (len(schedule.widths), sum(schedule.codebook_sizes), *schedule.widths, 8, *unused)


@lru_cache(maxsize=64)
def _element(fmt: ElementFormat) -> tuple[int, ...]:
    """Layout of an element, as the plans have it."""
    return (fmt.element_bytes, fmt.exponent_bits, fmt.mantissa_bits, fmt.low_bits, fmt.high_bits)


@lru_cache(maxsize=64)
def _encoding(
    fmt: ElementFormat, schedule: Schedule, elements: int, codebooks: tuple[bytes, ...]
) -> tuple[EncodePlan, _Lookup]:
    """What the kernels need to know, the same for all segments of a tensor but its last."""
    places, lookup = _longest(fmt, schedule, elements), _lookup(schedule, codebooks)
    plan = EncodePlan(
        places.low,
        places.high,
        places.codes,
        places.index,
        places.tail,
        elements,
        lookup.windows,
        *_tiers(schedule),
        *_element(fmt),
    )
    return plan, lookup


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What exponents and selectors are looked up in: see ``splitzip_aio.codec.fast_encode.encode_tiers``."""

    selectors: Bytes
    tables: Bytes
    windows: int


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
    windows = np.zeros((16, _WINDOW), np.uint8)
    for window, first in enumerate(firsts):
        entries = selectors[first : first + _WINDOW]
        windows[window, : entries.size] = entries ^ np.uint8(len(listed))
    packed = np.concatenate((selectors, np.resize(np.array(firsts, np.uint8), 16), windows.ravel()))
    return _Lookup(packed, _tier_tables(schedule.widths), len(firsts))


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
    """Cut a segment to its length and write its header."""
    elements, coded = data_bytes // fmt.element_bytes, schedule.method is not Method.STORED
    segment = segment[: schedule.layout(fmt, elements, tail_bits).segment_bytes]
    digest = xxhash.xxh3_64_intdigest(segment[HEADER_BYTES:].data)
    checksum = _checksum(words, data_bytes)
    header = SegmentHeader(fmt, schedule, elements, escapes, tail_bits, checksum, digest, codebooks if coded else ())
    segment[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return segment
