"""One tensor in two passes: first what it is and what coding it would cost, then the segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.cache.content import ContentHasher
from splitzip_aio.cache.segments import segment_count, segment_range
from splitzip_aio.codec import cpu
from splitzip_aio.codec.codebook import SplitZipCodebook
from splitzip_aio.codec.formats import RAW, ElementFormat, element_format
from splitzip_aio.codec.schedule import STORED, Schedule
from splitzip_aio.codec.segments import SegmentPlan, plan_segments
from splitzip_aio.errors import SourceChangedError

__all__ = ["ArrayTensor", "Survey", "TensorData", "TensorEncoder"]


class TensorData(Protocol):
    """A tensor that can be read piece by piece, more than once."""

    @property
    def dtype(self) -> str:
        """Safetensors dtype name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``, (n,) uint8, from byte ``offset`` on."""


@dataclass(frozen=True, slots=True)
class ArrayTensor:
    """A tensor in memory: ``contents`` are its (nbytes,) uint8 bytes."""

    dtype: str
    shape: tuple[int, ...]
    contents: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.contents.size

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``, (n,) uint8, from byte ``offset`` on."""
        out[:] = self.contents[offset : offset + out.size]


@dataclass(frozen=True, slots=True)
class Survey:
    """What the first pass learns: content key, and of each segment its exponent counts and a digest.

    ``coverage`` is the share of elements whose exponent is among the 16 most frequent; None without such elements.
    """

    key: str
    fmt: ElementFormat
    histograms: tuple[NDArray[np.int64], ...]
    digests: tuple[int, ...]
    coverage: float | None


class TensorEncoder:
    """Surveys and encodes tensors through one buffer of one segment, which bounds its memory.

    ``schedule`` is used wherever it applies and does not cost more than storing; None chooses the cheapest. A tensor
    whose coverage is below ``coverage_min`` is stored.
    """

    def __init__(self, *, schedule: Schedule | None, coverage_min: float | None, segment_elements: int) -> None:
        self._schedule = schedule
        self._coverage_min = coverage_min
        self._segment_elements = segment_elements
        self._buffer = np.empty(0, np.uint8)
        self._held: int | None = None  # which segment of the surveyed tensor the buffer still holds

    def survey(self, data: TensorData) -> Survey:
        """Read all of a tensor once."""
        fmt = element_format(data.dtype)
        hasher = ContentHasher(data.dtype, data.shape)
        histograms, digests = [], []
        self._held = None
        for place in range(segment_count(data.nbytes, data.dtype, self._segment_elements)):
            piece = self._read(data, place)
            hasher.update(piece)
            histograms.append(cpu.histogram(piece, fmt))
            digests.append(xxhash.xxh3_64_intdigest(piece.data))
        return Survey(hasher.hexdigest(), fmt, tuple(histograms), tuple(digests), _coverage(fmt, histograms))

    def plan(self, survey: Survey) -> SegmentPlan:
        """How to code a surveyed tensor."""
        gate = self._coverage_min or 0.0
        if survey.coverage is None or survey.coverage < gate:
            return plan_segments(survey.fmt, survey.histograms, schedule=STORED)
        if self._schedule is None:
            return plan_segments(survey.fmt, survey.histograms)
        stored = plan_segments(survey.fmt, survey.histograms, schedule=STORED)
        if not self._schedule.applies_to(survey.fmt):
            return stored
        forced = plan_segments(survey.fmt, survey.histograms, schedule=self._schedule)
        return forced if sum(forced.segments) <= sum(stored.segments) else stored

    def segments(self, data: TensorData, survey: Survey, plan: SegmentPlan) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Encode the tensor surveyed last: each segment, (segment_bytes,) uint8, and how many bytes it decodes to.

        Raises:
            SourceChangedError: the second reading differs from the first.
        """
        for place, digest in enumerate(survey.digests):
            piece = self._read(data, place)
            if xxhash.xxh3_64_intdigest(piece.data) != digest:
                raise SourceChangedError(
                    f"segment {place} of a {data.dtype} tensor {list(data.shape)} changed while it was read; build "
                    "again once nothing writes to it"
                )
            yield cpu.encode_segment(piece, survey.fmt, plan.schedule, plan.codebooks), piece.size

    def _read(self, data: TensorData, place: int) -> NDArray[np.uint8]:
        where = segment_range(place, data.nbytes, data.dtype, self._segment_elements)
        if self._buffer.size < len(where):
            self._buffer = np.empty(len(where), np.uint8)
        piece = self._buffer[: len(where)]
        if self._held != place:
            self._held = None
            data.read_into(where.start, piece)
            self._held = place
        return piece


def _coverage(fmt: ElementFormat, histograms: Sequence[NDArray[np.int64]]) -> float | None:
    if fmt == RAW or not histograms:
        return None
    return SplitZipCodebook.from_histogram(np.sum(histograms, axis=0), fmt).coverage
