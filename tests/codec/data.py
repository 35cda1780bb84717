"""Element bytes to test codecs with, and hypothesis strategies that draw them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitzip_aio.codec.formats import BF16, F8_E4M3, F8_E5M2, F16, F32, RAW, ElementFormat
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.schedule import CANDIDATES, MAX_DEPTH, MAX_WIDTH, STORED, TOP16, Method, Schedule

Bytes = NDArray[np.uint8]

CODED = (BF16, F16, F32, F8_E4M3, F8_E5M2)
FORMATS = (RAW, *CODED)
ALL_TIERS = tuple(
    Schedule(Method.TIERS, widths)
    for depth in range(1, MAX_DEPTH + 1)
    for widths in itertools.product(range(1, MAX_WIDTH + 1), repeat=depth)
)


def words(values: NDArray[np.integer], fmt: ElementFormat) -> Bytes:
    """Elements given as unsigned integers, as (n * element_bytes,) bytes."""
    return values.astype(f"<u{fmt.element_bytes}").view(np.uint8)


def random_bits(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    return rng.integers(0, 256, count * fmt.element_bytes, np.uint8)


def one_value(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    return np.tile(random_bits(fmt, 1, rng), count)


def not_a_number(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    """Exponent all ones, anything in the mantissa: NaNs of every payload, and infinities."""
    exponents = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    mask = np.frombuffer(exponents.to_bytes(fmt.element_bytes, "little"), np.uint8)
    return random_bits(fmt, count, rng) | np.tile(mask, count)


def weights(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    """Exponents as trained layers have them: Gaussian elements of log-normal scales around 0.02."""
    values = rng.normal(size=count) * np.exp2(rng.normal(size=count) * 0.4) * 0.02
    return from_exponents(fmt, np.frexp(values)[1] + (1 << fmt.exponent_bits) // 2, rng)


def rare_exponents(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    """One exponent but for a few elements in a few places: escapes that come alone, and tiles without any."""
    exponents = np.full(count, 3)
    places = rng.integers(0, count, count // 500 + 1)
    exponents[places] = rng.integers(0, 1 << fmt.exponent_bits, places.size)
    return from_exponents(fmt, exponents, rng)


def bursts(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    """Runs in which every exponent is another one between runs of a single exponent: tiles of escapes only."""
    exponents = rng.integers(0, 1 << fmt.exponent_bits, count)
    exponents[(np.arange(count) // 700) % 3 > 0] = 1
    return from_exponents(fmt, exponents, rng)


def from_exponents(fmt: ElementFormat, exponents: NDArray[np.integer], rng: np.random.Generator) -> Bytes:
    """Elements with these exponents, wrapped into the format's range, and any signs and mantissas."""
    field = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    rest = random_bits(fmt, exponents.size, rng).view(f"<u{fmt.element_bytes}").astype(np.int64) & ~field
    return words(rest | ((exponents.astype(np.int64) << fmt.mantissa_bits) & field), fmt)


Contents = Callable[[ElementFormat, int, np.random.Generator], Bytes]
CONTENTS: tuple[Contents, ...] = (random_bits, one_value, not_a_number, weights, rare_exponents, bursts)
EDGES = sorted(
    {
        max(1, edge + step)
        for edge in (0, CHUNK_ELEMENTS, TILE_ELEMENTS, TILE_ELEMENTS + CHUNK_ELEMENTS)
        for step in (-7, -1, 0, 1, 2, 9)
    }
)


def counts() -> st.SearchStrategy[int]:
    """Numbers of elements: few, any, and around the ends of tiles and chunks."""
    return st.integers(1, 70) | st.sampled_from(EDGES) | st.integers(1, 2 * TILE_ELEMENTS)


def schedules(fmt: ElementFormat) -> st.SearchStrategy[Schedule]:
    """All schedules a format can have, those of the package more often."""
    if fmt == RAW:
        return st.just(STORED)
    usual = [schedule for schedule in (*CANDIDATES, TOP16) if schedule.applies_to(fmt)]
    return st.sampled_from(usual) | st.sampled_from(ALL_TIERS)


@st.composite
def elements(draw: st.DrawFn, fmt: ElementFormat) -> Bytes:
    """Bytes of some elements: short ones bit by bit, long ones by kind and seed."""
    if draw(st.booleans()):
        size = fmt.element_bytes
        data = draw(st.binary(min_size=size, max_size=40 * size).filter(lambda raw: len(raw) >= size))
        return np.frombuffer(data[: len(data) // size * size], np.uint8)
    kinds = (random_bits, one_value) if fmt == RAW else CONTENTS
    kind, count, seed = draw(st.sampled_from(kinds)), draw(counts()), draw(st.integers(0, 2**32 - 1))
    return kind(fmt, count, np.random.default_rng(seed))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ElementFormat, Schedule, Bytes]:
    """A format, a schedule that applies to it, and elements."""
    fmt = draw(st.sampled_from(FORMATS))
    return fmt, draw(schedules(fmt)), draw(elements(fmt))
