"""The segment header: what it says, and that nothing false in it is believed."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16, F16, RAW, ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, MAX_SEGMENT_ELEMENTS, SEGMENT_ALIGN, TILE_ELEMENTS
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.codec.schedule import STORED, Schedule
from splitzip_aio.errors import CorruptDataError
from tests.codec.data import FORMATS, Bytes, bursts, cases, random_bits, weights
from tests.codec.hostile import encode, seal_header

WHERE = "packs/00003.szp at 4096, tensor 'blocks.0.weight'"


@dataclass(frozen=True)
class Field:
    """A header field by its place, as docs/format.md has it."""

    offset: int
    code: str

    def set(self, segment: Bytes, value: int) -> Bytes:
        """A copy with another value in this field, and a header checksum that agrees with it."""
        changed = segment.copy()
        struct.pack_into("<" + self.code, changed, self.offset, value)
        return seal_header(changed)

    def get(self, segment: Bytes) -> int:
        return int(struct.unpack_from("<" + self.code, segment, self.offset)[0])

    @property
    def largest(self) -> int:
        return int(256 ** struct.calcsize(self.code) - 1)


FIELDS = {
    "version": Field(4, "H"),
    "format": Field(6, "B"),
    "method": Field(7, "B"),
    "width 0": Field(8, "B"),
    "width 1": Field(9, "B"),
    "width 2": Field(10, "B"),
    "width 3": Field(11, "B"),
    "elements": Field(12, "I"),
    "decoded bytes": Field(16, "I"),
    "segment bytes": Field(20, "I"),
    "low": Field(24, "I"),
    "high": Field(28, "I"),
    "codes": Field(32, "I"),
    "index": Field(36, "I"),
    "tail": Field(40, "I"),
    "escapes": Field(44, "I"),
    "tail bits": Field(48, "Q"),
    "tile": Field(136, "B"),
}


def decode(segment: Bytes) -> bytes:
    out = np.full(parse_header(segment.data, where=WHERE).decoded_bytes, 0xA5, np.uint8)
    cpu.decode_segment(segment, out, where=WHERE)
    return out.tobytes()


@pytest.fixture(scope="module")
def segment() -> Bytes:
    """(2, 2, 3) with escapes, three tiles long."""
    return encode(bursts(BF16, 2 * TILE_ELEMENTS + 11, np.random.default_rng(1)), BF16, Schedule.parse("2,2,3"))


@given(cases())
def test_a_header_says_what_the_segment_is(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    encoded = encode(data, fmt, schedule)
    header = parse_header(encoded.data, where=WHERE)
    assert (header.fmt, header.schedule) == (fmt, schedule)
    assert header.decoded_bytes == data.size == header.elements * fmt.element_bytes
    assert header.segment_bytes == encoded.size
    assert encoded.size % SEGMENT_ALIGN == 0
    assert header.codebooks == schedule.codebooks(cpu.histogram(data, fmt), fmt)
    assert header.digest == xxhash.xxh3_64_intdigest(encoded[HEADER_BYTES:].tobytes())
    assert header.pack() == encoded[:HEADER_BYTES].tobytes()


@given(cases(), st.binary(max_size=50))
def test_what_follows_a_segment_does_not_matter(case: tuple[ElementFormat, Schedule, Bytes], more: bytes) -> None:
    fmt, schedule, data = case
    encoded = encode(data, fmt, schedule).tobytes()
    assert parse_header(encoded + more, where=WHERE) == parse_header(encoded, where=WHERE)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_any_buffer_will_do(segment: Bytes, buffer: type) -> None:
    assert parse_header(buffer(segment.tobytes()), where=WHERE).segment_bytes == segment.size


def test_every_flipped_bit_of_a_header_is_seen_and_placed(segment: Bytes) -> None:
    for bit in range(8 * HEADER_BYTES):
        damaged = segment.copy()
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptDataError, match=re.escape(WHERE)):
            parse_header(damaged.data, where=WHERE)


def test_every_truncation_is_seen_and_placed(segment: Bytes) -> None:
    for size in [*range(HEADER_BYTES + 1), *range(HEADER_BYTES + 1, segment.size, 97), segment.size - 1]:
        with pytest.raises(CorruptDataError, match=re.escape(WHERE)):
            parse_header(segment[:size].data, where=WHERE)


def false_values(field: Field, segment: Bytes) -> list[int]:
    right = field.get(segment)
    near = {0, 1, 2, 3, 4, 5, right - 1, right + 1, right ^ 0x80, right * 2, field.largest, field.largest >> 1}
    return sorted({value & field.largest for value in near} - {right})


@pytest.mark.parametrize("schedule", ["2,2,3", "top16", "stored"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_false_field_under_a_right_checksum_is_refused(name: str, schedule: str) -> None:
    data = bursts(BF16, TILE_ELEMENTS + 11, np.random.default_rng(1))
    segment = encode(data, BF16, Schedule.parse(schedule))
    values = false_values(FIELDS[name], segment)
    if (name, schedule) == ("format", "stored"):
        values.remove(F16.code)  # of the same size: as bytes it is the same segment
    for value in values:
        with pytest.raises(CorruptDataError, match=re.escape(WHERE)):
            decode(FIELDS[name].set(segment, value))


@pytest.mark.parametrize("place", [137, 144, 151], ids="reserved {}".format)
def test_reserved_bytes_must_be_zero(segment: Bytes, place: int) -> None:
    """A later version may give them a meaning that this reader would miss."""
    with pytest.raises(CorruptDataError, match=re.escape(WHERE)):
        parse_header(Field(place, "B").set(segment, 1).data, where=WHERE)


@pytest.mark.parametrize("place", [75, 91, 111, 135])
def test_unused_codebook_bytes_must_be_zero(segment: Bytes, place: int) -> None:
    """(2, 2, 3) uses 3, 3, 7 and 0 of the 16 bytes of each tier."""
    with pytest.raises(CorruptDataError, match=re.escape(WHERE)):
        parse_header(Field(place, "B").set(segment, 1).data, where=WHERE)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_more_elements_than_the_format_allows_are_refused(fmt: ElementFormat) -> None:
    limit = MAX_SEGMENT_ELEMENTS * (4 if fmt == RAW else 1)
    for elements in (0, limit + 1):
        header = SegmentHeader(fmt, STORED, elements, 0, 0, 0, 0, ())
        with pytest.raises(CorruptDataError, match=f"{elements} elements in a segment"):
            parse_header(header.pack() + bytes(header.segment_bytes - HEADER_BYTES), where=WHERE)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_largest_segment_is_read(fmt: ElementFormat) -> None:
    limit = MAX_SEGMENT_ELEMENTS * (4 if fmt == RAW else 1)
    header = SegmentHeader(fmt, STORED, limit, 0, 0, 0, 0, ())
    assert parse_header(header.pack() + bytes(header.segment_bytes - HEADER_BYTES), where=WHERE) == header


def test_absurd_counts_end_before_any_allocation() -> None:
    """All counts at their largest, agreeing with each other, in a file that is short."""
    header = SegmentHeader(BF16, Schedule.parse("4,4,4,4"), MAX_SEGMENT_ELEMENTS, 0, 0, 0, 0, (bytes(15),) * 4)
    with pytest.raises(CorruptDataError, match="truncated"):
        parse_header(header.pack(), where=WHERE)


def test_something_else_is_named_for_what_it_is() -> None:
    with pytest.raises(CorruptDataError, match=r"expected a segment.*PK"):
        parse_header(b"PK\3\4" + bytes(200), where=WHERE)
    with pytest.raises(CorruptDataError, match="needs 160 bytes, found 3"):
        parse_header(b"SZP", where=WHERE)


def test_a_later_version_is_named(segment: Bytes) -> None:
    with pytest.raises(CorruptDataError, match=r"version 3 .*reads version 2"):
        parse_header(FIELDS["version"].set(segment, 3).data, where=WHERE)


def test_out_of_another_size_is_refused(segment: Bytes) -> None:
    right = parse_header(segment.data, where=WHERE).decoded_bytes
    for size in (0, right - 1, right + 1):
        with pytest.raises(CorruptDataError, match=f"decodes to {right} bytes, expected {size}"):
            cpu.decode_segment(segment, np.empty(size, np.uint8), where=WHERE)


@pytest.mark.parametrize("text", ["stored", "top16", "4", "2,2,3"])
def test_the_digest_is_of_the_bytes_after_the_header(text: str) -> None:
    encoded = encode(weights(BF16, 5000, np.random.default_rng(2)), BF16, Schedule.parse(text))
    digest = Field(64, "Q")
    assert digest.get(encoded) == xxhash.xxh3_64_intdigest(encoded[HEADER_BYTES:].tobytes())
    with pytest.raises(CorruptDataError, match="digest"):
        cpu.verify_segment(digest.set(encoded, digest.get(encoded) ^ 1), where=WHERE)


def test_the_checksum_is_of_the_decoded_bytes() -> None:
    encoded = encode(random_bits(RAW, 100, np.random.default_rng(3)), RAW, STORED)
    checksum = Field(56, "Q")
    with pytest.raises(CorruptDataError, match="checksum"):
        cpu.decode_segment(checksum.set(encoded, checksum.get(encoded) ^ 1), np.empty(100, np.uint8), where=WHERE)
