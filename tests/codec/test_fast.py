"""The compiled codec, with and without the machine's own instructions: the reference's bytes, and its verdicts."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec import cpu, reference, simd
from splitzip_aio.codec.checksum import checksum
from splitzip_aio.codec.fast import FastCodec
from splitzip_aio.codec.formats import BF16, F16, F32, RAW, ElementFormat
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, HEADER_BYTES, TILE_ELEMENTS
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.codec.schedule import CANDIDATES, TOP16, Schedule
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError
from tests.codec.data import (
    ALL_TIERS,
    CONTENTS,
    EDGES,
    Bytes,
    Contents,
    bursts,
    cases,
    elements,
    random_bits,
    weights,
    words,
)
from tests.codec.hostile import seal

ROOT = Path(__file__).resolve().parents[2]
POISON = 0xA5
CODECS = (FastCodec(portable=True), *([FastCodec(portable=False)] if simd.has_bit_scatter() else []))
EACH_CODEC = pytest.mark.parametrize("codec", CODECS, ids=str)


def codebooks(data: Bytes, fmt: ElementFormat, schedule: Schedule) -> tuple[bytes, ...]:
    return schedule.codebooks(reference.histogram(data, fmt), fmt)


def verdict(codec: FastCodec, header: SegmentHeader, segment: Bytes) -> tuple[Bytes, str]:
    """What a codec makes of a segment of any content: its bytes or its error. Nothing beside the output may change."""
    memory = np.full(header.decoded_bytes + 128, POISON, np.uint8)
    out, error = memory[64:-64], ""
    try:
        assert codec.decode_segment(header, segment, out, where="test") == checksum(out)
    except CorruptDataError as exc:
        error = str(exc)
    assert (memory[:64] == POISON).all()
    assert (memory[-64:] == POISON).all()
    return out[: 0 if error else None], error


def expected_verdict(header: SegmentHeader, segment: Bytes) -> tuple[Bytes, str]:
    out = np.empty(header.decoded_bytes, np.uint8)
    try:
        reference.decode_segment(header, segment, out, where="test")
    except CorruptDataError as exc:
        return out[:0], str(exc)
    return out, ""


def check_verdicts(segment: Bytes) -> bool:
    """Every codec accepts or refuses a segment as the reference does; return whether it is refused."""
    header = parse_header(segment.data, where="test")
    out, error = expected_verdict(header, segment)
    for codec in CODECS:
        found, found_error = verdict(codec, header, segment)
        assert found_error == error
        assert bytes(found) == bytes(out)
    return bool(error)


def encoded(codec: FastCodec, data: Bytes, fmt: ElementFormat, schedule: Schedule, books: tuple[bytes, ...]) -> Bytes:
    """A segment encoded in used memory of the least size, behind which nothing may change."""
    room = codec.encoding_room(data.size, fmt, schedule)
    memory = np.full(room + 64, POISON, np.uint8)
    segment = codec.encode_segment(data, fmt, schedule, books, out=memory[:room])
    assert (memory[room:] == POISON).all()
    return segment


def check(codec: FastCodec, data: Bytes, fmt: ElementFormat, schedule: Schedule, books: tuple[bytes, ...]) -> None:
    expected = reference.encode_segment(data, fmt, schedule, books)
    assert np.array_equal(encoded(codec, data, fmt, schedule, books), expected)
    out, error = verdict(codec, parse_header(expected.data, where="test"), expected)
    assert not error
    assert bytes(out) == bytes(data)


@EACH_CODEC
@given(case=cases(), other=st.data())
def test_same_bytes_both_ways(
    codec: FastCodec, case: tuple[ElementFormat, Schedule, Bytes], other: st.DataObject
) -> None:
    """With the codebooks of the data, and with those of other data, where anything may be an escape."""
    fmt, schedule, data = case
    counts = reference.histogram(data, fmt)
    assert np.array_equal(codec.histogram(data, fmt), counts)
    check(codec, data, fmt, schedule, schedule.codebooks(counts, fmt))
    check(codec, data, fmt, schedule, codebooks(other.draw(elements(fmt)), fmt, schedule))


@EACH_CODEC
def test_every_schedule_there_can_be(codec: FastCodec) -> None:
    data = bursts(BF16, CHUNK_ELEMENTS + 900, np.random.default_rng(1))
    for schedule in ALL_TIERS:
        check(codec, data, BF16, schedule, codebooks(data, BF16, schedule))


@EACH_CODEC
@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_every_bf16_pattern(codec: FastCodec, schedule: Schedule) -> None:
    data = words(np.random.default_rng(2).permutation(65536), BF16)
    check(codec, data, BF16, schedule, codebooks(data, BF16, schedule))


@EACH_CODEC
@pytest.mark.parametrize("contents", CONTENTS, ids=lambda contents: contents.__name__)
def test_sizes_around_tiles_and_chunks(codec: FastCodec, contents: Contents) -> None:
    rng = np.random.default_rng(3)
    for fmt, text in ((BF16, "2,2,3"), (BF16, "top16"), (F16, "3"), (F32, "2,3")):
        for count in EDGES:
            data, schedule = contents(fmt, count, rng), Schedule.parse(text)
            check(codec, data, fmt, schedule, codebooks(data, fmt, schedule))


@EACH_CODEC
@pytest.mark.parametrize("count", [1, TILE_ELEMENTS, TILE_ELEMENTS + 511, 5 * TILE_ELEMENTS + 1300])
def test_histogram_of_changing_contents(codec: FastCodec, count: int) -> None:
    """The exponents that are frequent at the start say nothing of the rest; both counts must be exact."""
    for fmt in (BF16, F16):
        data = np.concatenate([kind(fmt, count, np.random.default_rng(4)) for kind in CONTENTS])
        assert np.array_equal(codec.histogram(data, fmt), reference.histogram(data, fmt))


@EACH_CODEC
def test_codebook_entries_may_repeat(codec: FastCodec) -> None:
    data = bursts(BF16, 3000, np.random.default_rng(5))
    check(codec, data, BF16, Schedule.parse("2,2"), (bytes([7, 7, 1]), bytes([1, 7, 9])))


@given(case=cases(), seed=st.integers(0, 2**32 - 1), changes=st.integers(1, 12))
def test_same_verdict_on_hostile_segments(case: tuple[ElementFormat, Schedule, Bytes], seed: int, changes: int) -> None:
    """Changed bytes behind the header, with checksums made to agree: refused alike, or decoded to the same bytes."""
    fmt, schedule, data = case
    segment = reference.encode_segment(data, fmt, schedule, codebooks(data, fmt, schedule))
    rng = np.random.default_rng(seed)
    places = rng.integers(HEADER_BYTES, segment.size, changes)
    segment[places] = rng.integers(0, 256, changes)
    check_verdicts(seal(segment))


@pytest.mark.parametrize("text", ["2,2,3", "2,3", "4", "1,1,1,1", "4,4,4,4", "top16"])
@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_planes_of_one_value_are_refused_alike(text: str, value: int) -> None:
    """All sentinels, or none at all: the longest and the shortest tail there can be."""
    data = bursts(BF16, TILE_ELEMENTS + 77, np.random.default_rng(6))
    schedule = Schedule.parse(text)
    segment = reference.encode_segment(data, BF16, schedule, codebooks(data, BF16, schedule))
    places = parse_header(segment.data, where="test").layout
    refused = []
    for start, stop in ((places.codes, places.index), (places.index, places.tail), (places.tail, segment.size)):
        damaged = segment.copy()
        damaged[start:stop] = value
        refused.append(check_verdicts(seal(damaged)))
    assert refused[1]  # of two tiles with escapes


def test_the_reference_finds_the_words() -> None:
    data = weights(BF16, 5000, np.random.default_rng(7))
    segment = cpu.encode_segment(data, BF16, Schedule.parse("2,3"), codebooks(data, BF16, Schedule.parse("2,3")))
    places = parse_header(segment.data, where="test").layout
    segment[places.index] ^= 1
    with pytest.raises(CorruptDataError, match="pack 3, offset 9: tile 0 does not start where its index says"):
        cpu.decode_segment(seal(segment), np.empty(data.size, np.uint8), where="pack 3, offset 9")


def test_an_output_with_gaps_is_refused() -> None:
    data = random_bits(RAW, 64, np.random.default_rng(8))
    segment = cpu.encode_segment(data, RAW, Schedule.parse("stored"), ())
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        cpu.decode_segment(segment, np.empty(128, np.uint8)[::2], where="test")


@EACH_CODEC
def test_threads_share_nothing(codec: FastCodec) -> None:
    rng = np.random.default_rng(9)
    parts = [weights(BF16, 40_000 + 16 * part, rng) for part in range(16)]

    def there_and_back(data: Bytes) -> Bytes:
        segment = encoded(codec, data, BF16, TOP16, codebooks(data, BF16, TOP16))
        out = np.empty(data.size, np.uint8)
        codec.decode_segment(parse_header(segment.data, where="test"), segment, out, where="test")
        return out

    with ThreadPoolExecutor(4) as pool:
        assert all(map(np.array_equal, pool.map(there_and_back, parts), parts))


def test_the_codec_in_use_is_named() -> None:
    assert cpu.implementation() == str(CODECS[-1])


WITHOUT_NUMBA = """
import logging, sys
sys.modules["numba"] = None
import numpy as np
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16
from splitzip_aio.codec.schedule import TOP16
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
data = np.arange(4000, dtype=np.uint16).view(np.uint8)
segment = cpu.encode_segment(data, BF16, TOP16, TOP16.codebooks(cpu.histogram(data, BF16), BF16))
out = np.empty(8000, np.uint8)
cpu.decode_segment(segment, out, where="here")
assert (out == data).all()
print(cpu.implementation())
"""

LAZY = """
import sys
from splitzip_aio.codec import cpu
assert "numba" not in sys.modules
cpu.implementation()
assert "numba" in sys.modules
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_numba_the_reference_takes_over_and_says_so_once() -> None:
    lines = run(WITHOUT_NUMBA).splitlines()
    assert [line for line in lines if "WARNING" in line and "numba" in line] == lines[:1]
    assert lines[1:] == ["numpy reference"]


def test_numba_is_imported_when_something_is_coded() -> None:
    run(LAZY)


def test_code_that_cannot_be_kept_is_compiled_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """numba looks for a directory by the file a function is from; one made of a string has none."""
    namespace: dict[str, object] = {}
    exec(compile("def twice(number):\n    return 2 * number\n", str(tmp_path / "absent" / "f.py"), "exec"), namespace)
    with caplog.at_level(logging.INFO):
        twice = simd.entry(namespace["twice"])  # type: ignore[arg-type]
    assert "twice" in caplog.text
    assert twice(21) == 42


def test_kept_machine_code_is_that_of_these_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba itself would look at one file only, and run what it compiled from older versions of the others."""

    def double(x: int) -> int:
        return 2 * x

    def hits(digest: str) -> int:
        monkeypatch.setattr(simd, "_sources_digest", lambda: digest)
        kernel: Any = simd.entry(double)
        assert kernel(4) == 8
        return sum(kernel.stats.cache_hits.values())

    fresh = token_hex(8)
    assert [hits(fresh), hits(fresh), hits("other sources"), hits(fresh)] == [0, 1, 0, 0]
