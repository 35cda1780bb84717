"""Damaged segments are noticed, every one; hostile ones end in the same error and touch nothing else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec import cpu, reference
from splitzip_aio.codec.checksum import checksum
from splitzip_aio.codec.formats import BF16, RAW, ElementFormat
from splitzip_aio.codec.layout import HEADER_BYTES, TILE_ELEMENTS
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.codec.schedule import CANDIDATES, STORED, Schedule
from splitzip_aio.errors import CorruptDataError
from tests.codec.corruption import SAMPLES as EVERY_CODING
from tests.codec.corruption import Sample
from tests.codec.data import (
    ALL_TIERS,
    FORMATS,
    Bytes,
    cases,
    weights,
)
from tests.codec.hostile import encode, flip, parts, seal

WHERE = "packs/00000.szp at 32, tensor 'a'"
HERE = re.escape(WHERE)
CORRUPTIONS = 20_000
POISON = 0xA5


SAMPLES = (*EVERY_CODING, Sample("one element", BF16, "2,2,3", weights, 1))
EACH = -(-CORRUPTIONS // len(SAMPLES))


def decode(segment: Bytes, size: int) -> Bytes:
    """Decode with the codec in use and with the reference, which must agree whether it can be done, and how."""
    expected = None
    with contextlib.suppress(CorruptDataError):
        expected = guarded(decode_by_reference, segment, size)
    try:
        found = guarded(cpu.decode_segment, segment, size)
    except CorruptDataError:
        assert expected is None
        raise
    assert expected is not None
    assert np.array_equal(found, expected)
    return found


def decode_by_reference(segment: Bytes, out: Bytes, *, where: str) -> None:
    header = parse_header(segment.data, where=where)
    if header.decoded_bytes != out.size:
        raise CorruptDataError(f"{where}: of another size")
    reference.decode_segment(header, segment[: header.segment_bytes], out, where=where)
    if checksum(out) != header.checksum:
        raise CorruptDataError(f"{where}: checksum")


def guarded(decoder: Callable[..., object], segment: Bytes, size: int) -> Bytes:
    """Into poisoned memory, between guards that must stay as they are even when decoding fails."""
    memory = np.full(size + 128, POISON, np.uint8)
    try:
        decoder(segment, memory[64 : 64 + size], where=WHERE)
    finally:
        assert (memory[:64] == POISON).all()
        assert (memory[64 + size :] == POISON).all()
    return memory[64 : 64 + size]


def damages(sample: Sample, count: int) -> list[tuple[str, Bytes]]:
    """So many copies of a segment, each with one byte changed: in turn in every part, padding included."""
    rng = np.random.default_rng(2)
    segment = sample.segment()
    places = parts(parse_header(segment.data, where=WHERE))
    names = list(places)
    chosen = [names[i % len(names)] for i in range(count)]
    return [(name, flip(segment, int(rng.integers(*places[name])), rng)) for name in chosen]


def refused(act: Callable[[], object]) -> bool:
    """Whether this ends in a CorruptDataError, which then names the place."""
    try:
        act()
    except CorruptDataError as error:
        return WHERE in str(error)
    return False


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_changed_byte_fails_verification(sample: Sample) -> None:
    """20,000 of them over all samples."""
    missed = [
        (number, part)
        for number, (part, damaged) in enumerate(damages(sample, EACH))
        if not refused(lambda: cpu.verify_segment(damaged, where=WHERE))  # noqa: B023 - called at once
    ]
    assert not missed


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_changed_byte_never_decodes_to_something_else(sample: Sample) -> None:
    check_decoding(sample, 100)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_no_changed_byte_ever_decodes_to_something_else(sample: Sample) -> None:
    check_decoding(sample, 600)


def check_decoding(sample: Sample, count: int) -> None:
    """Decoding checks the result, not the encoded bytes: a change that alters no element passes."""
    right, passed = sample.data(), set()
    for part, damaged in damages(sample, count):
        if not is_right_or_refused(damaged, right):
            passed.add(part)
    assert not passed


def is_right_or_refused(segment: Bytes, right: Bytes) -> bool:
    found: list[Bytes] = []
    return refused(lambda: found.append(decode(segment, right.size))) or np.array_equal(found[0], right)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_damage_under_agreeing_digests_never_decodes_to_something_else(sample: Sample) -> None:
    """Only the checksum of the decoded bytes is left to notice it."""
    rng = np.random.default_rng(3)
    segment, right = sample.segment(), sample.data()
    for run in range(100):
        damaged = segment.copy()
        for _ in range(run % 7 + 1):
            damaged = flip(damaged, int(rng.integers(HEADER_BYTES, segment.size)), rng)
        assert is_right_or_refused(seal(damaged), right)


@pytest.mark.parametrize("sample", [each for each in SAMPLES if each.schedule != "stored"], ids=lambda each: each.name)
def test_a_wrong_index_is_refused(sample: Sample) -> None:
    segment, right = sample.segment(), sample.data()
    start, stop = parts(parse_header(segment.data, where=WHERE))["index"]
    for entry in range(start, stop, 4):
        before = int(segment[entry : entry + 4].view("<u4")[0])
        for value in {before ^ 1 << 31, before + 1, before + 1000, 0x7FFF_FFFF, 0xFFFF_FFFF} - {before}:
            damaged = segment.copy()
            damaged[entry : entry + 4] = np.array([value], "<u4").view(np.uint8)
            with pytest.raises(CorruptDataError, match=HERE):
                decode(seal(damaged), right.size)


def test_an_escape_outside_its_tile_is_refused() -> None:
    sample = next(each for each in SAMPLES if each.name == "top16 escapes")
    segment = sample.segment()
    header = parse_header(segment.data, where=WHERE)
    assert header.escapes > 10
    for number, place in ((0, TILE_ELEMENTS), (5, 0xFFFF), (header.escapes - 1, header.elements % TILE_ELEMENTS)):
        damaged = segment.copy()
        at = header.layout.tail + 2 * number
        damaged[at : at + 2] = np.array([place], "<u2").view(np.uint8)
        with pytest.raises(CorruptDataError, match=HERE):
            decode(seal(damaged), header.decoded_bytes)


@st.composite
def forgeries(draw: st.DrawFn) -> Bytes:
    """A segment whose header agrees with itself and whose planes are noise, sparse or dense."""
    fmt = draw(st.sampled_from(FORMATS))
    usual = [schedule for schedule in CANDIDATES if schedule.applies_to(fmt)]
    schedule = draw(st.sampled_from(usual) | (st.sampled_from(ALL_TIERS) if fmt != RAW else st.nothing()))
    elements = draw(st.integers(1, 40) | st.integers(1, 2 * TILE_ELEMENTS + 40))
    escapes = draw(st.integers(0, elements)) if schedule != STORED else 0
    least, most = schedule.tail_bounds(elements, escapes)
    books = tuple(draw(st.binary(min_size=size, max_size=size)) for size in schedule.codebook_sizes)
    tail_bits = draw(st.integers(least, most))
    header = SegmentHeader(fmt, schedule, elements, escapes, tail_bits, draw(st.integers(0, 2**64 - 1)), 0, books)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    noise = rng.integers(0, 256, header.segment_bytes, np.uint8)
    noise[rng.random(noise.size) < draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))] = draw(st.sampled_from([0, 255]))
    noise[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return seal(noise)


@given(forgeries())
def test_a_forged_segment_is_refused(segment: Bytes) -> None:
    """Its checksum is noise too, so none can be right."""
    header = parse_header(segment.data, where=WHERE)
    with pytest.raises(CorruptDataError, match=HERE):
        decode(segment, header.decoded_bytes)


@given(cases(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_truncated_segment_is_refused(case: tuple[ElementFormat, Schedule, Bytes], cut: int, junk: int) -> None:
    fmt, schedule, data = case
    segment = encode(data, fmt, schedule)
    with pytest.raises(CorruptDataError, match=HERE):
        decode(segment[: cut % segment.size], data.size)
    with pytest.raises(CorruptDataError, match=HERE):
        cpu.verify_segment(segment[: junk % segment.size], where=WHERE)


@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CorruptDataError, match=HERE):
        cpu.verify_segment(noise, where=WHERE)
    with pytest.raises(CorruptDataError, match=HERE):
        cpu.decode_segment(noise, np.empty(3, np.uint8), where=WHERE)
