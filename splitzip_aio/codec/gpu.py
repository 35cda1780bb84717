"""GPU decoding: slots full of segments, one launch, on the current stream, into given device ranges."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.launch import KernelLauncher
from splitzip_aio.codec.layout import SEGMENT_ALIGN, TILE_ELEMENTS
from splitzip_aio.codec.schedule import TOP16, Schedule
from splitzip_aio.codec.slot_table import TOP16_TILE_ELEMENTS, Launch, SlotTable, table_capacity
from splitzip_aio.codec.tensors import PayloadMeta
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError, UnsupportedError

__all__ = ["GpuSplitZipDecoder", "PendingDecode", "PreparedDecode", "interpreted", "triton_available"]

_DESTINATION_ALIGN = 16


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_available() -> bool:
    """Whether the GPU codec can run here: Triton is installed, and there is a CUDA device or the interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return interpreted() or torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """A decode that was given to a stream; what it found is known once ``ready`` has fired.

    ``ready`` is None in the interpreter, where all is done already.
    """

    table: SlotTable
    results: torch.Tensor
    ready: torch.cuda.Event | None
    where: str

    def check(self) -> None:
        """Wait for the decode, then compare what was decoded with the segments' checksums.

        Raises:
            CorruptDataError: decoded bytes are wrong; they must not be used.
        """
        if self.ready is not None:
            self.ready.synchronize()
        found = self.results.numpy().view(np.uint64)
        for place in self.table.failures(found):
            raise CorruptDataError(
                f"{self.where}, segment {place}: decoded bytes have checksum {found[place]:016x}, "
                f"expected {self.table.checksums[place]:016x}; encode the tensor again"
            )


class PreparedDecode:
    """The launches of a table, made for one slot after another on one device at little cost.

    Attributes:
        table: the table.
    """

    def __init__(self, decoder: GpuSplitZipDecoder, table_offset: int, table: SlotTable) -> None:
        self.table = table
        self._decoder = decoder
        self._table_offset = table_offset
        self._launches: list[Callable[[int, int], None]] | None = None

    def launch(self, slot: torch.Tensor, address: int, stream: torch.cuda.Stream) -> None:
        """Decode ``slot``, which is at ``address``, as ``decode_slot`` does, on ``stream``.

        The stream's device must be the current one. The first time takes longer: kernels may have to be compiled.
        """
        if self._launches is None:
            with torch.cuda.stream(stream):
                self._launches = [self._first(slot, launch) for launch in self.table.launches]
            return
        for again in self._launches:
            again(address, stream.cuda_stream)

    def _first(self, slot: torch.Tensor, launch: Launch) -> Callable[[int, int], None]:
        """Make a launch; returns what makes it again, for another address."""
        compiled, arguments = self._decoder.launch(slot, self._table_offset, self.table, launch)
        run = compiled[(launch.tiles, 1, 1)]

        def again(address: int, stream: int) -> None:
            run(address, *arguments, stream=stream)

        return again


