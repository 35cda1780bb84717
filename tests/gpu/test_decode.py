"""The decode kernel on a GPU: everything decoded is right, everything wrong is flagged, nothing else is touched."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.gpu import GpuSplitZipDecoder
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.layout import SEGMENT_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import CANDIDATES, STORED, TOP16, Schedule
from splitzip_aio.codec.slot_table import SlotTable
from splitzip_aio.codec.tensors import encode_torch
from splitzip_aio.errors import CorruptDataError
from tests.codec.data import ALL_TIERS, FORMATS, random_bits, rare_exponents, weights, words
from tests.codec.hostile import encode, parts
from tests.codec.slots import POISON, Source, check, decode_slot

pytestmark = pytest.mark.gpu
UNCHECKED = ("header", "padding")  # read and checked by the host, and never read
RNG = np.random.default_rng(11)
COUNTS = (1, 7, 8, 9, 1023, 1025, TILE_ELEMENTS - 1, TILE_ELEMENTS, 3 * TILE_ELEMENTS + 1234)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("contents", [weights, random_bits, rare_exponents], ids=lambda f: f.__name__)
def test_every_format_coding_and_size(fmt: ElementFormat, contents) -> None:
    if fmt.exponent_bits == 0 and contents is not random_bits:
        pytest.skip("bytes have no exponents")
    schedules = [schedule for schedule in CANDIDATES if schedule.applies_to(fmt)]
    check([Source(contents(fmt, n, RNG), fmt, s) for s in schedules for n in COUNTS], device="cuda")


@pytest.mark.parametrize("schedule", ALL_TIERS[:: len(ALL_TIERS) // 12], ids=str)
def test_schedules_outside_the_standard_set(schedule: Schedule) -> None:
    check([Source(weights(BF16, n, RNG), BF16, schedule) for n in (5, 20_001)], device="cuda")


@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_all_65536_bit_patterns(schedule: Schedule) -> None:
    patterns = RNG.permutation(np.arange(65536))
    check([Source(words(patterns, BF16), BF16, schedule)], device="cuda")


def test_full_segments_of_every_coding_in_one_launch() -> None:
    sources = [Source(weights(BF16, SEGMENT_ELEMENTS, RNG), BF16, schedule) for schedule in CANDIDATES]
    assert len(check(sources, device="cuda").launches) == 1


@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_single_byte_corruption_is_flagged_in_each_of_400_segments(schedule: Schedule) -> None:
    data = [weights(BF16, int(n), RNG) for n in RNG.integers(100, 3000, 400)]
    segments = [encode(d, BF16, schedule) for d in data]
    starts = np.cumsum([0] + [segment.size for segment in segments])
    damage = {}
    for start, segment in zip(starts[:-1].tolist(), segments, strict=True):
        spans = parts(parse_header(segment.data, where="segment"))
        places = np.concatenate([np.arange(*span) for name, span in spans.items() if not name.startswith(UNCHECKED)])
        damage[start + int(RNG.choice(places))] = int(RNG.integers(1, 256))
    decoded = decode_slot(segments, device="cuda", damage=damage)
    missed = sorted(set(range(len(segments))) - set(decoded.failures))
    unharmed = [i for i in missed if np.array_equal(decoded.outputs[i], data[i])]
    assert missed == unharmed, "wrong bytes were not flagged"
    # A last byte or nibble of a plane has unused bits; only those may be changed without a trace.
    assert len(missed) <= 4
    assert all((guard == POISON).all() for guard in decoded.guards)


def test_decoding_neither_allocates_nor_waits_nor_compiles_again() -> None:
    from splitzip_aio.codec.kernels.decode import decode_slot_kernel

    decoder = GpuSplitZipDecoder()
    compiled = set()
    for n in (40, 1111, 1 << 16, 1 << 20, 777_777):
        payload, meta = encode_torch((torch.randn(n) * 0.02).to(torch.bfloat16), schedule="2,2,3")
        out = torch.empty(n, dtype=torch.bfloat16, device="cuda")
        decoder.decode_slot_into(out, meta, payload).check()
        headers = SegmentHeaders.parse(payload.numpy().data, [0], [payload.numel()], where=str)
        view = bytearray(1 << 20)
        table = SlotTable.build(headers, [0], [out.data_ptr()], memoryview(view))
        slot = torch.cat([payload, torch.frombuffer(view, dtype=torch.uint8)]).cuda()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        try:
            with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            decoder.decode_slot(slot, payload.numel(), table)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before
        compiled.add(len(decode_slot_kernel.device_caches[torch.cuda.current_device()][0]))
    assert len(compiled) == 1


def test_decode_on_a_stream_of_its_own_and_a_wrong_payload() -> None:
    tensor = (torch.randn(300, 1000) * 0.02).to(torch.bfloat16)
    payload, meta = encode_torch(tensor)
    out = torch.empty(300, 1000, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    pending = GpuSplitZipDecoder().decode_slot_into(out, meta, payload, stream=stream)
    pending.check()
    assert torch.equal(out.cpu().view(torch.int16), tensor.view(torch.int16))
    payload[200_000] ^= 0x10
    with pytest.raises(CorruptDataError, match="segment 0"):
        GpuSplitZipDecoder().decode_slot_into(out, meta, payload, stream=stream).check()


def test_damage_to_any_part_stays_in_range() -> None:
    """Small and wild, for compute-sanitizer: every byte of index, tail and codes set to 0xFF in turn."""
    for schedule in CANDIDATES:
        segment = encode(weights(BF16, 9000, RNG), BF16, schedule)
        spans = parts(parse_header(segment.data, where="segment"))
        for name, span in spans.items():
            if name.startswith(UNCHECKED) or schedule == STORED:
                continue
            decoded = decode_slot([segment], device="cuda", damage=dict.fromkeys(range(*span), 0xFF))
            assert decoded.failures == [0], (schedule, name)
            assert (decoded.guards[0] == POISON).all()


def test_without_checksum_the_bytes_are_the_same() -> None:
    tensor = (torch.randn(70_000) * 0.02).to(torch.bfloat16)
    payload, meta = encode_torch(tensor, schedule=TOP16)
    out = torch.empty(70_000, dtype=torch.bfloat16, device="cuda")
    GpuSplitZipDecoder(checksum=False).decode_slot_into(out, meta, payload)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu().view(torch.int16), tensor.view(torch.int16))
