"""What a build encodes with: the CPU, a segment in each thread, or a GPU, a larger batch. The bytes are equal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import ElementFormat
from splitzip_aio.codec.segments import SegmentPlan
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["CpuSegmentCoder", "GpuSegmentCoder", "SegmentCoder", "open_coder"]

_GPU_BATCH_BYTES = 32 << 20
_SEGMENT_BYTES = 2 << 20  # of the usual size, decoded
_MOST_WORKERS = 16


class SegmentCoder(Protocol):
    """Counts and encodes consecutive segments of one tensor, of ``segment_bytes`` decoded bytes each but the last."""

    @property
    def batch_bytes(self) -> int:
        """Decoded bytes that it works best on at a time, if they are whole segments."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """(nbytes,) uint8 to read elements into."""

    def count(self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int) -> list[NDArray[np.int64]]:
        """Each segment's (256,) exponent counts, as ``cpu.histogram`` gives them."""

    def encode(
        self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int, plan: SegmentPlan
    ) -> Iterator[NDArray[np.uint8]]:
        """Each segment encoded as ``plan``, which is for just these segments, says.

        It is valid until the next is asked for, or longer.
        """


class CpuSegmentCoder:
    """The CPU codec in several threads, each with a segment; all segments of a batch go to the same memory again.

    Args:
        workers: how many; as many as this process may use cores, and 16 at most, if not given.
    """

    def __init__(self, workers: int | None = None) -> None:
        workers = workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        self.batch_bytes = workers * _SEGMENT_BYTES
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="splitzip-encode")
        self._rooms: list[NDArray[np.uint8]] = []

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """(nbytes,) uint8 to read elements into."""
        return cpu.coding_memory(nbytes)

    def count(self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int) -> list[NDArray[np.int64]]:
        """Each segment's (256,) exponent counts."""
        return list(self._pool.map(partial(cpu.histogram, fmt=fmt), _pieces(data, segment_bytes)))

    def encode(
        self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int, plan: SegmentPlan
    ) -> Iterator[NDArray[np.uint8]]:
        """Each segment encoded; valid until the next batch is."""
        pieces = list(_pieces(data, segment_bytes))
        self._make_rooms([cpu.encoding_room(piece.size, fmt, plan.schedule) for piece in pieces])

        def encode(piece: NDArray[np.uint8], room: NDArray[np.uint8]) -> NDArray[np.uint8]:
            return cpu.encode_segment(piece, fmt, plan.schedule, plan.codebooks, out=room)

        return self._pool.map(encode, pieces, self._rooms)

    def _make_rooms(self, sizes: Sequence[int]) -> None:
        for place, size in enumerate(sizes):
            if place == len(self._rooms):
                self._rooms.append(cpu.coding_memory(size))
            elif self._rooms[place].size < size:
                self._rooms[place] = cpu.coding_memory(size)


class GpuSegmentCoder:
    """A GPU, which takes up to 32 MiB of segments at a time through pinned memory.

    Raises:
        UnsupportedError: Triton is not installed, or there is neither a CUDA device nor the interpreter.
    """

    batch_bytes = _GPU_BATCH_BYTES

    def __init__(self, device: torch.device | str) -> None:
        from splitzip_aio.codec.gpu_segments import GpuSegmentEncoder

        self._encoder = GpuSegmentEncoder(device)

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """(nbytes,) uint8 in pinned memory to read elements into."""
        import torch

        memory: NDArray[np.uint8] = torch.empty(
            nbytes, dtype=torch.uint8, pin_memory=self._encoder.device.type == "cuda"
        ).numpy()
        return memory

    def count(self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int) -> list[NDArray[np.int64]]:
        """Each segment's (256,) exponent counts."""
        (counts,) = self._encoder.count([self._encoder.upload(data, fmt, segment_bytes)]).wait()
        return list(counts.astype(np.int64))

    def encode(
        self, data: NDArray[np.uint8], fmt: ElementFormat, segment_bytes: int, plan: SegmentPlan
    ) -> Iterator[NDArray[np.uint8]]:
        """Each segment encoded; valid until the next is asked for."""
        import torch

        encoded = self._encoder.encode([self._encoder.upload(data, fmt, segment_bytes)], [plan])
        out = self.allocate(plan.nbytes)
        encoded.to_host(torch.from_numpy(out))
        stop = 0
        for size in plan.segments:
            start, stop = stop, stop + size
            yield out[start:stop]


def open_coder(device: str) -> SegmentCoder:
    """The coder for ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"``, a GPU where one can be used.

    Raises:
        InvalidArgumentError: there is no such device.
        UnsupportedError: Triton is not installed, or there is no CUDA device.
    """
    if device == "cpu":
        return CpuSegmentCoder()
    import torch

    from splitzip_aio.codec.gpu import triton_available

    if device == "auto":
        usable = torch.cuda.is_available() and triton_available()
        return GpuSegmentCoder("cuda") if usable else CpuSegmentCoder()
    try:
        target = torch.device(device)
    except RuntimeError as exc:
        raise InvalidArgumentError(f"device {device!r}: expected auto, cpu, cuda or cuda:0") from exc
    if target.type != "cuda":
        raise InvalidArgumentError(f"device {device!r}: expected auto, cpu, cuda or cuda:0")
    if not torch.cuda.is_available() or (target.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"device {device!r}: torch finds {torch.cuda.device_count()} CUDA devices; use 'cpu'")
    return GpuSegmentCoder(target)


def _pieces(data: NDArray[np.uint8], segment_bytes: int) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, data.size, segment_bytes):
        yield data[start : start + segment_bytes]
