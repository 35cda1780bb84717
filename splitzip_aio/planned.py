"""What a slot is filled with: the unit of reading, copying and decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["PlannedRead", "PlannedSegment"]


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A segment of a read: where it is in the slot, and in the layer's range where it decodes to.

    Attributes:
        source: bytes from the start of the slot; a multiple of 32.
        nbytes: bytes of the segment as the manifest has it.
        destination: bytes from the start of the layer's range.
        decoded_bytes: bytes it must decode to.
        tensor: the first tensor of the layer that it is part of.
    """

    source: int
    nbytes: int
    destination: int
    decoded_bytes: int
    tensor: str


@dataclass(frozen=True, eq=False)
class PlannedRead:
    """What one slot is filled with: a run of whole segments, rounded outward to whole pages.

    It is the same object each time that it is read, and compared as such, so that an arena can keep what it found out.

    Attributes:
        pack: index of the pack.
        path: the pack's path.
        offset: where it starts in the pack, a multiple of 4096.
        nbytes: how much is read, a multiple of 4096.
        segments: at least one.
    """

    pack: int
    path: str
    offset: int
    nbytes: int
    segments: tuple[PlannedSegment, ...]

    @cached_property
    def encoded_bytes(self) -> int:
        """Bytes of all segments, without what is read around them."""
        return sum(segment.nbytes for segment in self.segments)

    @cached_property
    def decoded_bytes(self) -> int:
        """Bytes that all segments decode to."""
        return sum(segment.decoded_bytes for segment in self.segments)

    def where(self, place: int) -> str:
        """What to call a segment in an error: its tensor, pack and offset."""
        segment = self.segments[place]
        return f"tensor {segment.tensor!r}, {self.path} at offset {self.offset + segment.source}"
