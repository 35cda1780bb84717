"""Torch tensors to encoded payloads and back, on the CPU, without any file.

A payload is the segments of one tensor, one after another; its ``PayloadMeta`` says how to read them. A cache
keeps the same segments in packs, and the same facts in its manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.codec import cpu
from splitzip_aio.codec.codebook import SplitZipCodebook
from splitzip_aio.codec.dtypes import tensor_bytes, tensor_contents, torch_view
from splitzip_aio.codec.formats import RAW, ElementFormat, element_format
from splitzip_aio.codec.layout import HEADER_BYTES, SEGMENT_ALIGN
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.codec.segments import decoded_segment_bytes, plan_segments, segment_spans
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError

__all__ = ["PayloadMeta", "decode_torch", "encode_torch"]

_JSON_FORMAT = 2


class _Fields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON object of a ``PayloadMeta``."""

    format: int
    dtype: str
    shape: tuple[int, ...]
    schedule: str
    codebook: msgspec.Raw
    segments: tuple[int, ...]


_unaligned = (SEGMENT_ALIGN - 1).__and__  # for hundreds of sizes a call each of Python's own would take a while


@dataclass(frozen=True, slots=True)
class PayloadMeta:
    """What a payload decodes to, and where its segments are.

    ``dtype`` and ``shape`` are those of safetensors (of F4, ``shape`` counts single elements), ``segments`` the encoded
    sizes in bytes. ``codebook`` is the one that the tensor was coded with; None for a dtype without an exponent.

    Raises:
        InvalidArgumentError: no payload can have these fields.
    """

    dtype: str
    shape: tuple[int, ...]
    schedule: Schedule
    codebook: SplitZipCodebook | None
    segments: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            raw_bytes = tensor_bytes(self.dtype, self.shape)
        except ValueError as exc:
            raise InvalidArgumentError(f"payload of {self.dtype}: {exc}") from exc
        if not self.schedule.applies_to(self.fmt):
            raise InvalidArgumentError(f"payload of {self.dtype}: schedule {self.schedule} cannot code it")
        expected = None if self.fmt == RAW else self.dtype
        if (self.codebook and self.codebook.dtype) != expected:
            raise InvalidArgumentError(f"payload of {self.dtype}: expected a codebook of {expected}")
        if bool(raw_bytes) != bool(self.segments) or len(self.segments) > raw_bytes:
            raise InvalidArgumentError(f"payload of {self.dtype}: {len(self.segments)} segments for {raw_bytes} bytes")
        if self.segments and (min(self.segments) <= HEADER_BYTES or any(map(_unaligned, self.segments))):
            size = next(size for size in self.segments if size <= HEADER_BYTES or _unaligned(size))
            raise InvalidArgumentError(
                f"payload of {self.dtype}: segment of {size} bytes, expected a multiple of {SEGMENT_ALIGN} "
                f"above {HEADER_BYTES}"
            )

    @property
    def fmt(self) -> ElementFormat:
        """Element format of ``dtype``."""
        return element_format(self.dtype)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the decoded tensor."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the payload: all segments, headers and padding included."""
        return sum(self.segments)

    @property
    def ratio(self) -> float:
        """``compressed_bytes / raw_bytes``; 1.0 for an empty tensor."""
        return self.compressed_bytes / self.raw_bytes if self.segments else 1.0

    def to_json(self) -> str:
        """One line of JSON, for ``from_json``."""
        codebook = msgspec.Raw(self.codebook.to_json() if self.codebook else "null")
        fields = _Fields(_JSON_FORMAT, self.dtype, self.shape, str(self.schedule), codebook, self.segments)
        return msgspec.json.encode(fields).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> PayloadMeta:
        """Read what ``to_json`` wrote.

        Raises:
            InvalidArgumentError: the text is not such JSON, or no payload can have these fields.
        """
        try:
            fields = msgspec.json.decode(text, type=_Fields)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise InvalidArgumentError(f"payload JSON: {exc}") from exc
        if fields.format != _JSON_FORMAT:
            raise InvalidArgumentError(f"payload JSON: format {fields.format}, expected {_JSON_FORMAT}")
        raw = bytes(fields.codebook)
        codebook = None if raw == b"null" else SplitZipCodebook.from_json(raw)
        return cls(fields.dtype, fields.shape, Schedule.parse(fields.schedule), codebook, fields.segments)


