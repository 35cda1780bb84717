"""How a tensor is cut into segments: the unit of reading, encoding and checking."""

from __future__ import annotations

from splitzip_aio.codec.formats import element_format
from splitzip_aio.codec.segments import decoded_segment_bytes

__all__ = ["segment_bytes", "segment_count", "segment_range"]


def segment_bytes(dtype: str, segment_elements: int) -> int:
    """Decoded bytes of every segment of a tensor but its last."""
    return decoded_segment_bytes(element_format(dtype), segment_elements)


def segment_count(nbytes: int, dtype: str, segment_elements: int) -> int:
    """Segments of a tensor of ``nbytes`` bytes; none for an empty one."""
    return -(-nbytes // segment_bytes(dtype, segment_elements))


def segment_range(place: int, nbytes: int, dtype: str, segment_elements: int) -> range:
    """Which of the tensor's ``nbytes`` bytes segment number ``place`` decodes to."""
    step = segment_bytes(dtype, segment_elements)
    return range(place * step, min((place + 1) * step, nbytes))
