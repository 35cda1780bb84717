"""docs/format.md against the code: its example, its figures, and a decoder that was written from it alone.

The decoder below imports nothing of this package. It is slow and plain: bits are read one by one.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given

from splitzip_aio.codec import checksum as checksum_module
from splitzip_aio.codec import cpu, layout
from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.errors import CorruptDataError
from tests.codec.data import FORMATS, Bytes, cases
from tests.codec.hostile import encode

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")

# ---------------------------------------------------------------------------------------------------------------------
# The decoder. Names and numbers are those of the document.

CHUNK, TILE, SLACK, MAX_ELEMENTS = 1024, 8192, 8, 4194304


class DamagedError(Exception):
    """A segment breaks a rule of the document."""


@dataclass(frozen=True)
class Format:
    """A row of the table of element formats."""

    size: int
    exponent_bits: int
    mantissa_bits: int
    low_bits: int
    high_bits: int


ELEMENT_FORMATS = {
    0: Format(1, 0, 0, 0, 0),
    1: Format(2, 8, 7, 8, 0),
    2: Format(2, 5, 10, 8, 3),
    3: Format(4, 8, 23, 8, 16),
    4: Format(1, 4, 3, 4, 0),
    5: Format(1, 5, 2, 3, 0),
}
HEADER = struct.Struct("<4sHBB4s3I5IIQQQ64sB15sQ")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise DamagedError(what)


def align(x: int, a: int) -> int:
    return (x + a - 1) // a * a


class Bits:
    """The bits of a plane or of the tail, by their numbers."""

    def __init__(self, data: bytes, start: int) -> None:
        self.data, self.start = data, start

    def read(self, first: int, width: int) -> int:
        return sum((self.data[self.start + b // 8] >> (b % 8) & 1) << (b - first) for b in range(first, first + width))


class Segment:
    """A segment, its header checked."""

    def __init__(self, data: bytes) -> None:
        require(len(data) >= 160, "no whole header")
        (
            magic,
            version,
            self.code,
            self.method,
            widths,
            self.n,
            decoded,
            size,
            *offsets,
            self.escapes,
            self.tail_bits,
            self.checksum,
            self.digest,
            books,
            tile,
            reserved,
            check,
        ) = HEADER.unpack(data[:160])
        require(magic == b"SZPS" and version == 2, "magic or version")
        require(check == xxhash.xxh64_intdigest(data[:152], seed=0), "header checksum")
        require(tile == 13 and not any(reserved), "tile or reserved bytes")
        require(self.code in ELEMENT_FORMATS and self.method in (0, 1, 2), "format or method")
        self.format = ELEMENT_FORMATS[self.code]
        self.widths = [width for width in widths if width]
        require(bytes(self.widths).ljust(4, b"\0") == widths, "zeros between the widths")
        require(all(width <= 4 for width in self.widths), "widths")
        require((self.method == 2) == bool(self.widths), "widths for this method")
        require(
            self.method == 0 or (self.method == 1 and self.code == 1) or (self.method == 2 and self.code > 0), "use"
        )
        require(1 <= self.n <= MAX_ELEMENTS * (4 if self.code == 0 else 1), "elements")
        self.codebooks = self._codebooks(books)
        self._check_tail()
        self.low, self.high, self.codes, self.index, self.tail = offsets
        require((decoded, size, offsets) == self._expected(), "sizes or offsets")
        require(size <= len(data), "segment is longer than what is there")
        self.data = data[:size]

    def _codebooks(self, books: bytes) -> list[bytes]:
        sizes = {0: [], 1: [16], 2: [2**width - 1 for width in self.widths]}[self.method]
        found = [books[16 * tier : 16 * tier + size] for tier, size in enumerate(sizes)]
        require(b"".join(book.ljust(16, b"\0") for book in found).ljust(64, b"\0") == books, "unused codebook bytes")
        return found

    def _check_tail(self) -> None:
        require(self.escapes <= (self.n if self.method else 0), "escapes")
        d = sum(self.widths[1:])
        least, most = (8 + d) * self.escapes, 8 * self.escapes + d * self.n
        if self.method != 2:
            least = most = 24 * self.escapes
        require(least <= self.tail_bits <= most, "tail bits")

    def _expected(self) -> tuple[int, int, list[int]]:
        stored = self.method == 0
        low_bits = 8 * self.format.size if stored else self.format.low_bits
        high_bits = 0 if stored else self.format.high_bits
        code_bits = {0: [0], 1: [4], 2: self.widths}[self.method][0]
        entries = -(-self.n // TILE) + 1 if self.method else 0
        low = 160
        high = align(low + -(-self.n * low_bits // 8), 16)
        codes = align(high + -(-self.n * high_bits // 8), 16)
        index = align(codes + -(-self.n * code_bits // 8), 16)
        tail = align(index + 4 * entries, 16)
        size = align(tail + 4 * -(-self.tail_bits // 32) + (0 if stored else SLACK), 32)
        return self.n * self.format.size, size, [low, high, codes, index, tail]

    def decode(self) -> bytes:
        if self.method == 0:
            out = self.data[self.low : self.low + self.n * self.format.size]
        else:
            exponents = self.top16() if self.method == 1 else self.tiers()
            out = b"".join(self.element(i, exponent) for i, exponent in enumerate(exponents))
        require(checksum(out) == self.checksum, "checksum of the decoded bytes")
        return out

    def element(self, i: int, exponent: int) -> bytes:
        f = self.format
        residual = Bits(self.data, self.low).read(i * f.low_bits, f.low_bits)
        residual |= Bits(self.data, self.high).read(i * f.high_bits, f.high_bits) << f.low_bits
        sign, mantissa = residual >> f.mantissa_bits, residual & ((1 << f.mantissa_bits) - 1)
        word = mantissa | exponent << f.mantissa_bits | sign << (f.mantissa_bits + f.exponent_bits)
        return word.to_bytes(f.size, "little")

    def entry(self, i: int) -> int:
        return int.from_bytes(self.data[self.index + 4 * i : self.index + 4 * i + 4], "little")

    def tiers(self) -> list[int]:
        exponents, position, escapes = [0] * self.n, 0, 0
        codes, tail = Bits(self.data, self.codes), Bits(self.data, self.tail)

        def take(width: int) -> int:
            nonlocal position
            require(position + width <= self.tail_bits, "a code beyond the tail")
            position += width
            return tail.read(position - width, width)

        for first in range(0, self.n, CHUNK):
            if first % TILE == 0:
                require(position == self.entry(first // TILE), "a tile begins elsewhere")
            reached = list(range(first, min(first + CHUNK, self.n)))
            for tier, (width, book) in enumerate(zip(self.widths, self.codebooks, strict=True)):
                deeper = []
                for i in reached:
                    code = take(width) if tier else codes.read(i * width, width)
                    if code == 2**width - 1:
                        deeper.append(i)
                    else:
                        exponents[i] = book[code]
                reached = deeper
            for i in reached:
                exponents[i] = take(8)
                escapes += 1
        require(position == self.tail_bits == self.entry(-(-self.n // TILE)), "the tail ends elsewhere")
        require(escapes == self.escapes, "number of escapes")
        return exponents

    def top16(self) -> list[int]:
        exponents = []
        for i in range(self.n):
            pair = self.data[self.codes + i // 2]
            exponents.append(self.codebooks[0][pair & 15 if i % 2 else pair >> 4])
        tiles = -(-self.n // TILE)
        starts = [self.entry(t) for t in range(tiles + 1)]
        require(starts[0] == 0 and starts == sorted(starts) and starts[-1] == self.escapes, "index")
        for t in range(tiles):
            for e in range(starts[t], starts[t + 1]):
                place = int.from_bytes(self.data[self.tail + 2 * e : self.tail + 2 * e + 2], "little")
                require(place < TILE and t * TILE + place < self.n, "place of an escape")
                exponents[t * TILE + place] = self.data[self.tail + 2 * self.escapes + e]
        return exponents


def checksum(data: bytes) -> int:
    total = 0
    for q in range(-(-len(data) // 16)):
        group = data[16 * q : 16 * q + 16].ljust(16, b"\0")
        m = (q * 0x9E3779B1 + 0x85EBCA77) % 2**32
        total += 0x9E3779B97F4A7C15
        for j in range(4):
            k = (((m ^ (m >> 15)) | 1) + j * 0x2C1B3C6E) % 2**32
            total += int.from_bytes(group[4 * j : 4 * j + 4], "little") * k
    return total % 2**64


# ---------------------------------------------------------------------------------------------------------------------


def blocks(heading: str) -> list[str]:
    """The fenced blocks below a heading of the document."""
    section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```text\n(.*?)```", section, re.DOTALL)


def example() -> tuple[bytes, bytes]:
    elements, dump = blocks("An example")
    rows = [line.split(maxsplit=1) for line in dump.splitlines()]
    assert [int(place, 16) for place, _ in rows] == list(range(0, 16 * len(rows), 16))
    return bytes.fromhex(elements), bytes.fromhex("".join(row for _, row in rows))


def test_the_example_is_what_the_codec_writes_and_reads() -> None:
    elements, segment = example()
    data = np.frombuffer(elements, np.uint8)
    assert encode(data, BF16, Schedule.parse("1,2")).tobytes() == segment
    out = np.zeros(len(elements), np.uint8)
    cpu.decode_segment(segment, out, where="the example")
    assert out.tobytes() == elements
    cpu.verify_segment(segment, where="the example")


def test_the_example_as_top16() -> None:
    segment = encode(np.frombuffer(example()[0], np.uint8), BF16, Schedule.parse("top16"))
    (row,) = re.findall(
        r"is `([0-9a-f ]+)`, by the codebook that begins with ([0-9, ]+)\.", DOCUMENT.replace("\n", " ")
    )
    assert segment[176:181].tobytes() == bytes.fromhex(row[0])
    assert list(segment[72:78]) == [int(exponent) for exponent in row[1].split(",")]


def test_the_decoder_written_from_the_document_reads_the_example() -> None:
    elements, segment = example()
    assert Segment(segment).decode() == elements


@given(cases())
def test_the_decoder_written_from_the_document_reads_any_segment(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    data = data[: 2500 * fmt.element_bytes]
    segment = encode(data, fmt, schedule).tobytes()
    assert Segment(segment).decode() == data.tobytes()


def test_both_decoders_refuse_the_same_headers() -> None:
    _, right = example()
    for place in range(152):
        for value in {0, 1, 2, 3, 13, 28, 255, right[place] ^ 1, right[place] ^ 128}:
            segment = bytearray(right)
            segment[place] = value
            segment[152:160] = xxhash.xxh64_intdigest(segment[:152]).to_bytes(8, "little")
            assert accepts_by_document(bytes(segment)) == accepts(bytes(segment)), (place, value)


def accepts_by_document(segment: bytes) -> bool:
    try:
        Segment(segment).decode()
    except DamagedError:
        return False
    return True


def accepts(segment: bytes) -> bool:
    try:
        size = struct.unpack_from("<I", segment, 16)[0]
        cpu.decode_segment(segment, np.zeros(min(size, 1 << 16), np.uint8), where="test")
    except CorruptDataError:
        return False
    return True


def test_constants() -> None:
    stated = {
        name: int(value) for name, value in re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|[^|]+\|$", DOCUMENT, re.MULTILINE)
    }
    assert stated == {
        "HEADER_BYTES": layout.HEADER_BYTES,
        "SEGMENT_ALIGN": layout.SEGMENT_ALIGN,
        "PLANE_ALIGN": layout.PLANE_ALIGN,
        "PACK_ALIGN": 4096,
        "CHUNK": layout.CHUNK_ELEMENTS,
        "TILE": layout.TILE_ELEMENTS,
        "SLACK": layout.TAIL_SLACK,
        "MAX_ELEMENTS": layout.MAX_SEGMENT_ELEMENTS,
    }


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_table_of_formats(fmt: ElementFormat) -> None:
    row = re.search(rf"^\| `{fmt.name}` \| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert row
    code, size, *bits = row[1].split(" | ")
    assert (int(code), int(size)) == (fmt.code, fmt.element_bytes)
    widths = (fmt.exponent_bits, fmt.mantissa_bits, fmt.low_bits, fmt.high_bits)
    assert [0 if each == "–" else int(each) for each in bits] == list(widths)
    assert ELEMENT_FORMATS[fmt.code] == Format(fmt.element_bytes, *widths)


def test_the_table_of_checksums() -> None:
    values = re.findall(r"^\| .* \| `([0-9a-f]{16})` \|$", DOCUMENT, re.MULTILINE)
    inputs = [b"", b"\0", b"\1", bytes(range(16)), b"splitzip" * 9]
    assert [f"{checksum(data):016x}" for data in inputs] == values
    assert [f"{checksum_module.checksum(np.frombuffer(data, np.uint8)):016x}" for data in inputs] == values
