"""How far a long operation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Progress", "ProgressCallback"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Decoded bytes done and in total, and the tensor at hand."""

    done_bytes: int
    total_bytes: int
    tensor: str


ProgressCallback: TypeAlias = Callable[[Progress], None]
"""Called after each segment, in the thread that does the work; an exception it raises ends the operation."""
