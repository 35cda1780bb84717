"""GPU encoding of tensors: what ``encode_torch`` does, byte for byte, at the speed of the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from splitzip_aio.codec.codebook import SplitZipCodebook
from splitzip_aio.codec.dtypes import flat_contents
from splitzip_aio.codec.formats import RAW, element_format
from splitzip_aio.codec.gpu_segments import DeviceContents, DeviceSegments, GpuSegmentEncoder, PendingCounts
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.codec.segments import SegmentPlan, decoded_segment_bytes, plan_segments
from splitzip_aio.codec.tensors import PayloadMeta

__all__ = ["DevicePayloads", "GpuSplitZipEncoder"]

_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DevicePayloads:
    """Payloads on the device, one after another, complete but for the headers of their segments.

    ``segments`` is None where none of the tensors has elements.
    """

    metas: tuple[PayloadMeta, ...]
    segments: DeviceSegments | None

    def to_host(self) -> list[tuple[torch.Tensor, PayloadMeta]]:
        """Each payload, (compressed_bytes,) uint8 in pinned host memory, with its meta. Waits for the device.

        Raises:
            SourceChangedError: someone wrote to a tensor while it was encoded.
        """
        size = sum(meta.compressed_bytes for meta in self.metas)
        pin = self.segments is not None and self.segments.buffer.is_cuda
        payloads = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        if self.segments is not None:
            self.segments.to_host(payloads)
        parts = payloads.split([meta.compressed_bytes for meta in self.metas])
        return list(zip(parts, self.metas, strict=True))


@dataclass(frozen=True, slots=True)
class _Started:
    """A batch whose exponents are being counted: dtype, shape and contents of each tensor, the empty ones included."""

    flat: list[tuple[str, tuple[int, ...], torch.Tensor]]
    contents: list[DeviceContents]
    pending: PendingCounts | None
    room: torch.Tensor | None


class GpuSplitZipEncoder:
    """Encodes tensors on a CUDA device, or in Triton's interpreter on the CPU; the counterpart of ``encode_torch``.

    Counting, the choice of the schedule and encoding run on the device; the host plans from the counts, and completes
    headers with digests once the payload has arrived in its memory. Payloads are equal to the CPU's.

    Args:
        device: where to encode; tensors elsewhere are copied there.

    Raises:
        UnsupportedError: Triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._segments = GpuSegmentEncoder(device)

    def encode(
        self, tensor: torch.Tensor, *, schedule: Schedule | str | Sequence[int] | None = None
    ) -> tuple[torch.Tensor, PayloadMeta]:
        """Encode a tensor losslessly; returns the payload, (compressed_bytes,) uint8 in host memory, and its meta.

        ``tensor`` is dense, of any shape, strides, device and dtype that safetensors has. ``schedule`` (``"2,2,3"``,
        ``"top16"``, ``"stored"``) defaults to the one with the fewest bytes.

        Raises:
            InvalidArgumentError: the schedule names none or cannot code this dtype.
            SourceChangedError: someone wrote to the tensor while it was encoded.
            UnsupportedError: safetensors has no such dtype, or the tensor is not dense.
        """
        return self.encode_on_device([tensor], schedule=schedule).to_host()[0]

    def encode_batch(
        self, tensors: Iterable[torch.Tensor], *, schedule: Schedule | str | Sequence[int] | None = None
    ) -> Iterator[tuple[torch.Tensor, PayloadMeta]]:
        """``encode`` each tensor, many small ones at once.

        Device memory stays at 1 GiB for encoding, or four times the largest tensor, however many there are.
        """
        for payloads in self.encode_on_device_each(_batches(tensors), schedule=schedule):
            yield from payloads.to_host()

    def encode_on_device(
        self, tensors: Sequence[torch.Tensor], *, schedule: Schedule | str | Sequence[int] | None = None
    ) -> DevicePayloads:
        """Encode tensors and leave the payloads on the device, for ``DevicePayloads.to_host``.

        The host waits for the exponent counts, then goes on while the device encodes. Raises what ``encode`` does,
        and ``to_host`` the rest.
        """
        return next(self.encode_on_device_each([tensors], schedule=schedule))

    def encode_on_device_each(
        self,
        batches: Iterable[Sequence[torch.Tensor]],
        *,
        schedule: Schedule | str | Sequence[int] | None = None,
    ) -> Iterator[DevicePayloads]:
        """``encode_on_device`` for each batch; the device counts the next one while the host plans this one."""
        wanted = None if schedule is None else Schedule.parse(schedule)
        started: _Started | None = None
        for batch in batches:
            following = self._start(batch)
            if started is not None:
                yield self._finish(started, wanted)
            started = following
        if started is not None:
            yield self._finish(started, wanted)

    def _start(self, tensors: Sequence[torch.Tensor]) -> _Started:
        """Begin to count exponents, and to make room for the segments."""
        flat = [flat_contents(tensor, self._segments.device) for tensor in tensors]
        contents = [_contents(dtype, data) for dtype, _, data in flat if data.numel()]
        if not contents:
            return _Started(flat, contents, None, None)
        return _Started(flat, contents, self._segments.count(contents), self._segments.room(contents))

    def _finish(self, started: _Started, wanted: Schedule | None) -> DevicePayloads:
        """Plan by the counts, begin to encode, and describe the payloads while the device does."""
        counts = started.pending.wait() if started.pending else []
        facts = zip(started.contents, counts, strict=True)
        plans = [plan_segments(each.fmt, part, schedule=wanted) for each, part in facts]
        segments = None
        if started.pending is not None:
            segments = self._segments.encode(started.contents, plans, started.pending, started.room)
        planned = iter(plans)
        metas = []
        for dtype, shape, data in started.flat:
            plan = next(planned) if data.numel() else plan_segments(element_format(dtype), [], schedule=wanted)
            metas.append(_meta(dtype, shape, plan))
        return DevicePayloads(tuple(metas), segments)


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += nbytes
    if batch:
        yield batch


def _contents(dtype: str, data: torch.Tensor) -> DeviceContents:
    fmt = element_format(dtype)
    return DeviceContents.of(data, fmt, decoded_segment_bytes(fmt))


def _meta(dtype: str, shape: tuple[int, ...], plan: SegmentPlan) -> PayloadMeta:
    fmt = element_format(dtype)
    codebook = None if fmt == RAW else SplitZipCodebook.from_histogram(plan.counts, fmt)
    return PayloadMeta(dtype, shape, plan.schedule, codebook, plan.segments)
