"""From a tensor to its segments: where it is cut, how it is coded, how large each segment becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec.formats import RAW, ElementFormat
from splitzip_aio.codec.layout import SEGMENT_ELEMENTS
from splitzip_aio.codec.schedule import Schedule, candidates, survey_counts
from splitzip_aio.errors import InvalidArgumentError

__all__ = ["SegmentPlan", "decoded_segment_bytes", "plan_segments", "segment_spans"]

_RAW_BYTES_PER_ELEMENT = 2  # as many as a BF16 has, so that segments of both are alike


def decoded_segment_bytes(fmt: ElementFormat, segment_elements: int = SEGMENT_ELEMENTS) -> int:
    """Decoded bytes of every segment of a tensor but its last. Of ``RAW``, two bytes count as one element."""
    return segment_elements * (_RAW_BYTES_PER_ELEMENT if fmt == RAW else fmt.element_bytes)


def segment_spans(decoded_bytes: int, fmt: ElementFormat) -> Iterator[tuple[int, int]]:
    """Start and stop of each segment, in bytes of the tensor; none for a tensor of no bytes."""
    step = decoded_segment_bytes(fmt)
    for start in range(0, decoded_bytes, step):
        yield start, min(start + step, decoded_bytes)


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """How a tensor is coded, known from its histograms before any of it is encoded.

    ``codebooks`` has one entry per tier, shared by all segments. ``numbers``, (3, segments) int64, are exact encoded
    sizes in bytes, then the tail bits and the escapes that headers will state. ``counts`` are the exponents of all
    segments, (256,).
    """

    schedule: Schedule
    codebooks: tuple[bytes, ...]
    numbers: NDArray[np.int64]
    counts: NDArray[np.int64]

    @cached_property
    def segments(self) -> tuple[int, ...]:
        """Encoded size of each segment, in bytes."""
        return tuple(self.numbers[0].tolist())

    @cached_property
    def tail_bits(self) -> tuple[int, ...]:
        """Bits in each segment's tail."""
        return tuple(self.numbers[1].tolist())

    @cached_property
    def escapes(self) -> tuple[int, ...]:
        """Exponents of each segment that no codebook holds."""
        return tuple(self.numbers[2].tolist())

    @property
    def nbytes(self) -> int:
        """Encoded bytes of all segments."""
        return int(self.numbers[0].sum())

    def part(self, start: int, stop: int) -> SegmentPlan:
        """The plan of segments ``start`` to ``stop`` alone."""
        return SegmentPlan(self.schedule, self.codebooks, self.numbers[:, start:stop], self.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SegmentPlan):
            return NotImplemented
        coding = (self.schedule, self.codebooks) == (other.schedule, other.codebooks)
        return coding and np.array_equal(self.numbers, other.numbers)

    __hash__ = None  # type: ignore[assignment]


def plan_segments(
    fmt: ElementFormat,
    histograms: Sequence[NDArray[np.int64]] | NDArray[np.integer[Any]],
    *,
    schedule: Schedule | None = None,
    ranking: NDArray[np.int64] | None = None,
) -> SegmentPlan:
    """Plan a tensor from (segments, 256) exponent counts, as ``cpu.histogram`` gives them.

    ``schedule`` defaults to the candidate with the fewest bytes (``choose_schedule``). ``ranking``, (256,) counts,
    orders the codebooks; it defaults to the tensor's own, the sum of ``histograms``.

    Raises:
        InvalidArgumentError: ``schedule`` cannot code ``fmt``.
    """
    if schedule is not None and not schedule.applies_to(fmt):
        raise InvalidArgumentError(f"schedule {schedule} cannot code {fmt.name} elements; they can be 'stored'")
    counts = np.asarray(histograms, None if len(histograms) else np.int64).reshape(-1, 256)
    survey = survey_counts(candidates(fmt) if schedule is None else (schedule,), counts, ranking)
    sizes = survey.segment_bytes(fmt)
    place = int(sizes.sum(axis=1).argmin()) if schedule is None else 0
    chosen = survey.schedules[place]
    numbers = np.array((sizes[place], survey.tail_bits[place], survey.escapes[place]))
    return SegmentPlan(chosen, chosen.codebooks_of(survey.order, fmt), numbers, survey.total)
