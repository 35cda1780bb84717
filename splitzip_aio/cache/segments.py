"""How a tensor is cut into segments: the unit of reading, encoding and checking."""

from __future__ import annotations

from splitzip_aio.codec.formats import RAW, element_format

__all__ = ["RAW_BYTES_PER_ELEMENT", "segment_bytes", "segment_count", "segment_range"]

RAW_BYTES_PER_ELEMENT = 2
"""Bytes of a dtype without a coded exponent that count as one element of a segment: as many as a BF16 has."""


def segment_bytes(dtype: str, segment_elements: int) -> int:
    """Decoded bytes of every segment of a tensor but its last."""
    fmt = element_format(dtype)
    return segment_elements * (RAW_BYTES_PER_ELEMENT if fmt == RAW else fmt.element_bytes)


def segment_count(nbytes: int, dtype: str, segment_elements: int) -> int:
    """Segments of a tensor of ``nbytes`` bytes; none for an empty one."""
    return -(-nbytes // segment_bytes(dtype, segment_elements))


def segment_range(place: int, nbytes: int, dtype: str, segment_elements: int) -> range:
    """Which of the tensor's ``nbytes`` bytes segment number ``place`` decodes to."""
    step = segment_bytes(dtype, segment_elements)
    return range(place * step, min((place + 1) * step, nbytes))
