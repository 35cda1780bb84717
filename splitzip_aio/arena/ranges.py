"""Which ranges of an arena are taken: first fit, with neighbours joined when they come back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["RANGE_ALIGN", "Ranges"]

RANGE_ALIGN = 256
"""Offsets and sizes of ranges are multiples of this: what CUDA's own allocations are aligned to."""


class Ranges:
    """Book-keeping of the bytes 0 to ``capacity``; the memory itself is someone else's.

    Layers are few and large, so the free list is short and searched from the start; a range of no bytes takes the least
    there is, so that every range has an offset of its own.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self._taken: dict[int, int] = {}
        whole = capacity // RANGE_ALIGN * RANGE_ALIGN
        self._free: list[tuple[int, int]] = [(0, whole)] if whole else []  # (offset, size), by offset, never adjacent

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free range."""
        return max((size for _, size in self._free), default=0)

    def fits(self, nbytes: int, freeing: Iterable[int] = ()) -> bool:
        """Whether ``take`` would succeed after ``give_back`` of the offsets ``freeing``."""
        size = _rounded(nbytes)
        holes = sorted([*self._free, *((offset, self._taken[offset]) for offset in freeing)])
        end = run = 0
        for offset, length in holes:
            run = run + length if offset == end else length
            end = offset + length
            if run >= size:
                return True
        return False

    def take(self, nbytes: int) -> int | None:
        """Offset of the first free range of ``nbytes`` bytes, now taken; None if there is none."""
        size = _rounded(nbytes)
        for place, (offset, length) in enumerate(self._free):
            if length >= size:
                self._free[place : place + 1] = [(offset + size, length - size)] if length > size else []
                self._taken[offset] = size
                self.used += size
                self.peak = max(self.peak, self.used)
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the range taken at ``offset``. Raises KeyError where none was."""
        size = self._taken.pop(offset)
        self.used -= size
        place = bisect_left(self._free, (offset, 0))
        first, last, end = place, place, offset + size
        if place and sum(self._free[place - 1]) == offset:
            first, offset = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            last, end = place + 1, sum(self._free[place])
        self._free[first:last] = [(offset, end - offset)]


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // RANGE_ALIGN), 1) * RANGE_ALIGN
