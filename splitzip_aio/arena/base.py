"""What both arenas have in common: one buffer of bytes, divided into ranges."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from splitzip_aio.abc import Arena, ArenaStatistics, Fence
from splitzip_aio.arena.ranges import RANGE_ALIGN, Ranges
from splitzip_aio.codec.dtypes import DTYPE_BITS, torch_view
from splitzip_aio.errors import ClosedError, InvalidArgumentError

__all__ = ["BufferArena"]


class BufferArena(Arena):
    """An arena that is one (capacity_bytes,) uint8 tensor, made by its subclass."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer: torch.Tensor | None = buffer
        self._elements: dict[str, torch.Tensor | None] = {}
        self._device = buffer.device
        self._ranges = Ranges(buffer.numel())

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._device

    @property
    def buffer(self) -> torch.Tensor:
        """All of the memory, (capacity_bytes,) uint8.

        Raises:
            ClosedError: the arena is closed.
        """
        if self._buffer is None:
            raise ClosedError("the arena is closed")
        return self._buffer

    def fits(self, nbytes: int, *, freeing: Iterable[int] = ()) -> bool:
        """Whether ``allocate`` would find ``nbytes`` bytes, were the ranges at these offsets freed before."""
        return self._ranges.fits(nbytes, freeing)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of ``nbytes`` bytes, a multiple of 256; None while no free range is as large."""
        return self._ranges.take(nbytes)

    def free(self, offset: int, *, after: Iterable[Fence] = ()) -> None:
        """Take back the range at ``offset``; what is decoded there next waits for the fences ``after``."""
        self._wait_before_reuse(after)
        self._ranges.give_back(offset)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes there, (nbytes,) uint8, sharing the arena's memory."""
        return self.buffer[offset : offset + nbytes]

    def tensor(self, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The bytes there as a tensor; see ``splitzip_aio.abc.Arena.tensor``."""
        buffer = self.buffer
        if dtype not in self._elements:
            self._elements[dtype] = _elements(buffer, dtype)
        elements = self._elements[dtype]
        if elements is None or not nbytes or offset % elements.element_size():
            return torch_view(self.view(offset, nbytes), dtype, shape)
        # One call of torch's for each tensor, of which a layer may have dozens, in place of three.
        return elements.as_strided(shape, _strides(shape), offset // elements.element_size())

    def statistics(self) -> ArenaStatistics:
        """A snapshot of the memory's use."""
        return ArenaStatistics(
            capacity_bytes=self._ranges.capacity,
            used_bytes=self._ranges.used,
            peak_bytes=self._ranges.peak,
            ranges=len(self._ranges),
            largest_free_bytes=self._ranges.largest_free,
        )

    def _let_go(self) -> None:
        """Keep nothing of the memory."""
        self._buffer = None
        self._elements.clear()

    def _wait_before_reuse(self, fences: Iterable[Fence]) -> None:
        """Make the next decode wait for these; an arena without streams is given none."""


def checked_capacity(capacity_bytes: int) -> int:
    """The capacity, if a range fits into it.

    Raises:
        InvalidArgumentError: it is smaller than the least range.
    """
    if capacity_bytes < RANGE_ALIGN:
        raise InvalidArgumentError(f"arena_bytes: expected at least {RANGE_ALIGN}, found {capacity_bytes}")
    return capacity_bytes


def _elements(buffer: torch.Tensor, dtype: str) -> torch.Tensor | None:
    """All of a buffer as elements of a safetensors dtype; None where torch has no such elements of whole bytes."""
    if DTYPE_BITS[dtype] % 8:
        return None
    count = buffer.numel() * 8 // DTYPE_BITS[dtype]
    with torch.inference_mode(False), torch.enable_grad():  # it is kept, whatever mode its first user is in
        elements = torch_view(buffer[: count * DTYPE_BITS[dtype] // 8], dtype, (count,))
    return elements if elements.numel() == count else None


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides = [1] * len(shape)
    for place in range(len(shape) - 1, 0, -1):
        strides[place - 1] = strides[place] * shape[place]
    return tuple(strides)
