"""Tier schedules: how exponents are coded, what that costs, and which schedule a tensor gets.

A schedule of widths ``(w0, w1, ...)`` codes every exponent in ``w0`` bits: the ``2**w0 - 1`` most frequent
ones by their rank, all others by the all-ones sentinel, which says "look in the next tier". Tier ``k`` holds ``w_k``
bits for each element that reached it, and a raw byte follows after the last. Because a code's place in its tier is
its rank among the sentinels before it, no positions are stored. ``TOP16`` is the published SplitZip layout instead:
16 codes of 4 bits and a list of (position, exponent) pairs for the rest.

Sizes follow from the histogram alone, so the choice is the exact minimum and needs no trial encoding.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.layout import SEGMENT_ALIGN, TAIL_SLACK, TILE_ELEMENTS, Layout, Size, align
from splitzip_aio.errors import InvalidArgumentError

__all__ = [
    "CANDIDATES",
    "MAX_DEPTH",
    "MAX_WIDTH",
    "STORED",
    "TOP16",
    "CountSurvey",
    "Method",
    "Schedule",
    "candidates",
    "choose_schedule",
    "encoded_bytes",
    "exponent_order",
    "survey_counts",
]

MAX_DEPTH = 4
MAX_WIDTH = 4
_NO_RANKING: NDArray[np.int64] = np.zeros(0, np.int64)


class Method(enum.IntEnum):
    """How a segment's planes are laid out; the value is the byte in the segment header."""

    STORED = 0
    TOP16 = 1
    TIERS = 2


