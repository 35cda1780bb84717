"""Codebooks: measured, handed to schedules, written down and read back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec import cpu
from splitzip_aio.codec.codebook import SplitZipCodebook, calibrate_codebook
from splitzip_aio.codec.dtypes import torch_view
from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.layout import SEGMENT_ELEMENTS
from splitzip_aio.codec.schedule import STORED, Schedule
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError
from tests.codec.data import CODED, Bytes, elements, schedules, weights

GOOD: dict[str, Any] = {"dtype": "BF16", "exponents": [120, 119, 121], "coverage": 1.0}


def with_data() -> st.SearchStrategy[tuple[ElementFormat, Bytes]]:
    return st.sampled_from(CODED).flatmap(lambda fmt: st.tuples(st.just(fmt), elements(fmt)))


@given(with_data(), st.data())
def test_every_schedule_gets_the_codebooks_of_the_histogram(
    case: tuple[ElementFormat, Bytes], draw: st.DataObject
) -> None:
    fmt, data = case
    counts = cpu.histogram(data, fmt)
    schedule = draw.draw(schedules(fmt))
    assert SplitZipCodebook.from_histogram(counts, fmt).for_schedule(schedule) == schedule.codebooks(counts, fmt)


@given(with_data())
def test_calibration_counts_exponents(case: tuple[ElementFormat, Bytes]) -> None:
    fmt, data = case
    tensor = torch_view(torch.from_numpy(data.copy()), fmt.name, (data.size // fmt.element_bytes,))
    codebook, coverage = calibrate_codebook(tensor)
    counts = cpu.histogram(data, fmt)
    assert codebook == SplitZipCodebook.from_histogram(counts, fmt)
    assert coverage == codebook.coverage == pytest.approx(sorted(counts)[:-17:-1] @ np.ones(16) / counts.sum())
    assert set(codebook.exponents) == set(np.flatnonzero(counts).tolist())
    listed = counts[list(codebook.exponents)]
    assert (listed[:-1] >= listed[1:]).all()


def test_coverage_by_hand() -> None:
    """Seventeen exponents, the last with one of a hundred elements."""
    counts = np.zeros(256, np.int64)
    counts[100:117] = [50, *[3] * 14, 7, 1]
    codebook = SplitZipCodebook.from_histogram(counts, BF16)
    assert codebook.coverage == 0.99
    assert list(codebook.exponents) == [100, 115, *range(101, 115), 116]


def test_trained_weights_pass_the_published_gate() -> None:
    data = weights(BF16, SEGMENT_ELEMENTS + 100, np.random.default_rng(1))
    _, coverage = calibrate_codebook(torch.from_numpy(data).view(torch.bfloat16))
    assert 0.99 < coverage < 1


def test_any_shape_and_strides_count_alike() -> None:
    tensor = torch.randn(33, 65, 3).to(torch.bfloat16).requires_grad_()
    whole = calibrate_codebook(tensor)
    assert calibrate_codebook(tensor.permute(2, 0, 1)) == whole
    assert calibrate_codebook(tensor.flatten()) == whole
    assert calibrate_codebook(torch.nn.Parameter(tensor)) == whole
    assert calibrate_codebook(tensor[:, :, :0])[0].exponents == b""


def test_no_elements_are_covered() -> None:
    codebook, coverage = calibrate_codebook(torch.empty(0, 7, dtype=torch.float16))
    assert (codebook, coverage) == (SplitZipCodebook("F16", b"", 1.0), 1.0)
    assert codebook.for_schedule(Schedule.parse("2")) == (bytes([0, 1, 2]),)
    assert codebook.for_schedule(STORED) == ()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fnuz])
def test_a_dtype_without_coded_exponent_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=str(dtype)):
        calibrate_codebook(torch.zeros(4, dtype=dtype))


@given(with_data())
def test_json_returns_the_codebook(case: tuple[ElementFormat, Bytes]) -> None:
    fmt, data = case
    codebook = SplitZipCodebook.from_histogram(cpu.histogram(data, fmt), fmt)
    text = codebook.to_json()
    assert SplitZipCodebook.from_json(text) == codebook == SplitZipCodebook.from_json(text.encode())
    assert json.loads(text) == {
        "dtype": fmt.name,
        "exponents": list(codebook.exponents),
        "coverage": codebook.coverage,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "I64"}, "no exponent"),
        ({"dtype": "F16", "exponents": [31, 32]}, "exponents 0 to 31"),
        ({"dtype": 3}, "dtype"),
        ({"exponents": [1, 1]}, "distinct"),
        ({"exponents": [256]}, "256"),
        ({"exponents": [-1]}, "256"),
        ({"exponents": "AAAA"}, "exponents"),
        ({"exponents": [1.5]}, "exponents"),
        ({"coverage": 1.01}, "coverage"),
        ({"coverage": -0.5}, "coverage"),
        ({"coverage": None}, "coverage"),
        ({"more": 1}, "more"),
    ],
)
def test_a_field_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    assert SplitZipCodebook.from_json(json.dumps(GOOD)) == SplitZipCodebook("BF16", bytes([120, 119, 121]), 1.0)
    with pytest.raises(InvalidArgumentError, match=message):
        SplitZipCodebook.from_json(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"dtype":"BF16"}', b"\xff\xfe", '{"coverage": NaN}'])
def test_what_is_no_codebook_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="codebook JSON"):
        SplitZipCodebook.from_json(text)


def test_coverage_must_be_a_number() -> None:
    with pytest.raises(InvalidArgumentError, match="coverage"):
        SplitZipCodebook("BF16", b"", float("nan"))


def test_a_codebook_is_a_value() -> None:
    codebook = SplitZipCodebook("BF16", b"\1\2", 1.0)
    assert hash(codebook) == hash(SplitZipCodebook("BF16", b"\1\2", 1.0))
    with pytest.raises(AttributeError):
        codebook.coverage = 0.5  # type: ignore[misc]
