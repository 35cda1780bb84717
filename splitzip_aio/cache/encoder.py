"""One tensor in two passes: first what it is and what coding it would cost, then the segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitzip_aio.cache.content import ContentHasher
from splitzip_aio.cache.segments import segment_bytes
from splitzip_aio.codec.codebook import SplitZipCodebook
from splitzip_aio.codec.coders import SegmentCoder
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
    """What the first pass learns: content key, exponent counts of each segment, and a digest of each batch read.

    ``coverage`` is the share of elements whose exponent is among the 16 most frequent; None without such elements.
    """

    key: str
    fmt: ElementFormat
    histograms: tuple[NDArray[np.int64], ...]
    digests: tuple[int, ...]
    coverage: float | None


class TensorEncoder:
    """Surveys and encodes tensors through one buffer of a batch of segments, which bounds its memory.

    ``schedule`` is used wherever it applies and does not cost more than storing; None chooses the cheapest. A tensor
    whose coverage is below ``coverage_min`` is stored. ``coder`` does the work and says how large a batch is.
    """

    def __init__(
        self,
        *,
        schedule: Schedule | None,
        coverage_min: float | None,
        segment_elements: int,
        coder: SegmentCoder,
    ) -> None:
        self._schedule = schedule
        self._coverage_min = coverage_min
        self._segment_elements = segment_elements
        self._coder = coder
        self._buffer = np.empty(0, np.uint8)
        self._held: range | None = None  # which bytes of the surveyed tensor the buffer still holds

    def survey(self, data: TensorData) -> Survey:
        """Read all of a tensor once."""
        fmt = element_format(data.dtype)
        step = segment_bytes(data.dtype, self._segment_elements)
        hasher = ContentHasher(data.dtype, data.shape)
        histograms: list[NDArray[np.int64]] = []
        digests = []
        self._held = None
        for where in self._batches(data):
            batch = self._read(data, where)
            hasher.update(batch)
            histograms += self._coder.count(batch, fmt, step)
            digests.append(xxhash.xxh3_64_intdigest(batch.data))
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
        step = segment_bytes(data.dtype, self._segment_elements)
        for where, digest in zip(self._batches(data), survey.digests, strict=True):
            batch = self._read(data, where)
            if xxhash.xxh3_64_intdigest(batch.data) != digest:
                raise SourceChangedError(
                    f"bytes {where.start} to {where.stop} of a {data.dtype} tensor {list(data.shape)} changed while it "
                    "was read; build again once nothing writes to it"
                )
            part = plan.part(where.start // step, -(-where.stop // step))
            starts = range(0, batch.size, step)
            for start, segment in zip(starts, self._coder.encode(batch, survey.fmt, step, part), strict=True):
                yield segment, min(step, batch.size - start)

    def _batches(self, data: TensorData) -> Iterator[range]:
        """The tensor's bytes, a batch of whole segments at a time."""
        step = segment_bytes(data.dtype, self._segment_elements)
        size = max(1, self._coder.batch_bytes // step) * step
        for start in range(0, data.nbytes, size):
            yield range(start, min(start + size, data.nbytes))

    def _read(self, data: TensorData, where: range) -> NDArray[np.uint8]:
        if self._buffer.size < len(where):
            self._held = None
            self._buffer = self._coder.allocate(len(where))
        batch = self._buffer[: len(where)]
        if self._held != where:
            self._held = None
            data.read_into(where.start, batch)
            self._held = where
        return batch


def _coverage(fmt: ElementFormat, histograms: Sequence[NDArray[np.int64]]) -> float | None:
    if fmt == RAW or not histograms:
        return None
    return SplitZipCodebook.from_histogram(np.sum(histograms, axis=0), fmt).coverage
