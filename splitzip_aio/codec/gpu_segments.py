"""Segments encoded on a GPU: counts of exponents first, then, by a plan made from them, the segments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from splitzip_aio.codec.checksum import GROUP, GROUP_BYTES
from splitzip_aio.codec.encode_table import ENTRIES_BYTES, WINDOW_EXPONENTS, EncodeLaunch, EncodeTable, Stretch
from splitzip_aio.codec.formats import RAW, ElementFormat
from splitzip_aio.codec.gpu import triton_available
from splitzip_aio.codec.launch import KernelLauncher
from splitzip_aio.codec.layout import HEADER_BYTES, align
from splitzip_aio.codec.payload import SegmentHeader
from splitzip_aio.codec.schedule import MAX_DEPTH, STORED
from splitzip_aio.codec.segments import SegmentPlan
from splitzip_aio.errors import SourceChangedError, UnsupportedError

__all__ = ["DeviceContents", "DeviceSegments", "GpuSegmentEncoder", "PendingCounts", "TileCounts"]

_SOURCE_ALIGN = 16
# Registers a thread may use: fewer hold more warps in flight, more avoid spills.
_REGISTERS = 96


@dataclass(frozen=True, slots=True)
class DeviceContents:
    """Elements on the device to be cut into segments: all of a tensor, or whole segments of it.

    ``data`` is (nbytes,) uint8, contiguous, at an address that is a multiple of 16; ``segment_bytes`` are the decoded
    bytes of each segment but the last.
    """

    data: torch.Tensor
    fmt: ElementFormat
    segment_bytes: int

    @classmethod
    def of(cls, data: torch.Tensor, fmt: ElementFormat, segment_bytes: int) -> DeviceContents:
        """Contents of ``data``, which is copied if its address is unsuitable."""
        return cls(data.clone() if data.data_ptr() % _SOURCE_ALIGN else data, fmt, segment_bytes)

    @property
    def stretch(self) -> Stretch:
        """Where the elements are."""
        return Stretch(self.fmt, self.data.data_ptr(), self.data.numel(), self.segment_bytes)


@dataclass(frozen=True, slots=True)
class TileCounts:
    """What counting leaves on the device to spare encoding another look at the elements; see ``kernels/count.py``.

    ``windows`` is (tiles, WINDOW_EXPONENTS) int16, ``bottoms`` (tiles,) int32.
    """

    windows: torch.Tensor
    bottoms: torch.Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> TileCounts:
        """Room for ``rows`` tiles."""
        windows = torch.empty((rows, WINDOW_EXPONENTS), dtype=torch.int16, device=device)
        return cls(windows, torch.empty(rows, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Zeroed memory, allocated at once, for one call of ``GpuSegmentEncoder.encode``.

    ``found`` is what ``DeviceSegments`` describes; ``starts``, (rows + 1,) int64, are where tiles' tails start,
    ``ends`` the same but the first, and ``sizes``, (rows,) int32, what they take.
    """

    found: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, table: EncodeTable, device: torch.device) -> _Scratch:
        """For the segments and rows of ``table``."""
        rows = table.rows
        parts = 2 * len(table.segments), align(rows + 1, 2), -(-rows // 2)  # each part at a multiple of 16 bytes
        found, starts, sizes = torch.zeros(sum(parts), dtype=torch.int64, device=device).split(parts)
        return cls(found, starts, starts[1 : rows + 1], sizes.view(torch.int32)[:rows])


@dataclass(frozen=True, slots=True)
class PendingCounts:
    """Exponent counts on their way to the host, which may do other things until it asks for them.

    ``ready`` is None in the interpreter, where all is done already. The rest is for ``GpuSegmentEncoder.encode``;
    ``base`` is the table on the device, with room for the one that encodes, and ``staging`` is host memory for what of
    that differs.
    """

    stretches: tuple[Stretch, ...]
    counts: torch.Tensor
    ready: torch.cuda.Event | None
    table: EncodeTable
    base: torch.Tensor
    staging: torch.Tensor
    tiles: TileCounts
    scratch: _Scratch

    def wait(self) -> list[NDArray[np.int32]]:
        """(segments, 256) counts of each of the contents, as ``cpu.histogram`` gives them but for the type."""
        if self.ready is not None:
            self.ready.synchronize()
        found, parts, stop = self.counts.numpy(), [], 0
        for stretch in self.stretches:
            start, stop = stop, stop + stretch.segments
            parts.append(found[start:stop])
            if stretch.fmt == RAW:
                parts[-1][:, 0] = stretch.decoded_bytes()
        return parts


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """Encoded segments on the device, one after another, complete but for their headers, which are zero.

    ``buffer`` is (bytes,) uint8; ``found`` (2 * segments,) int64 are first the sums of the decoded bytes' checksums,
    then the bits of the tails as the device found them.
    """

    buffer: torch.Tensor
    found: torch.Tensor
    stretches: tuple[Stretch, ...]
    plans: tuple[SegmentPlan, ...]

    def to_host(self, out: torch.Tensor) -> None:
        """Copy the segments to ``out``, (bytes,) uint8 on the CPU, better pinned, and write their headers there.

        Digests are computed from the bytes that have arrived, so they cover what goes to disk; checksums are those of
        the elements as the device read them.

        Raises:
            SourceChangedError: someone wrote to the elements between counting and encoding.
        """
        out.copy_(self.buffer)
        sums, tail_bits = self.found.cpu().numpy().reshape(2, -1)
        if not np.array_equal(tail_bits, np.concatenate([plan.numbers[1] for plan in self.plans])):
            raise SourceChangedError("a tensor changed while it was encoded; encode again once nothing writes to it")
        segments: NDArray[np.uint8] = out.numpy()
        remaining = iter(sums.tolist())
        stop = 0
        for stretch, plan in zip(self.stretches, self.plans, strict=True):
            for place, nbytes in enumerate(stretch.decoded_bytes().tolist()):
                start, stop = stop, stop + plan.segments[place]
                header = _header(stretch.fmt, plan, place, nbytes, next(remaining), segments[start:stop])
                segments[start : start + HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)


def _header(
    fmt: ElementFormat, plan: SegmentPlan, place: int, nbytes: int, terms: int, segment: NDArray[np.uint8]
) -> SegmentHeader:
    """Header of segment ``place`` of a plan, which decodes to ``nbytes`` bytes; ``terms`` add up to their checksum."""
    groups = -(-nbytes // GROUP_BYTES)
    return SegmentHeader(
        fmt=fmt,
        schedule=plan.schedule,
        elements=nbytes // fmt.element_bytes,
        escapes=plan.escapes[place],
        tail_bits=plan.tail_bits[place],
        checksum=(terms + groups * GROUP) % 2**64,
        digest=xxhash.xxh3_64_intdigest(segment[HEADER_BYTES:].data),
        codebooks=plan.codebooks,
    )


class GpuSegmentEncoder:
    """Counts exponents and encodes segments on a CUDA device, or in Triton's interpreter on the CPU.

    All work goes to the device's current stream. Scratch memory is under 1% of the elements given at a time.

    Raises:
        UnsupportedError: Triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    def __init__(self, device: torch.device | str) -> None:
        if not triton_available():
            raise UnsupportedError(
                "encoding on a GPU needs Triton (pip install triton) and a CUDA device; use device='cpu' here"
            )
        from splitzip_aio.codec.kernels import count, encode

        self.device = torch.device(device)
        self._launcher = KernelLauncher()
        self._ptx = self.device.type == "cuda" and torch.version.hip is None
        self._count: Any = count.count_exponents_kernel
        self._measure: Any = count.measure_tiles_kernel
        self._encode: Any = encode.encode_segments_kernel
        self._copy: Any = encode.copy_segments_kernel

    def upload(self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int) -> DeviceContents:
        """Contents of (nbytes,) uint8 on the host, best in pinned memory, which must not change until it is copied."""
        copy = torch.from_numpy(data).to(self.device, non_blocking=True)
        return DeviceContents.of(copy, fmt, segment_bytes)

    def count(self, contents: Sequence[DeviceContents]) -> PendingCounts:
        """Start to count the exponents of every segment of ``contents``; they must not change until encoded."""
        stretches = tuple(each.stretch for each in contents)
        table = EncodeTable.to_count(stretches)
        with self._on_device():
            base = self._upload(table, len(stretches))
            counts = torch.zeros((len(table.segments), 256), dtype=torch.int32, device=self.device)
            tiles = TileCounts.of(table.rows, self.device)
            for launch in table.launches:
                self._launch(self._count, launch, table, base, counts, tiles.windows, tiles.bottoms)
            ready = None
            if self.device.type == "cuda":
                counts = self._host(counts.shape, torch.int32).copy_(counts, non_blocking=True)
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(self.device))
            # What is done from here on costs no time, as the device is still counting.
            staging = self._host((base.numel() - table.descriptors,), torch.uint8)
            return PendingCounts(stretches, counts, ready, table, base, staging, tiles, _Scratch.of(table, self.device))

    def room(self, contents: Sequence[DeviceContents]) -> torch.Tensor:
        """Zeroed memory for segments that are not larger than stored ones; best asked for while counts are pending."""
        return torch.zeros(sum(each.stretch.stored_bytes for each in contents), dtype=torch.uint8, device=self.device)

    def encode(
        self,
        contents: Sequence[DeviceContents],
        plans: Sequence[SegmentPlan],
        counted: PendingCounts | None = None,
        room: torch.Tensor | None = None,
    ) -> DeviceSegments:
        """Encode every segment of ``contents``, each by its plan, made from what ``count`` found.

        The host does not wait for the device; ``DeviceSegments.to_host`` does. Without ``counted``, which ``count``
        gave for the same contents, elements are read twice. It and ``room``, which is ``room``'s, are used once.
        """
        stretches = counted.stretches if counted else tuple(each.stretch for each in contents)
        table = EncodeTable.to_encode(stretches, plans, counted.table if counted else None)
        size = sum(plan.nbytes for plan in plans)
        with self._on_device():
            base = self._update(table, counted) if counted and table.kept else self._upload(table)
            tiles = counted.tiles if counted else self._unknown_tile_counts(table)
            scratch = counted.scratch if counted else _Scratch.of(table, self.device)
            if room is None or room.numel() < size:
                room = torch.zeros(size, dtype=torch.uint8, device=self.device)
            out = room[:size]
            self._find_starts(table, base, tiles, scratch)
            for launch in table.launches:
                if launch.schedule == STORED:
                    self._launch(self._copy, launch, table, base, out, scratch.found)
                else:
                    arguments = (scratch.starts, out, scratch.found, len(table.segments))
                    self._launch(self._encode, launch, table, base, *arguments, **_widths(launch), PTX=self._ptx)
        return DeviceSegments(out, scratch.found, stretches, tuple(plans))

    def _find_starts(self, table: EncodeTable, base: torch.Tensor, tiles: TileCounts, scratch: _Scratch) -> None:
        """Find where the tail of each tile starts, in bits and counted through all segments."""
        for launch in table.launches:
            if launch.schedule != STORED:
                self._launch(self._measure, launch, table, base, tiles.windows, tiles.bottoms, scratch.sizes)
        torch.cumsum(scratch.sizes, 0, dtype=torch.int64, out=scratch.ends)

    def _unknown_tile_counts(self, table: EncodeTable) -> TileCounts:
        """Counts of tiles, none of which are known."""
        counts = TileCounts.of(table.rows, self.device)
        counts.bottoms.fill_(-1)
        return counts

    def _launch(
        self, kernel: Any, launch: EncodeLaunch, table: EncodeTable, base: torch.Tensor, *args: Any, **constants: int
    ) -> None:
        bits = {} if kernel is self._copy else _bits(launch.fmt)
        options = {"maxnreg": _REGISTERS} if self._ptx else {}
        arguments = (base, table.descriptors, launch.first, *args)
        self._launcher.launch(kernel, launch.tiles, arguments, {**bits, **constants}, **options)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _upload(self, table: EncodeTable, tensors: int = 0) -> torch.Tensor:
        """The table on the device, with room for one of the same segments that has entries for so many tensors."""
        host = self._host((table.nbytes + tensors * ENTRIES_BYTES,), torch.uint8)
        table.write(host.numpy()[: table.nbytes])
        return host.to(self.device, non_blocking=True)

    def _update(self, table: EncodeTable, counted: PendingCounts) -> torch.Tensor:
        """The table on the device, made of the one that counted."""
        table.write(counted.staging.numpy())
        counted.base[table.descriptors :].copy_(counted.staging, non_blocking=True)
        return counted.base

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host that the device can copy from and to by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def _bits(fmt: ElementFormat) -> dict[str, int]:
    """An element format as kernels take it."""
    return {"BYTES": fmt.element_bytes, "EXPONENT_BITS": fmt.exponent_bits, "MANTISSA_BITS": fmt.mantissa_bits}


def _widths(launch: EncodeLaunch) -> dict[str, int]:
    """A schedule as kernels take it."""
    widths = launch.schedule.widths if launch.schedule else ()
    padded = (*widths, *[0] * MAX_DEPTH)
    return {f"W{tier}": padded[tier] for tier in range(MAX_DEPTH)}