@dataclass(frozen=True, slots=True)
class Schedule:
    """A coding method with, for tiers, the bits an element takes in each tier."""

    method: Method
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tiers = self.method is Method.TIERS
        depth_ok = 1 <= len(self.widths) <= MAX_DEPTH if tiers else not self.widths
        if not depth_ok or not all(1 <= width <= MAX_WIDTH for width in self.widths):
            raise InvalidArgumentError(
                f"schedule widths {self.widths}: expected 1 to {MAX_DEPTH} tiers of 1 to {MAX_WIDTH} bits, "
                "such as (2, 2, 3)"
            )

    def __hash__(self) -> int:
        return hash(self.widths)  # schedules are looked up all the time, and an enum's hash is slow

    @classmethod
    def parse(cls, value: str | Sequence[int] | Schedule) -> Schedule:
        """Read ``"stored"``, ``"top16"``, ``"2,2,3"`` or ``(2, 2, 3)``.

        Raises:
            InvalidArgumentError: the text or the widths name no schedule.
        """
        if isinstance(value, Schedule):
            return value
        if not isinstance(value, str):
            return cls(Method.TIERS, tuple(value))
        text = value.strip().strip("()").lower()
        if text in ("stored", "top16"):
            return cls(Method[text.upper()])
        try:
            widths = tuple(int(part) for part in text.split(",") if part.strip())
        except ValueError:
            raise InvalidArgumentError(
                f"schedule {value!r}: expected 'stored', 'top16' or tier widths such as '2,2,3'"
            ) from None
        return cls(Method.TIERS, widths)

    def __str__(self) -> str:
        return ",".join(map(str, self.widths)) if self.method is Method.TIERS else self.method.name.lower()

    def applies_to(self, fmt: ElementFormat) -> bool:
        """Whether elements of this format can be coded this way; every format can be stored."""
        if self.method is Method.TIERS:
            return fmt.exponent_bits > 0
        return self.method is Method.STORED or fmt == BF16

    def codebooks(self, histogram: NDArray[np.int64], fmt: ElementFormat) -> tuple[bytes, ...]:
        """The exponents each tier codes, most frequent first; equal counts in order of value.

        ``histogram`` is (256,) counts of exponents. Entries beyond the format's exponents are zero.
        """
        return self.codebooks_of(exponent_order(histogram), fmt)

    def codebooks_of(self, order: NDArray[np.intp], fmt: ElementFormat) -> tuple[bytes, ...]:
        """``codebooks`` of a histogram whose ``exponent_order`` is known."""
        sizes = self.codebook_sizes
        listed = order[: min(1 << fmt.exponent_bits, sum(sizes))].astype(np.uint8).tobytes().ljust(sum(sizes), b"\0")
        stops = list(accumulate(sizes))
        return tuple(listed[stop - size : stop] for stop, size in zip(stops, sizes, strict=True))

    def layout(self, fmt: ElementFormat, elements: Size, tail_bits: Size) -> Layout[Size]:
        """Layout of a segment of ``elements`` elements whose tail has ``tail_bits`` bits, or of (segments,) of each."""
        if isinstance(elements, int) and isinstance(tail_bits, int):
            places = _layout(self, fmt, elements)
            return places if self.method is Method.STORED else places.with_tail(tail_bits)
        return self._layout(fmt, elements, tail_bits)

    def _layout(self, fmt: ElementFormat, elements: Size, tail_bits: Size) -> Layout[Size]:
        if self.method is Method.STORED:
            return Layout.of(
                elements, low_bits=8 * fmt.element_bytes, high_bits=0, code_bits=0, tile_elements=0, tail_bits=tail_bits
            )
        return Layout.of(
            elements,
            low_bits=fmt.low_bits,
            high_bits=fmt.high_bits,
            code_bits=self.widths[0] if self.widths else 4,
            tile_elements=TILE_ELEMENTS,
            tail_bits=tail_bits,
        )

    def fixed_bytes(self, fmt: ElementFormat, elements: int) -> int:
        """Bytes of a segment but for its tail's words and the padding at its end."""
        return self.layout(fmt, elements, 0).tail + (0 if self.method is Method.STORED else TAIL_SLACK)

    def tail_costs(self, codebooks: tuple[bytes, ...]) -> NDArray[np.int64]:
        """(256,) bits that each exponent takes in the tail: those of every tier it reaches after the first."""
        if self.method is Method.STORED:
            return np.zeros(256, np.int64)
        costs = np.full(256, sum(self.widths[1:]) + self.escape_bits)
        for tier in reversed(range(len(codebooks))):
            costs[list(codebooks[tier])] = sum(self.widths[1 : tier + 1])
        return costs

    def tail_bounds(self, elements: Size, escapes: Size) -> tuple[Size, Size]:
        """Fewest and most bits that the tail of a segment with these counts can have."""
        fixed = escapes * self.escape_bits
        deeper = sum(self.widths[1:])
        return fixed + escapes * deeper, fixed + elements * deeper

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Exponents in the codebook of each tier; for ``TOP16`` its one codebook."""
        if self.method is Method.TOP16:
            return (16,)
        return tuple(2**width - 1 for width in self.widths)

    @property
    def escape_bits(self) -> int:
        """Bits in the tail for an exponent that no codebook holds."""
        return 24 if self.method is Method.TOP16 else 8


@lru_cache(maxsize=1024)  # nearly all segments have the same number of elements
def _layout(schedule: Schedule, fmt: ElementFormat, elements: int) -> Layout[int]:
    """``Schedule.layout`` without a tail."""
    return schedule._layout(fmt, elements, 0)


STORED = Schedule(Method.STORED)
TOP16 = Schedule(Method.TOP16)
CANDIDATES = (STORED, TOP16, *(Schedule(Method.TIERS, widths) for widths in ((4,), (3,), (2, 3), (2, 2, 3))))


def encoded_bytes(
    schedule: Schedule, fmt: ElementFormat, histogram: NDArray[np.int64], codebooks: tuple[bytes, ...]
) -> int:
    """Exact size of the segment whose exponents have these (256,) counts, header and padding included."""
    tail_bits = int(histogram @ schedule.tail_costs(codebooks))
    return schedule.layout(fmt, int(histogram.sum()), tail_bits).segment_bytes


def exponent_order(histogram: NDArray[np.int64]) -> NDArray[np.intp]:
    """(256,) exponents, most frequent first; equal counts in order of value."""
    return np.argsort(-histogram, kind="stable")


@dataclass(frozen=True, slots=True)
class CountSurvey:
    """What follows from exponent counts for some schedules, exactly.

    ``total`` are the (256,) counts of all segments, ``order`` the (256,) exponents as codebooks take them.
    ``tail_bits`` and ``escapes``, (schedules, segments), are what headers will state, ``elements`` are (segments,).
    """

    schedules: tuple[Schedule, ...]
    total: NDArray[np.int64]
    order: NDArray[np.int64]
    tail_bits: NDArray[np.int64]
    escapes: NDArray[np.int64]
    elements: NDArray[np.int64]

    def segment_bytes(self, fmt: ElementFormat) -> NDArray[np.int64]:
        """(schedules, segments) encoded sizes, headers, indices and padding counted."""
        fixed = np.empty_like(self.tail_bits)
        if self.elements.size:
            same = int(self.elements[0])
            fixed[:] = _fixed_bytes(self.schedules, fmt, same)
            for place in (self.elements != same).nonzero()[0].tolist():  # none but the last is another, as a rule
                fixed[:, place] = _fixed_bytes(self.schedules, fmt, int(self.elements[place]))[:, 0]
        return align(fixed + ((self.tail_bits + 31) >> 5 << 2), SEGMENT_ALIGN)


def survey_counts(
    schedules: tuple[Schedule, ...],
    counts: NDArray[np.integer[Any]],
    ranking: NDArray[np.int64] | None = None,
) -> CountSurvey:
    """Survey segments with these (segments, 256) exponent counts; ``ranking`` replaces ``total`` to order codebooks.

    All follows from one product of the counts, in order of rank, by what each rank costs; in float64, which is exact
    below 2**53.
    """
    costs, number = _costs_by_rank(schedules), len(schedules)
    compiled = _compiled()
    if compiled is None:
        total = counts.sum(axis=0, dtype=np.int64)
        order = exponent_order(total if ranking is None else ranking)
        used = order[: int(np.flatnonzero(total[order])[-1]) + 1] if total.any() else order[:0]
        sums = (counts[:, used].astype(np.float64) @ costs[: used.size]).astype(np.int64).T
    else:
        total, order = np.zeros(256, np.int64), np.empty(256, np.int64)
        sums = np.empty((costs.shape[1], len(counts)), np.int64)
        compiled(counts, _NO_RANKING if ranking is None else ranking, costs, total, order, sums)
    return CountSurvey(schedules, total, order, sums[:number], sums[number:-1], sums[-1])


@cache
def _compiled() -> Callable[..., None] | None:
    """The compiled survey, where there is numba."""
    try:
        from splitzip_aio.codec.fast_plan import survey_counts
    except ImportError:
        return None
    return survey_counts


def choose_schedule(
    fmt: ElementFormat,
    histograms: Sequence[NDArray[np.int64]] | NDArray[np.int64],
    *,
    ranking: NDArray[np.int64] | None = None,
) -> Schedule:
    """The candidate with the fewest encoded bytes for a tensor, headers, indices and padding counted.

    ``histograms`` are (segments, 256) exponent counts. One codebook serves all segments: that of ``ranking``, (256,)
    counts, by default the sum of the histograms. Of equal sizes the simplest wins, in the order of ``CANDIDATES``.
    """
    survey = survey_counts(candidates(fmt), np.asarray(histograms, np.int64).reshape(-1, 256), ranking)
    return survey.schedules[int(survey.segment_bytes(fmt).sum(axis=1).argmin())]


@lru_cache
def candidates(fmt: ElementFormat) -> tuple[Schedule, ...]:
    """Those of ``CANDIDATES`` that can code this format."""
    return tuple(candidate for candidate in CANDIDATES if candidate.applies_to(fmt))


@lru_cache(maxsize=1024)  # few calls have other arguments
def _fixed_bytes(schedules: tuple[Schedule, ...], fmt: ElementFormat, elements: int) -> NDArray[np.int64]:
    """(schedules, 1) ``Schedule.fixed_bytes`` of each."""
    return np.array([[each.fixed_bytes(fmt, elements)] for each in schedules], np.int64)


@lru_cache
def _costs_by_rank(schedules: tuple[Schedule, ...]) -> NDArray[np.float64]:
    """(256, n) costs of the most frequent exponent, the next, and so on.

    Of each schedule the bits in the tail, then of each whether it is an escape, then 1, which counts elements.
    """
    falling = np.arange(256, 0, -1)
    tails = [each.tail_costs(each.codebooks(falling, BF16)) for each in schedules]
    coded = [256 if each.method is Method.STORED else sum(each.codebook_sizes) for each in schedules]
    escaped = [np.arange(256) >= limit for limit in coded]
    return np.stack([*tails, *escaped, np.ones(256)], axis=1).astype(np.float64)
