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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    "CodingCosts",
    "Method",
    "Schedule",
    "candidates",
    "choose_schedule",
    "coding_costs",
    "encoded_bytes",
    "exponent_order",
    "total_counts",
]

MAX_DEPTH = 4
MAX_WIDTH = 4


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
        """Bytes of a segment but for its tail's words and the padding at its end; few calls have other arguments."""
        return _fixed_bytes(self, fmt, elements)

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


@lru_cache(maxsize=1024)
def _fixed_bytes(schedule: Schedule, fmt: ElementFormat, elements: int) -> int:
    return schedule.layout(fmt, elements, 0).tail + (0 if schedule.method is Method.STORED else TAIL_SLACK)


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


def total_counts(counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """(256,) sums of (segments, 256) exponent counts.

    Counts of 32 bits are added up in 32 bits, which is several times faster, as far as no sum can exceed them: a
    segment has at most 2**24 elements.
    """
    if counts.dtype.itemsize > 4 or len(counts) < 2:
        return counts.sum(axis=0, dtype=np.int64)
    parts = [counts[start : start + 64] for start in range(0, len(counts), 64)]
    return np.add.reduce([np.add.reduce(part, axis=0, dtype=np.int32) for part in parts], axis=0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CodingCosts:
    """What each of some schedules makes of each segment of a tensor: (schedules, segments) arrays.

    ``segment_bytes`` are exact encoded sizes, headers, indices and padding counted; ``tail_bits`` and ``escapes`` are
    what the headers will state.
    """

    schedules: tuple[Schedule, ...]
    segment_bytes: NDArray[np.int64]
    tail_bits: NDArray[np.int64]
    escapes: NDArray[np.int64]

    @property
    def cheapest(self) -> int:
        """Index of the schedule with the fewest bytes for all segments, of equals the first."""
        return int(self.segment_bytes.sum(axis=1).argmin())


def coding_costs(
    schedules: tuple[Schedule, ...],
    fmt: ElementFormat,
    counts: NDArray[np.integer[Any]],
    *,
    total: NDArray[np.int64],
    order: NDArray[np.intp],
) -> CodingCosts:
    """Costs of segments with these (segments, 256) exponent counts, whose sum is ``total``.

    Codebooks take exponents in the given ``order``. All follows from one product of the counts, in that order and
    without exponents that do not occur, by what each rank costs; in float64, which is exact below 2**53.
    """
    ranks = np.flatnonzero(total[order])
    occurring = int(ranks[-1]) + 1 if ranks.size else 0
    by_rank = counts.take(order[:occurring], axis=1).astype(np.float64)
    sums = (_costs_by_rank(schedules)[:, :occurring] @ by_rank.T).astype(np.int64)
    number = len(schedules)
    tail_bits, escapes, elements = sums[:number], sums[number:-1], sums[-1]
    distinct = sorted(set(elements.tolist()))  # all segments but the last have the same number
    fixed = np.array([[each.fixed_bytes(fmt, count) for count in distinct] for each in schedules], np.int64)
    ends = fixed.take(np.searchsorted(distinct, elements), axis=1) if distinct else np.zeros_like(tail_bits)
    return CodingCosts(schedules, align(ends + ((tail_bits + 31) >> 5 << 2), SEGMENT_ALIGN), tail_bits, escapes)


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
    counts = np.asarray(histograms, np.int64).reshape(-1, 256)
    total = total_counts(counts)
    order = exponent_order(total if ranking is None else ranking)
    costs = coding_costs(candidates(fmt), fmt, counts, total=total, order=order)
    return costs.schedules[costs.cheapest]


@lru_cache
def candidates(fmt: ElementFormat) -> tuple[Schedule, ...]:
    """Those of ``CANDIDATES`` that can code this format."""
    return tuple(candidate for candidate in CANDIDATES if candidate.applies_to(fmt))


@lru_cache
def _costs_by_rank(schedules: tuple[Schedule, ...]) -> NDArray[np.float64]:
    """(n, 256) costs of the most frequent exponent, the next, and so on.

    Of each schedule the bits in the tail, then of each whether it is an escape, then 1, which counts elements.
    """
    falling = np.arange(256, 0, -1)
    tails = [each.tail_costs(each.codebooks(falling, BF16)) for each in schedules]
    coded = [256 if each.method is Method.STORED else sum(each.codebook_sizes) for each in schedules]
    escaped = [np.arange(256) >= limit for limit in coded]
    return np.stack([*tails, *escaped, np.ones(256)]).astype(np.float64)
