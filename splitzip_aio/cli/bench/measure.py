"""Repeated measurements, and how they are summed up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Times"]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of repeated runs: their median, and the fastest and slowest."""

    median_s: float
    least_s: float
    most_s: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Sum up at least one run."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def scaled(self, factor: float) -> Times:
        """The times of ``factor`` as much work."""
        return Times(self.median_s * factor, self.least_s * factor, self.most_s * factor, self.runs)

    def rate(self, nbytes: int) -> float:
        """GB/s of the median."""
        return nbytes / self.median_s / 1e9

    def __str__(self) -> str:
        return f"{self.median_s:.3f} s ({self.least_s:.3f}-{self.most_s:.3f})"
