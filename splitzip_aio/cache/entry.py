"""What a cache says of one tensor: what it is, and where its segments are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from splitzip_aio.cache.manifest import Blob, Tensor
from splitzip_aio.cache.segments import segment_range
from splitzip_aio.codec.dtypes import tensor_bytes

__all__ = ["Entry", "SegmentExtent"]


@dataclass(frozen=True, slots=True)
class SegmentExtent:
    """A segment: ``nbytes`` bytes at ``offset`` of pack number ``pack``.

    It decodes to bytes ``start`` to ``stop`` of the tensor.
    """

    pack: int
    offset: int
    nbytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a cache.

    Attributes:
        name: the tensor's name.
        dtype: safetensors dtype name; ``splitzip_aio.codec.dtypes.torch_view`` makes a torch tensor of the bytes.
        shape: dimensions.
        nbytes: bytes of the elements, decoded.
        layer: the tensor's layer.
        key: content key; tied tensors have the same.
        schedule: how exponents are coded, such as ``"2,2,3"``, or ``"stored"``.
        coverage: share of elements whose exponent is among the 16 most frequent; None for dtypes without a coded one.
        pack: number of the pack that holds the tensor.
        offset: where its segments start in the pack, in bytes.
        segments: encoded size of each segment, in bytes; they lie one after another.
        segment_elements: elements that each segment but the last decodes to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    layer: str
    key: str
    schedule: str
    coverage: float | None
    pack: int
    offset: int
    segments: tuple[int, ...]
    segment_elements: int

    @classmethod
    def of(cls, tensor: Tensor, blob: Blob, layer: str, segment_elements: int) -> Entry:
        """Entry of a tensor and the blob it refers to."""
        return cls(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            nbytes=tensor_bytes(tensor.dtype, tensor.shape),
            layer=layer,
            key=blob.key,
            schedule=blob.schedule,
            coverage=blob.coverage,
            pack=blob.pack,
            offset=blob.offset,
            segments=blob.segments,
            segment_elements=segment_elements,
        )

    @property
    def encoded_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments)

    def extents(self) -> Iterator[SegmentExtent]:
        """The segments in order; none for an empty tensor."""
        offset = self.offset
        for place, nbytes in enumerate(self.segments):
            decoded = segment_range(place, self.nbytes, self.dtype, self.segment_elements)
            yield SegmentExtent(self.pack, offset, nbytes, decoded.start, decoded.stop)
            offset += nbytes