class GpuSplitZipDecoder:
    """Decodes segments on a CUDA device, or in Triton's interpreter on the CPU.

    It keeps the kernels it compiled and nothing else, and allocates nothing in ``decode_slot``, so one serves
    every stream.

    Args:
        checksum: compute the checksum of what is decoded, at a cost of 5% or less. Without it nothing is verified.

    Raises:
        UnsupportedError: Triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    def __init__(self, *, checksum: bool = True) -> None:
        if not triton_available():
            raise UnsupportedError(
                "decoding on a GPU needs Triton (pip install triton) and a CUDA device; use device='cpu' here"
            )
        from splitzip_aio.codec.kernels.decode import decode_slot_kernel

        self._kernel: Any = decode_slot_kernel
        self._checksum = checksum
        self._launcher = KernelLauncher()
        self._kinds: dict[
            tuple[ElementFormat, Schedule | None, bool], tuple[dict[str, bool | int], dict[str, int]]
        ] = {}

    def decode_slot(self, slot: torch.Tensor, table_offset: int, table: SlotTable) -> torch.Tensor:
        """Decode every segment of ``slot`` to the destinations in its table, on the current stream.

        Nothing is allocated and the host does not wait. ``slot`` is (bytes,) uint8 on the device, aligned to 32 bytes,
        and holds the segments and, from ``table_offset``, the table as ``SlotTable.build`` wrote it; a table serves
        one decode, since checksums are added to it.

        Returns:
            The part of ``slot`` with each segment's checksum, (segments,) int64, for ``SlotTable.failures`` once
            the stream has got there.
        """
        if slot.data_ptr() % SEGMENT_ALIGN or slot.numel() >= 1 << 31:
            raise InvalidArgumentError(
                f"slot: expected under 2 GiB at a multiple of {SEGMENT_ALIGN}, found {slot.numel()} bytes at "
                f"{slot.data_ptr():#x}"
            )
        for launch in table.launches:
            self.launch(slot, table_offset, table, launch)
        start = table_offset + table.results
        return slot[start : start + 8 * len(table.checksums)].view(torch.int64)

    def prepare(self, table_offset: int, table: SlotTable) -> PreparedDecode:
        """What ``decode_slot`` does for a table, for who decodes slots with the same one again and again."""
        return PreparedDecode(self, table_offset, table)

    def decode_in_place(
        self, target: torch.Tensor, payload_bytes: int, table: SlotTable, stash: torch.Tensor
    ) -> torch.Tensor:
        """Decode a slot that lies at the start of the very range that it decodes into.

        ``target`` (bytes,) uint8 starts with payload and table; they are moved to ``stash``, of at least their size,
        first, because tiles finish in any order and would overwrite what others have yet to read.
        """
        used = payload_bytes + table.nbytes
        if stash.numel() < used:
            raise InvalidArgumentError(f"stash of {stash.numel()} bytes, expected at least {used}")
        stash[:used].copy_(target[:used], non_blocking=True)
        return self.decode_slot(stash, payload_bytes, table)

    def decode_slot_into(
        self,
        out: torch.Tensor,
        meta: PayloadMeta,
        payload: torch.Tensor,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> PendingDecode:
        """Decode one tensor's payload, as ``encode_torch`` made it, into ``out``.

        ``payload`` is (compressed_bytes,) uint8 on the CPU, pinned if the copy is to be asynchronous; ``out`` is a
        contiguous device tensor of the meta's size in bytes, aligned to 16 bytes. Copy and decode go to ``stream``, by
        default the current one.

        Raises:
            CorruptDataError: a segment's header is wrong. Wrong contents are found by ``PendingDecode.check``.
            InvalidArgumentError: ``out`` or ``payload`` is not as described.
        """
        headers, sources = _parse(payload, meta)
        if not out.is_contiguous() or out.numel() * out.element_size() != meta.raw_bytes:
            raise InvalidArgumentError(
                f"out: expected {meta.raw_bytes} contiguous bytes, found {tuple(out.shape)} {out.dtype}"
            )
        if out.data_ptr() % _DESTINATION_ALIGN:
            raise InvalidArgumentError(f"out: expected an address that is a multiple of {_DESTINATION_ALIGN}")
        slot_bytes = payload.numel() + table_capacity(payload.numel())
        host = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=out.is_cuda)
        host[: payload.numel()] = payload
        view = host.numpy().data[payload.numel() :]
        decoded = headers.fields["decoded_bytes"].astype(np.int64)
        table = SlotTable.build(headers, sources, out.data_ptr() + np.cumsum(decoded) - decoded, view)
        used = payload.numel() + table.nbytes
        if not out.is_cuda:
            return PendingDecode(table, self.decode_slot(host, payload.numel(), table), None, "payload")
        with torch.cuda.stream(stream):
            slot = host[:used].to(out.device, non_blocking=True)
            results = self.decode_slot(slot, payload.numel(), table)
            found = torch.empty(len(headers), dtype=torch.int64, pin_memory=True).copy_(results, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return PendingDecode(table, found, ready, "payload")

    def launch(
        self, slot: torch.Tensor, table_offset: int, table: SlotTable, launch: Launch
    ) -> tuple[Any, tuple[int, ...]]:
        """Make one launch of a table on the current stream.

        Returns:
            What was compiled, None in the interpreter; and its arguments but for the slot.
        """
        offsets = table_offset, table_offset + table.results, table_offset + table.tiles + 4 * launch.first
        constants, options = self._settings(launch, slot)
        compiled = self._launcher.launch(self._kernel, launch.tiles, (slot, *offsets), constants, **options)
        return compiled, (*offsets, *constants.values())

    def _settings(self, launch: Launch, slot: torch.Tensor) -> tuple[dict[str, bool | int], dict[str, int]]:
        """Constants and compiler options of a launch, made once for each kind."""
        kind = launch.fmt, launch.schedule, slot.is_cuda
        settings = self._kinds.get(kind)
        if settings is None:
            widths = (*(launch.schedule.widths if launch.schedule else ()), 0, 0, 0, 0)
            ptx = slot.is_cuda and torch.version.hip is None
            constants = {
                "MIXED": launch.schedule is None,
                "FORMAT": launch.fmt.code,
                **{f"W{tier}": widths[tier] for tier in range(4)},
                "TILE": TILE_ELEMENTS,
                "TOP16_TILE": TOP16_TILE_ELEMENTS,
                "CHECK": self._checksum,
                "PTX": ptx,
            }
            options = {"maxnreg": _registers(launch)} if ptx else {}
            settings = self._kinds[kind] = constants, options
        return settings


def _registers(launch: Launch) -> int:
    """Registers a thread may use: fewer keep more warps in flight, too few spill. Measured on an H200."""
    if launch.schedule is None or len(launch.schedule.widths) > 2:
        return 96
    if launch.fmt != BF16:
        return 80
    return 88 if launch.schedule == TOP16 else 72  # a whole tile of top16 is held


def _parse(payload: torch.Tensor, meta: PayloadMeta) -> tuple[SegmentHeaders, NDArray[np.int64]]:
    """Headers of a payload's segments, and where the segments start."""
    if payload.is_cuda or payload.dtype != torch.uint8 or payload.numel() != meta.compressed_bytes:
        raise InvalidArgumentError(
            f"payload: expected ({meta.compressed_bytes},) uint8 on the CPU, found {tuple(payload.shape)} "
            f"{payload.dtype} on {payload.device}"
        )
    sizes = np.array(meta.segments, np.int64)
    sources = np.cumsum(sizes) - sizes
    headers = SegmentHeaders.parse(
        payload.contiguous().numpy().data, sources, sizes, where=lambda place: f"payload, segment {place}"
    )
    if int(headers.fields["decoded_bytes"].sum(dtype=np.int64)) != meta.raw_bytes:
        raise CorruptDataError(
            f"payload does not decode to the {meta.raw_bytes} bytes of its meta; encode the tensor again"
        )
    return headers, sources