def encode_torch(
    tensor: torch.Tensor,
    codebook: SplitZipCodebook | None = None,
    *,
    schedule: Schedule | str | tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, PayloadMeta]:
    """Encode a tensor losslessly; returns the payload, (compressed_bytes,) uint8 on the CPU, and its meta.

    ``tensor`` is dense, of any shape, strides, device and dtype that safetensors has. With a ``codebook``, of the
    tensor's dtype, its order is used instead of the tensor's own; what it lacks costs space and nothing else.
    ``schedule`` (``"2,2,3"``, ``"top16"``, ``"stored"``) defaults to the one with the fewest bytes.

    Raises:
        InvalidArgumentError: the schedule names none or cannot code this dtype, or the codebook is of another dtype.
        UnsupportedError: safetensors has no such dtype, or the tensor is not dense.
    """
    dtype, shape, contents = tensor_contents(tensor)
    fmt = element_format(dtype)
    if codebook is not None and codebook.dtype != dtype:
        raise InvalidArgumentError(f"a codebook of {codebook.dtype} cannot code {dtype} elements")
    spans = list(segment_spans(contents.size, fmt))
    histograms = [cpu.histogram(contents[start:stop], fmt) for start, stop in spans]
    if codebook is None and fmt != RAW:
        codebook = SplitZipCodebook.from_histogram(sum(histograms, np.zeros(256, np.int64)), fmt)
    plan = plan_segments(
        fmt,
        histograms,
        schedule=None if schedule is None else Schedule.parse(schedule),
        ranking=codebook.ranking if codebook else None,
    )
    payload = torch.empty(sum(plan.segments), dtype=torch.uint8)
    view: NDArray[np.uint8] = payload.numpy()
    largest = min(contents.size, decoded_segment_bytes(fmt))
    room = np.empty(cpu.encoding_room(largest, fmt, plan.schedule), np.uint8)
    for (start, stop), (begin, end) in zip(spans, _extents(plan.segments), strict=True):
        view[begin:end] = cpu.encode_segment(contents[start:stop], fmt, plan.schedule, plan.codebooks, out=room)
    return payload, PayloadMeta(dtype, shape, plan.schedule, codebook, plan.segments)


def decode_torch(payload: torch.Tensor, meta: PayloadMeta, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decode a payload, (compressed_bytes,) uint8 on the CPU, into the tensor that ``meta`` describes.

    ``out`` is a contiguous CPU tensor of its dtype and shape, by default a new one; it is returned. Every byte is
    covered by a checksum: a tensor that is returned is right.

    Raises:
        CorruptDataError: the payload is damaged, or not the one ``meta`` is of. What ``out`` holds then is undefined.
        InvalidArgumentError: ``payload`` or ``out`` is of another dtype, shape or device.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.device.type != "cpu":
        raise InvalidArgumentError(
            f"payload: expected (bytes,) uint8 on the CPU, found {_describe(payload)}; on a GPU use GpuSplitZipDecoder"
        )
    if payload.numel() != meta.compressed_bytes:
        raise CorruptDataError(
            f"payload of {payload.numel()} bytes, its meta says {meta.compressed_bytes}; encode the tensor again"
        )
    if out is None:
        memory = torch.empty(meta.raw_bytes, dtype=torch.uint8)
        out, contents = torch_view(memory, meta.dtype, meta.shape), memory.numpy()
    else:
        contents = _contents_to_fill(out, meta)
    encoded: NDArray[np.uint8] = payload.detach().contiguous().numpy()
    decoded = 0
    for number, (begin, end) in enumerate(_extents(meta.segments)):
        decoded += _decode_into(encoded[begin:end], contents[decoded:], meta, f"payload, segment {number}")
    if decoded != contents.size:
        raise CorruptDataError(
            f"payload decodes to {decoded} bytes, its meta says {contents.size}; encode the tensor again"
        )
    return out


def _extents(sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    stop = 0
    for size in sizes:
        start, stop = stop, stop + size
        yield start, stop


def _decode_into(segment: NDArray[np.uint8], out: NDArray[np.uint8], meta: PayloadMeta, where: str) -> int:
    """Decode one segment to the start of ``out``; returns its decoded bytes."""
    header = parse_header(segment.data, where=where)
    if (header.fmt, header.schedule, header.segment_bytes) != (meta.fmt, meta.schedule, segment.size):
        raise CorruptDataError(
            f"{where}: {header.segment_bytes} bytes of {header.fmt.name} by {header.schedule}, its meta says "
            f"{segment.size} bytes of {meta.fmt.name} by {meta.schedule}; encode the tensor again"
        )
    cpu.decode_segment(segment, out[: header.decoded_bytes], where=where)
    return header.decoded_bytes


def _contents_to_fill(out: torch.Tensor, meta: PayloadMeta) -> NDArray[np.uint8]:
    """The memory of ``out``, (raw_bytes,) uint8."""
    plain = out.device.type == "cpu" and out.is_contiguous() and not (out.is_conj() or out.is_neg())
    dtype, shape, contents = tensor_contents(out) if plain else ("", (), np.empty(0, np.uint8))
    if (dtype, shape) != (meta.dtype, meta.shape):
        raise InvalidArgumentError(
            f"out: expected a contiguous {meta.dtype} tensor of shape {meta.shape} on the CPU, found {_describe(out)}"
        )
    return contents


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
