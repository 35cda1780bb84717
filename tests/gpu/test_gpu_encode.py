"""Encoding on a GPU: the CPU's bytes at every size, and a kernel that is compiled once for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitzip_aio.codec.formats import BF16, RAW, ElementFormat
from splitzip_aio.codec.gpu_encode import GpuSplitZipEncoder
from splitzip_aio.codec.gpu_segments import GpuSegmentEncoder
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, SEGMENT_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.schedule import CANDIDATES, TOP16, Schedule
from splitzip_aio.codec.tensors import encode_torch
from splitzip_aio.errors import SourceChangedError
from tests.codec.data import ALL_TIERS, CONTENTS, FORMATS, Contents, one_value, random_bits, weights, words
from tests.codec.encodings import SENTRY, Job, check

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(13)
COUNTS = (1, 7, 8, 9, 1023, 1025, TILE_ELEMENTS - 1, TILE_ELEMENTS, 3 * TILE_ELEMENTS + 1234)
THREE_TIERS = Schedule.parse((2, 2, 3))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("contents", CONTENTS, ids=lambda kind: kind.__name__)
def test_every_format_coding_and_size(fmt: ElementFormat, contents: Contents) -> None:
    if fmt == RAW and contents is not random_bits:
        pytest.skip("bytes have no exponents")
    schedules = [None, *(schedule for schedule in CANDIDATES if schedule.applies_to(fmt))]
    check([Job(contents(fmt, count, RNG), fmt, s) for s in schedules for count in COUNTS], device="cuda")


@pytest.mark.parametrize("schedule", ALL_TIERS[:: len(ALL_TIERS) // 12], ids=str)
def test_schedules_outside_the_standard_set(schedule: Schedule) -> None:
    check([Job(weights(BF16, count, RNG), BF16, schedule) for count in (5, 20_001)], device="cuda")


def test_all_bf16_values() -> None:
    values = np.arange(1 << 16, dtype=np.uint16)
    for order in (values, RNG.permutation(values)):
        check([Job(words(order, BF16), BF16, schedule) for schedule in (None, *CANDIDATES)], device="cuda")


@pytest.mark.parametrize("look_twice", [False, True], ids=["from counts", "from elements"])
def test_whole_segments(look_twice: bool) -> None:
    data = weights(BF16, 3 * SEGMENT_ELEMENTS + 777, RNG)
    check([Job(data, BF16, schedule) for schedule in (None, *CANDIDATES)], device="cuda", look_twice=look_twice)


def test_a_chunk_in_which_every_element_reaches_every_tier() -> None:
    foreign = np.zeros(256, np.int64)
    foreign[:60] = 1
    data = words(np.full(CHUNK_ELEMENTS + 8, 200 << 7), BF16)
    schedules = (THREE_TIERS, Schedule.parse((1, 2, 1, 4)), TOP16)
    check([Job(data, BF16, schedule, ranking=foreign) for schedule in schedules], device="cuda")


def test_many_small_tensors_at_once() -> None:
    check([Job(weights(BF16, 1 + 37 * k, RNG), BF16) for k in range(300)], device="cuda")


@pytest.mark.parametrize("schedule", [THREE_TIERS, TOP16], ids=str)
def test_a_tensor_that_changes_meanwhile_is_refused_and_stays_in_its_range(schedule: Schedule) -> None:
    encoder = GpuSegmentEncoder("cuda")
    job = Job(one_value(BF16, 50_000, RNG), BF16, schedule)
    contents = [job.contents("cuda")]
    pending = encoder.count(contents)
    plans = [job.plan(counts) for counts in pending.wait()]
    contents[0].data.copy_(torch.from_numpy(random_bits(BF16, 50_000, RNG)))
    size = sum(plans[0].segments)
    room = torch.zeros(size + SENTRY, dtype=torch.uint8, device="cuda")
    encoded = encoder.encode(contents, plans, room=room)
    assert not room[size:].any()
    with pytest.raises(SourceChangedError, match="changed"):
        encoded.to_host(torch.empty(size, dtype=torch.uint8))


def test_tensors_from_the_host_on_a_side_stream() -> None:
    tensors = [torch.randn(300, 77).to(torch.bfloat16), torch.arange(1000), torch.randn(5, dtype=torch.float64)]
    with torch.cuda.stream(torch.cuda.Stream()):
        found = list(GpuSplitZipEncoder().encode_batch(tensors))
    for tensor, (payload, meta) in zip(tensors, found, strict=True):
        expected, expected_meta = encode_torch(tensor)
        assert meta == expected_meta
        assert torch.equal(payload, expected)
        assert payload.is_pinned()


def test_nothing_is_compiled_again_for_another_size() -> None:
    from splitzip_aio.codec.kernels import count, encode

    kernels = (
        count.count_exponents_kernel,
        count.measure_tiles_kernel,
        encode.encode_segments_kernel,
        encode.copy_segments_kernel,
    )

    def compiled() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    schedules = (THREE_TIERS, TOP16, CANDIDATES[0])
    check([Job(weights(BF16, 16, RNG), BF16, schedule) for schedule in schedules], device="cuda", look_twice=True)
    before = compiled()
    for sizes in ((1, 15, 16), (4096, 70_000, 1 << 20)):
        check([Job(weights(BF16, n, RNG), BF16, schedule) for n in sizes for schedule in schedules], device="cuda")
    assert before
    assert compiled() == before
