"""Codebooks: which exponents are frequent, measured on a tensor or given from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec import cpu
from splitzip_aio.codec.dtypes import tensor_contents
from splitzip_aio.codec.formats import RAW, ElementFormat, element_format
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.codec.segments import segment_spans
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["SplitZipCodebook", "calibrate_codebook"]

_TOP = 16  # exponents in the published codebook, whose share of the elements is its quality number


class _Fields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    dtype: str
    exponents: list[int]
    coverage: float


@dataclass(frozen=True, slots=True)
class SplitZipCodebook:
    """The exponents of a dtype in order of falling frequency, from which every schedule takes its codebooks.

    ``dtype`` is a safetensors name with an exponent worth coding (BF16, F16, F32, F8_E4M3, F8_E5M2). ``exponents``
    are those that occur, each once; equal counts in order of value. ``coverage`` is the share of elements whose
    exponent is among the first 16, in [0, 1]: what one codebook of 4 bits reaches. Coding is exact with any
    codebook: an exponent that it lacks is written in full.

    Raises:
        InvalidArgumentError: a field is out of range, or an exponent is repeated or too large for ``dtype``.
    """

    dtype: str
    exponents: bytes
    coverage: float

    def __post_init__(self) -> None:
        fmt = element_format(self.dtype)
        if fmt == RAW:
            raise InvalidArgumentError(f"codebook dtype {self.dtype!r} has no exponent to code")
        if len(set(self.exponents)) != len(self.exponents):
            raise InvalidArgumentError(f"codebook exponents {list(self.exponents)} are not distinct")
        if self.exponents and max(self.exponents) >= 1 << fmt.exponent_bits:
            largest = (1 << fmt.exponent_bits) - 1
            raise InvalidArgumentError(
                f"codebook exponent {max(self.exponents)}: {self.dtype} has exponents 0 to {largest}"
            )
        if not 0.0 <= self.coverage <= 1.0:
            raise InvalidArgumentError(f"codebook coverage {self.coverage}: expected a share in [0, 1]")

    @classmethod
    def from_histogram(cls, histogram: NDArray[np.int64], fmt: ElementFormat) -> SplitZipCodebook:
        """The codebook of elements whose exponents have these (256,) counts; no elements count as covered."""
        order = np.argsort(-histogram, kind="stable")
        counts = histogram[order]
        total = int(counts.sum())
        coverage = int(counts[:_TOP].sum()) / total if total else 1.0
        return cls(fmt.name, order[counts > 0].astype(np.uint8).tobytes(), coverage)

    @property
    def fmt(self) -> ElementFormat:
        """Element format of ``dtype``."""
        return element_format(self.dtype)

    @property
    def ranking(self) -> NDArray[np.int64]:
        """(256,) counts that stand for this order: they fall as the rank rises, and are 0 for exponents not listed."""
        counts = np.zeros(256, np.int64)
        counts[list(self.exponents)] = np.arange(len(self.exponents), 0, -1)
        return counts

    def for_schedule(self, schedule: Schedule) -> tuple[bytes, ...]:
        """The codebook of each tier of ``schedule``, as ``Schedule.codebooks`` gives them; () when it stores."""
        return schedule.codebooks(self.ranking, self.fmt)

    def to_json(self) -> str:
        """One line of JSON: dtype, exponents as numbers, coverage."""
        return msgspec.json.encode(_Fields(self.dtype, list(self.exponents), self.coverage)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> SplitZipCodebook:
        """Read what ``to_json`` wrote.

        Raises:
            InvalidArgumentError: the text is not such JSON, or a field is out of range.
        """
        try:
            fields = msgspec.json.decode(text, type=_Fields)
            exponents = bytes(fields.exponents)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise InvalidArgumentError(f"codebook JSON: {exc}") from exc
        return cls(fields.dtype, exponents, fields.coverage)


def calibrate_codebook(tensor: torch.Tensor) -> tuple[SplitZipCodebook, float]:
    """Measure a tensor's exponents: its codebook, and the share of its elements that the first 16 cover, in [0, 1].

    ``tensor`` has any shape, strides and device; its dtype is one that ``SplitZipCodebook`` names.

    Raises:
        UnsupportedError: elements of this dtype have no exponent to code, or the tensor is not dense.
    """
    dtype, _, contents = tensor_contents(tensor)
    fmt = element_format(dtype)
    if fmt == RAW:
        raise UnsupportedError(f"{tensor.dtype} elements have no exponent to code; they are stored")
    counts = np.zeros(256, np.int64)
    for start, stop in segment_spans(contents.size, fmt):
        counts += cpu.histogram(contents[start:stop], fmt)
    codebook = SplitZipCodebook.from_histogram(counts, fmt)
    return codebook, codebook.coverage
