"""The encoding kernels in Triton's interpreter; ``tests/gpu`` runs the same checks, and larger ones, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitzip_aio.codec import gpu_encode, gpu_segments
from splitzip_aio.codec.formats import BF16, RAW, ElementFormat
from splitzip_aio.codec.gpu_encode import GpuSplitZipEncoder
from splitzip_aio.codec.gpu_segments import GpuSegmentEncoder
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.schedule import CANDIDATES, STORED, TOP16, Schedule
from splitzip_aio.codec.tensors import decode_torch, encode_torch
from splitzip_aio.errors import InvalidArgumentError, SourceChangedError, UnsupportedError
from tests.codec.data import (
    CODED,
    FORMATS,
    Contents,
    bursts,
    not_a_number,
    one_value,
    random_bits,
    rare_exponents,
    weights,
    words,
)
from tests.codec.encodings import SENTRY, Job, check
from tests.codec.interpreter import INTERPRETER_SINCE

pytest.importorskip("triton", minversion=INTERPRETER_SINCE)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU")

RNG = np.random.default_rng(5)
DEEPEST = Schedule.parse((1, 2, 1, 4))
THREE_TIERS = Schedule.parse((2, 2, 3))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_format(fmt: ElementFormat) -> None:
    schedules = [s for s in (None, STORED, DEEPEST, Schedule.parse((3,))) if s is None or s.applies_to(fmt)]
    check([Job(random_bits(fmt, 1003, RNG), fmt, schedule) for schedule in schedules], device="cpu")
    if fmt != RAW:
        check([Job(weights(fmt, 1503, RNG), fmt)], device="cpu")


@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_every_standard_coding_at_the_ends_of_lanes_and_chunks(schedule: Schedule) -> None:
    counts = (1, 9, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1)
    check([Job(weights(BF16, count, RNG), BF16, schedule) for count in counts], device="cpu")


@pytest.mark.parametrize("schedule", [STORED, TOP16, Schedule.parse((3,)), THREE_TIERS], ids=str)
def test_a_segment_of_two_tiles(schedule: Schedule) -> None:
    check([Job(weights(BF16, TILE_ELEMENTS + 5, RNG), BF16, schedule)], device="cpu")


@pytest.mark.parametrize("contents", [bursts, not_a_number, one_value, rare_exponents], ids=lambda kind: kind.__name__)
def test_contents_that_differ_from_chunk_to_chunk(contents: Contents) -> None:
    jobs = [Job(contents(BF16, 2 * CHUNK_ELEMENTS, RNG), BF16, schedule) for schedule in (THREE_TIERS, TOP16)]
    check(jobs, device="cpu")


def test_exponents_on_either_side_of_the_window() -> None:
    """A tile's window is set by its first chunk; the others go below it, above it, and to both ends of the format."""
    exponents = np.concatenate([np.full(CHUNK_ELEMENTS, 120), [0, 92, 93, 124, 125, 255], np.full(900, 121)])
    check([Job(words(exponents << 7, BF16), BF16, schedule) for schedule in (THREE_TIERS, TOP16)], device="cpu")


def test_a_chunk_in_which_every_element_reaches_every_tier() -> None:
    """The fullest chunk there is: 1024 elements in each tier and 1024 escapes."""
    foreign = np.zeros(256, np.int64)
    foreign[:60] = 1
    data = words(np.full(CHUNK_ELEMENTS + 8, 200 << 7), BF16)
    jobs = [Job(data, BF16, schedule, ranking=foreign) for schedule in (THREE_TIERS, DEEPEST, TOP16)]
    plans = check(jobs, device="cpu")
    assert plans[0].escapes == (CHUNK_ELEMENTS + 8,)


@pytest.mark.parametrize("look_twice", [False, True], ids=["from counts", "from elements"])
def test_segments_of_several_tensors_at_once(look_twice: bool) -> None:
    """Two formats and three codings, in segments of which the last is short; what tails take is known either way."""
    jobs = [
        Job(weights(BF16, 2500, RNG), BF16, THREE_TIERS, segment_elements=1024),
        Job(random_bits(RAW, 70, RNG), RAW, segment_elements=32),
        Job(weights(CODED[-1], 600, RNG), CODED[-1], Schedule.parse((2, 3)), segment_elements=512),
        Job(random_bits(BF16, 1100, RNG), BF16, THREE_TIERS),
        Job(weights(BF16, 900, RNG), BF16, TOP16, segment_elements=800),
    ]
    assert [len(plan.segments) for plan in check(jobs, device="cpu", look_twice=look_twice)] == [3, 3, 2, 1, 2]


