"""The CPU codec: what went in comes out, bit for bit, whatever it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitzip_aio.codec import cpu, reference
from splitzip_aio.codec.formats import BF16, F16, RAW, ElementFormat
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, SEGMENT_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import CANDIDATES, STORED, TOP16, Schedule
from splitzip_aio.errors import InvalidArgumentError
from tests.codec.data import (
    ALL_TIERS,
    CODED,
    CONTENTS,
    EDGES,
    FORMATS,
    Bytes,
    Contents,
    bursts,
    cases,
    elements,
    one_value,
    random_bits,
    weights,
    words,
)
from tests.codec.hostile import encode

POISON = 0xA5


def decode(segment: Bytes, size: int) -> Bytes:
    """Into poisoned memory, between guards that must stay as they are."""
    memory = np.full(size + 128, POISON, np.uint8)
    cpu.decode_segment(segment, memory[64 : 64 + size], where="test")
    assert (memory[:64] == POISON).all()
    assert (memory[64 + size :] == POISON).all()
    return memory[64 : 64 + size]


def check(data: Bytes, fmt: ElementFormat, schedule: Schedule) -> None:
    segment = encode(data, fmt, schedule)
    assert np.array_equal(decode(segment, data.size), data)
    assert cpu.verify_segment(segment, where="test").schedule == schedule


@given(cases())
@example((BF16, TOP16, words(np.array([0x7FC0]), BF16)))
def test_any_elements_return(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    check(data, fmt, schedule)


@given(cases())
def test_the_fast_codec_writes_the_bytes_of_the_reference(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    counts = reference.histogram(data, fmt)
    assert np.array_equal(cpu.histogram(data, fmt), counts)
    codebooks = schedule.codebooks(counts, fmt)
    expected = reference.encode_segment(data, fmt, schedule, codebooks)
    assert np.array_equal(cpu.encode_segment(data, fmt, schedule, codebooks), expected)
    out = np.full(data.size, POISON, np.uint8)
    reference.decode_segment(parse_header(expected.data, where="test"), expected, out, where="test")
    assert np.array_equal(out, data)


@given(cases())
def test_encoding_in_memory_that_is_given(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    codebooks = schedule.codebooks(cpu.histogram(data, fmt), fmt)
    room = np.full(cpu.encoding_room(data.size, fmt, schedule), POISON, np.uint8)
    segment = cpu.encode_segment(data, fmt, schedule, codebooks, out=room)
    assert np.shares_memory(segment, room)
    assert np.array_equal(segment, cpu.encode_segment(data, fmt, schedule, codebooks))
    for unfit in (room[:-1], np.empty(2 * room.size, np.uint8)[::2]):
        with pytest.raises(InvalidArgumentError, match=f"expected {room.size} contiguous bytes"):
            cpu.encode_segment(data, fmt, schedule, codebooks, out=unfit)


@given(cases(), st.data())
def test_any_codebook_is_exact(case: tuple[ElementFormat, Schedule, Bytes], draw: st.DataObject) -> None:
    """A codebook of other elements: exponents that it lacks are escapes, down to every one of them."""
    fmt, schedule, data = case
    codebooks = schedule.codebooks(cpu.histogram(draw.draw(elements(fmt)), fmt), fmt)
    segment = cpu.encode_segment(data, fmt, schedule, codebooks)
    assert np.array_equal(decode(segment, data.size), data)


EXTREMES = tuple(Schedule.parse(text) for text in ("1", "1,1,1,1", "4,4,4,4", "4,3,2,1"))


@pytest.mark.parametrize("schedule", [*CANDIDATES, *EXTREMES], ids=str)
def test_every_bf16_pattern(schedule: Schedule) -> None:
    check(words(np.arange(65536), BF16), BF16, schedule)


def test_every_schedule_there_can_be() -> None:
    """On elements that reach every tier and escape from the last."""
    data = bursts(BF16, CHUNK_ELEMENTS + 900, np.random.default_rng(5))
    for schedule in ALL_TIERS:
        check(data, BF16, schedule)


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("schedule", [each for each in CANDIDATES if each.applies_to(F16)], ids=str)
def test_every_short_pattern(fmt: ElementFormat, schedule: Schedule) -> None:
    """Every pattern of up to 16 bits, in random order; of F32, its upper half."""
    patterns = np.random.default_rng(4).permutation(1 << min(8 * fmt.element_bytes, 16))
    check(words(patterns << max(0, 8 * fmt.element_bytes - 16), fmt), fmt, schedule)


@pytest.mark.parametrize("contents", CONTENTS, ids=lambda contents: contents.__name__)
@pytest.mark.parametrize("schedule", [each for each in CANDIDATES if each != STORED], ids=str)
def test_sizes_around_tiles_and_chunks(schedule: Schedule, contents: Contents) -> None:
    rng = np.random.default_rng(6)
    for count in EDGES:
        check(contents(BF16, count, rng), BF16, schedule)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_one_element(fmt: ElementFormat) -> None:
    for schedule in [each for each in (*CANDIDATES, *EXTREMES) if each.applies_to(fmt)]:
        check(random_bits(fmt, 1, np.random.default_rng(7)), fmt, schedule)


@pytest.mark.parametrize("schedule", [each for each in CANDIDATES if each != STORED], ids=str)
def test_a_whole_segment_of_weights(schedule: Schedule) -> None:
    check(weights(BF16, SEGMENT_ELEMENTS, np.random.default_rng(8)), BF16, schedule)


def test_a_whole_segment_of_bytes() -> None:
    check(random_bits(RAW, 2 * SEGMENT_ELEMENTS, np.random.default_rng(9)), RAW, STORED)


def test_equal_elements_cost_only_residuals_and_first_codes() -> None:
    count = 4 * TILE_ELEMENTS
    segment = encode(one_value(BF16, count, np.random.default_rng(10)), BF16, Schedule.parse("1"))
    assert segment.size == 160 + count + count // 8 + 64  # the last for five index entries and what follows the tail


def test_encoding_is_deterministic_and_leaves_its_input() -> None:
    data = weights(BF16, 3 * TILE_ELEMENTS + 5, np.random.default_rng(11))
    before = data.copy()
    assert np.array_equal(encode(data, BF16, TOP16), encode(data, BF16, TOP16))
    assert np.array_equal(data, before)


def test_read_only_input_and_any_buffer_will_do() -> None:
    data = weights(BF16, 100, np.random.default_rng(12))
    data.setflags(write=False)
    segment = encode(data, BF16, TOP16)
    for buffer in (segment.tobytes(), bytearray(segment), memoryview(segment), segment):
        out = np.full(200, POISON, np.uint8)
        cpu.decode_segment(buffer, out, where="test")
        assert np.array_equal(out, data)


@pytest.mark.parametrize("nbytes", [0, 1000, 1 << 20, (5 << 20) + 7])
def test_memory_for_coding_starts_on_a_large_page(nbytes: int) -> None:
    memory = cpu.coding_memory(nbytes)
    assert (memory.size, memory.dtype, memory.flags.c_contiguous) == (nbytes, np.uint8, True)
    if nbytes >= 1 << 20:
        assert memory.ctypes.data % (2 << 20) == 0
