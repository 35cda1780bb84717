"""Where the parts of a segment lie: header, planes, index, tail.

Every offset follows from the schedule, the format and three counts, so a header that states other offsets is damaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CHUNK_ELEMENTS",
    "HEADER_BYTES",
    "MAX_SEGMENT_ELEMENTS",
    "PLANE_ALIGN",
    "SEGMENT_ALIGN",
    "SEGMENT_ELEMENTS",
    "TAIL_SLACK",
    "TILE_ELEMENTS",
    "Layout",
    "Size",
    "align",
]

HEADER_BYTES = 160
SEGMENT_ALIGN = 32
PLANE_ALIGN = 16
SEGMENT_ELEMENTS = 1 << 20
MAX_SEGMENT_ELEMENTS = 1 << 22
TILE_ELEMENTS = 8192
CHUNK_ELEMENTS = 1024
TAIL_SLACK = 8  # zero bytes after the tail's last word, so that a decoder may read a word too far


Size = TypeVar("Size", int, NDArray[np.int64])
"""One segment's number, or (segments,) numbers at once."""


def align(size: Size, alignment: int) -> Size:
    """``size`` rounded up to a multiple of ``alignment``, a power of two."""
    return (size + (alignment - 1)) & -alignment


@dataclass(frozen=True, slots=True)
class Layout(Generic[Size]):
    """Byte offsets from the start of a segment, or of each of many; ``segment_bytes`` includes header and padding.

    ``low`` and ``high`` are the residual planes, ``codes`` the plane of the first tier, ``index`` one u32 per tile
    and one for the end, ``tail`` the rest. An absent part has the offset where it would have started.
    """

    low: int
    high: Size
    codes: Size
    index: Size
    tail: Size
    segment_bytes: Size

    @classmethod
    def of(
        cls,
        elements: Size,
        *,
        low_bits: int,
        high_bits: int,
        code_bits: int,
        tile_elements: int,
        tail_bits: Size,
    ) -> Layout[Size]:
        """Place planes of so many bits an element, an index of u32 entries and ``tail_bits`` one after another.

        The index has an entry for every ``tile_elements`` elements and one for the end; 0 leaves out index and tail.
        """
        low = HEADER_BYTES
        high = align(low + (elements * low_bits + 7) // 8, PLANE_ALIGN)
        codes = align(high + (elements * high_bits + 7) // 8, PLANE_ALIGN)
        index = align(codes + (elements * code_bits + 7) // 8, PLANE_ALIGN)
        if not tile_elements:
            return cls(low, high, codes, index, index, align(index, SEGMENT_ALIGN))
        tail = align(index + 4 * (-(-elements // tile_elements) + 1), PLANE_ALIGN)
        return cls(low, high, codes, index, tail, _end(tail, tail_bits))

    def with_tail(self, tail_bits: Size) -> Layout[Size]:
        """This layout, of a coded segment, with another tail."""
        return Layout(self.low, self.high, self.codes, self.index, self.tail, _end(self.tail, tail_bits))


def _end(tail: Size, tail_bits: Size) -> Size:
    """Where a segment ends whose tail of so many bits starts at ``tail``."""
    return align(tail + (tail_bits + 31) // 32 * 4 + TAIL_SLACK, SEGMENT_ALIGN)