@pytest.mark.parametrize("schedule", [THREE_TIERS, TOP16], ids=str)
def test_a_tensor_that_changes_meanwhile_is_refused_and_stays_in_its_range(schedule: Schedule) -> None:
    encoder = GpuSegmentEncoder("cpu")
    job = Job(one_value(BF16, 2000, RNG), BF16, schedule)
    contents = [job.contents("cpu")]
    pending = encoder.count(contents)
    plans = [job.plan(counts) for counts in pending.wait()]
    contents[0].data.copy_(torch.from_numpy(random_bits(BF16, 2000, RNG)))
    size = sum(plans[0].segments)
    room = torch.zeros(size + SENTRY, dtype=torch.uint8)
    encoded = encoder.encode(contents, plans, room=room)
    assert not room[size:].any()
    with pytest.raises(SourceChangedError, match="changed"):
        encoded.to_host(torch.empty(size, dtype=torch.uint8))


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(3)
    grid = torch.randn(30, 40)
    return [
        grid.to(torch.bfloat16),
        grid.to(torch.bfloat16).t(),
        grid.to(torch.bfloat16).view(-1)[3:],  # not aligned to 16 bytes
        torch.tensor(1.5, dtype=torch.float16),
        torch.empty(0, 7, dtype=torch.bfloat16),
        torch.empty(3, 0, dtype=torch.int32),
        torch.arange(50),
        torch.view_as_complex(grid.view(-1, 2)).conj(),
    ]


@pytest.mark.parametrize("schedule", [None, "stored"])
def test_payloads_of_tensors_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, schedule: str | None) -> None:
    monkeypatch.setattr(gpu_encode, "_BATCH_BYTES", 3000)
    found = list(GpuSplitZipEncoder("cpu").encode_batch(tensors(), schedule=schedule))
    assert len(found) == len(tensors())
    for tensor, (payload, meta) in zip(tensors(), found, strict=True):
        expected, expected_meta = encode_torch(tensor, schedule=schedule)
        assert meta == expected_meta
        assert torch.equal(payload, expected)


def test_batches_of_equal_shapes_underway_together() -> None:
    """Tables of one shape are made once; each batch still has its own addresses, plan and contents."""
    batches = [[torch.randn(1100).mul(scale).to(torch.bfloat16), torch.arange(40)] for scale in (1, 50, 1)]
    batches[1][0][::3] = 0
    encoder = GpuSplitZipEncoder("cpu")
    for tensors, encoded in zip(batches, encoder.encode_on_device_each(batches, schedule=None), strict=True):
        for tensor, (payload, meta) in zip(tensors, encoded.to_host(), strict=True):
            expected, expected_meta = encode_torch(tensor)
            assert meta == expected_meta
            assert torch.equal(payload, expected)


def test_one_tensor() -> None:
    tensor = torch.randn(1200).to(torch.bfloat16)
    payload, meta = GpuSplitZipEncoder("cpu").encode(tensor, schedule=(2, 3))
    assert str(meta.schedule) == "2,3"
    assert torch.equal(decode_torch(payload, meta).view(torch.int16), tensor.view(torch.int16))
    empty, meta = GpuSplitZipEncoder("cpu").encode(torch.empty(0))
    assert (empty.numel(), meta.segments) == (0, ())


def test_what_cannot_be_encoded() -> None:
    encoder = GpuSplitZipEncoder("cpu")
    with pytest.raises(InvalidArgumentError, match="top16"):
        encoder.encode(torch.zeros(3, dtype=torch.float16), schedule="top16")
    with pytest.raises(UnsupportedError, match="dense"):
        encoder.encode(torch.eye(3).to_sparse())


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_segments, "triton_available", lambda: False)
    with pytest.raises(UnsupportedError, match="Triton"):
        GpuSplitZipEncoder()
