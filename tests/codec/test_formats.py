"""Where exponents are, checked against torch's own arithmetic and over every bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from splitzip_aio.codec.formats import (
    BF16,
    F8_E4M3,
    F8_E5M2,
    F16,
    F32,
    RAW,
    ElementFormat,
    element_format,
    format_from_code,
)
from splitzip_aio.codec.reference import histogram, join, split
from tests.codec.data import CODED, FORMATS, words

DTYPES = {
    BF16: torch.bfloat16,
    F16: torch.float16,
    F32: torch.float32,
    F8_E4M3: torch.float8_e4m3fn,
    F8_E5M2: torch.float8_e5m2,
}


def patterns(fmt: ElementFormat) -> NDArray[np.int64]:
    """Every bit pattern of formats up to 16 bits; of F32 every exponent and sign with assorted mantissas."""
    if fmt.element_bytes <= 2:
        return np.arange(1 << (8 * fmt.element_bytes))
    rng = np.random.default_rng(5)
    mantissas = np.concatenate(([0, 1, 0x7FFFFF, 0x400000], rng.integers(0, 1 << 23, 124)))
    return (np.arange(512)[:, None] << 23 | mantissas).ravel()


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
def test_split_and_join_are_inverse_on_every_pattern(fmt: ElementFormat) -> None:
    data = words(patterns(fmt), fmt)
    exponents, low, high = split(data, fmt)
    assert low.max() < 1 << fmt.low_bits
    assert high.max() < 1 << max(fmt.high_bits, 1)
    assert np.array_equal(join(exponents, low, high, fmt), data)


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
def test_exponents_are_those_of_the_numbers(fmt: ElementFormat) -> None:
    """For finite normal numbers the exponent field is the binary exponent, biased."""
    data = words(patterns(fmt), fmt)
    values = torch.from_numpy(data.copy()).view(DTYPES[fmt]).double().numpy()
    exponents = split(data, fmt)[0].astype(int)
    smallest = torch.finfo(DTYPES[fmt]).smallest_normal
    normal = np.isfinite(values) & (np.abs(values) >= smallest)
    assert normal.sum() > values.size // 2
    binary = np.frexp(values[normal])[1] - 1
    bias = (1 << (fmt.exponent_bits - 1)) - 1
    assert np.array_equal(exponents[normal], binary + bias)


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
def test_residual_holds_sign_above_mantissa(fmt: ElementFormat) -> None:
    values = patterns(fmt)
    _, low, high = split(words(values, fmt), fmt)
    residual = low.astype(np.int64) | (high.astype(np.int64) << fmt.low_bits)
    sign = values >> (8 * fmt.element_bytes - 1)
    assert np.array_equal(residual >> fmt.mantissa_bits, sign)
    assert np.array_equal(residual & ((1 << fmt.mantissa_bits) - 1), values & ((1 << fmt.mantissa_bits) - 1))


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
def test_fields_fill_the_element(fmt: ElementFormat) -> None:
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8 * fmt.element_bytes
    assert fmt.low_bits + fmt.high_bits == fmt.residual_bits == 1 + fmt.mantissa_bits


@pytest.mark.parametrize("fmt", CODED, ids=lambda fmt: fmt.name)
def test_histogram_counts_exponents(fmt: ElementFormat) -> None:
    data = words(patterns(fmt), fmt)
    expected = [0] * 256
    for exponent in split(data, fmt)[0].tolist():
        expected[exponent] += 1
    assert histogram(data, fmt).tolist() == expected


def test_raw_counts_its_bytes_as_one_exponent() -> None:
    assert histogram(np.arange(7, dtype=np.uint8), RAW).tolist() == [7] + [0] * 255


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_names_and_codes_lead_back(fmt: ElementFormat) -> None:
    assert element_format(fmt.name) == fmt
    assert format_from_code(fmt.code) == fmt


@pytest.mark.parametrize("name", ["I64", "BOOL", "F64", "F8_E4M3FNUZ", "U8", "C64", "no such dtype"])
def test_what_has_no_coded_exponent_is_raw(name: str) -> None:
    assert element_format(name) is RAW


def test_unknown_codes_have_no_format() -> None:
    assert {code for code in range(256) if format_from_code(code)} == {0, 1, 2, 3, 4, 5}
