"""The decode kernel in Triton's interpreter; ``tests/gpu`` runs the same checks, and larger ones, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitzip_aio.codec.formats import BF16, F8_E5M2, F16, F32, RAW
from splitzip_aio.codec.gpu import GpuSplitZipDecoder
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, HEADER_BYTES, TILE_ELEMENTS
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import CANDIDATES, STORED, TOP16, Schedule
from splitzip_aio.codec.slot_table import TOP16_TILE_ELEMENTS, SlotTable, table_capacity
from splitzip_aio.codec.tensors import encode_torch
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError
from tests.codec.corruption import SAMPLES, Sample, check_changed_bytes
from tests.codec.data import CODED, FORMATS, random_bits, rare_exponents, weights
from tests.codec.hostile import encode
from tests.codec.interpreter import INTERPRETER_SINCE
from tests.codec.slots import Source, check, decode_slot

pytest.importorskip("triton", minversion=INTERPRETER_SINCE)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU")

DEEPEST = Schedule.parse((1, 2, 1, 4))
RNG = np.random.default_rng(7)


@pytest.mark.parametrize("count", [1, 9, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS + 1])
def test_standard_codings_of_bf16_share_one_launch(count: int) -> None:
    sources = [Source(weights(BF16, count, RNG), BF16, schedule) for schedule in CANDIDATES]
    assert len(check(sources, device="cpu").launches) == 1


@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_a_segment_of_several_tiles_ends_where_its_elements_end(schedule: Schedule) -> None:
    check([Source(weights(BF16, TILE_ELEMENTS + 5, RNG), BF16, schedule)], device="cpu")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_decodes(fmt) -> None:
    schedules = [s for s in (STORED, Schedule.parse((2, 3)), DEEPEST) if s.applies_to(fmt)]
    check([Source(random_bits(fmt, 1003, RNG), fmt, schedule) for schedule in schedules], device="cpu")


def test_formats_that_cannot_share_a_kernel_get_a_launch_each() -> None:
    sources = [Source(rare_exponents(fmt, 300, RNG), fmt, Schedule.parse((3,))) for fmt in CODED]
    table = check([*sources, Source(random_bits(RAW, 77, RNG), RAW, STORED)], device="cpu")
    assert [launch.fmt for launch in table.launches] == list(CODED)


def test_top16_with_escapes_in_every_chunk() -> None:
    """Few enough in a tile that each chunk finds its own."""
    data = np.concatenate((rare_exponents(BF16, TOP16_TILE_ELEMENTS, RNG), random_bits(BF16, 33, RNG)))
    check([Source(data, BF16, TOP16)], device="cpu")


def test_top16_with_more_escapes_than_lanes() -> None:
    data = np.concatenate((rare_exponents(BF16, CHUNK_ELEMENTS, RNG), random_bits(BF16, 170, RNG)))
    check([Source(data, BF16, TOP16)], device="cpu")


@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_damage_after_the_header_was_read_is_flagged_and_stays_in_its_range(schedule: Schedule) -> None:
    data = weights(BF16, CHUNK_ELEMENTS + 100, RNG)
    segment, neighbour = encode(data, BF16, schedule), encode(data, BF16, STORED)
    header = parse_header(segment.data, where="segment")
    places = header.layout
    used = {"low": places.low, "codes": places.codes, "index": places.index, "tail": places.tail}
    if schedule == STORED:
        used = {"low": places.low}
    for part, place in used.items():
        if part == "tail" and not header.tail_bits:
            continue
        decoded = decode_slot([segment, neighbour], device="cpu", damage={place: 0xFF, place + 1: 0x7F})
        assert decoded.failures == [0], part
        assert all((guard == 0xA5).all() for guard in decoded.guards), part
        np.testing.assert_array_equal(decoded.outputs[1], data)


@pytest.mark.parametrize("sample", [each for each in SAMPLES if each.count < 1000], ids=lambda each: each.name)
def test_every_changed_byte_is_noticed(sample: Sample) -> None:
    """A few, and small: ``tests/gpu`` has 2,000."""
    assert len(check_changed_bytes(sample, 12, device="cpu", seed=0)) >= 2


def test_hostile_index_is_followed_nowhere() -> None:
    segment = encode(weights(BF16, CHUNK_ELEMENTS, RNG), BF16, Schedule.parse((2, 3)))
    index = parse_header(segment.data, where="segment").layout.index
    decoded = decode_slot([segment], device="cpu", damage={index + i: 0xFF for i in range(4)})
    assert decoded.failures == [0]
    assert (decoded.guards[0] == 0xA5).all()


def test_zeros_that_were_never_decoded_do_not_pass_for_decoded_zeros() -> None:
    segment = encode(np.zeros(4096, np.uint8), BF16, STORED)
    headers = SegmentHeaders.parse(segment.data, [0], [segment.size], where=str)
    table = SlotTable.build(headers, [0], [16], memoryview(bytearray(table_capacity(segment.size))))
    assert table.failures(np.zeros(1, np.uint64)) == [0]


def test_decode_slot_into_and_its_verdict() -> None:
    tensor = (torch.randn(33, 40) * 0.02).to(torch.bfloat16)
    payload, meta = encode_torch(tensor, schedule="2,2,3")
    out = torch.full((33, 40), float("nan"), dtype=torch.bfloat16)
    GpuSplitZipDecoder().decode_slot_into(out, meta, payload).check()
    assert torch.equal(out.view(torch.int16), tensor.view(torch.int16))
    payload[HEADER_BYTES] ^= 1
    with pytest.raises(CorruptDataError, match="segment 0: decoded bytes have checksum"):
        GpuSplitZipDecoder().decode_slot_into(out, meta, payload).check()
    with pytest.raises(InvalidArgumentError, match="expected 2640 contiguous bytes"):
        GpuSplitZipDecoder().decode_slot_into(out[:3], meta, payload)


def test_decode_in_place_through_a_stash() -> None:
    tensor = (torch.randn(3000) * 0.02).to(torch.bfloat16)
    payload, meta = encode_torch(tensor, schedule="2,3")
    headers = SegmentHeaders.parse(payload.numpy().data, [0], [payload.numel()], where=str)
    target = torch.empty(meta.raw_bytes + table_capacity(meta.raw_bytes), dtype=torch.uint8)
    target[: payload.numel()] = payload
    table = SlotTable.build(headers, [0], [target.data_ptr()], target.numpy().data[payload.numel() :])
    stash = torch.empty(payload.numel() + table.nbytes, dtype=torch.uint8)
    results = GpuSplitZipDecoder().decode_in_place(target, payload.numel(), table, stash)
    assert table.failures(results.numpy().view(np.uint64)) == []
    assert torch.equal(target[: meta.raw_bytes], tensor.view(torch.uint8))
    with pytest.raises(InvalidArgumentError, match="stash of 8 bytes"):
        GpuSplitZipDecoder().decode_in_place(target, payload.numel(), table, stash[:8])


def test_small_formats_in_half_groups() -> None:
    for fmt in (F8_E5M2, F16, F32):
        check([Source(weights(fmt, 8 * k + 3, RNG), fmt, Schedule.parse((2, 2, 3))) for k in range(3)], device="cpu")
