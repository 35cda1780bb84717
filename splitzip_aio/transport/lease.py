"""What a caller holds while it uses a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import Self
from warnings import warn

import torch

from splitzip_aio.abc import Arena
from splitzip_aio.errors import InvalidArgumentError, LeaseReleasedError
from splitzip_aio.transport.residency import Occupant, OccupantState, Residency

__all__ = ["Lease"]


class Lease:
    """A hold on a layer: its tensors stay where they are until it is released.

    ``async with lease`` makes the current CUDA stream wait until the layer is decoded, and releases at its end. Work
    on the tensors must by then have been given to the stream that is current then; eviction waits for that stream.
    What is to outlive the lease must be copied (``tensor.clone()``).
    """

    def __init__(self, occupant: Occupant, arena: Arena, residency: Residency, *, ended: Callable[[], None]) -> None:
        self._occupant = occupant
        self._arena = arena
        self._residency = residency
        self._ended = ended
        self._released = False

    @property
    def layer(self) -> str:
        """The layer's name."""
        return self._occupant.plan.name

    @property
    def released(self) -> bool:
        """Whether the tensors may have been overwritten: after ``release``, or once the transport is closed."""
        return self._released or self._occupant.state is OccupantState.GONE

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The layer's tensors by name, as views of the arena with their dtypes and shapes; tied ones share memory.

        Raises:
            LeaseReleasedError: the lease was released, or the transport closed.
        """
        self._check_held()
        return self._views

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each tensor begins, in bytes from the start of the layer, a multiple of 256; tied ones share it."""
        return self._occupant.plan.offsets

    def copy_to(self, target: torch.Tensor, offset: int) -> None:
        """Copy bytes of the layer, of whatever tensors, on the current stream; the host does not wait.

        The same as copying views of the tensors, at a fraction of the cost to the interpreter. ``target`` is
        (bytes,) uint8, contiguous and on the arena's device; what it gets begins at ``offset`` of the layer.

        Raises:
            LeaseReleasedError: the lease was released, or the transport closed.
            InvalidArgumentError: ``target`` is not as described, or the layer does not have so many bytes there.
        """
        self._check_held()
        if target.dtype != torch.uint8 or target.device != self._arena.device or not target.is_contiguous():
            raise InvalidArgumentError(
                f"target: expected contiguous uint8 on {self._arena.device}, found {target.dtype} of shape "
                f"{tuple(target.shape)} and strides {target.stride()} on {target.device}"
            )
        nbytes, end = target.numel(), self._occupant.plan.nbytes
        if not 0 <= offset <= end - nbytes:
            raise InvalidArgumentError(
                f"layer {self.layer!r} has {end} bytes; expected a copy from it, found {nbytes} bytes at {offset}"
            )
        self._arena.copy_to(target, self._occupant.placed.base + offset)

    def wait(self) -> None:
        """Make the current CUDA stream wait until the layer is decoded; the host does not. May be called in any thread.

        Raises:
            LeaseReleasedError: the lease was released, or the transport closed.
        """
        self._check_held()
        fence = self._occupant.placed.fence
        if fence is not None and not fence.query():  # which costs less, and is the rule
            fence.wait()

    async def __aenter__(self) -> Self:
        self.wait()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let the layer go, once the current stream's work so far is done. Idempotent; never waits."""
        self.begin_release()()

    def begin_release(self) -> Callable[[], None]:
        """The part of ``release`` that may be done in any thread; what is returned does the rest, in the event loop."""
        if self._released:
            return _nothing
        self._released = True
        self.__dict__.pop("_views", None)
        use = self._arena.fence()

        def finish() -> None:
            self._residency.let_go(self._occupant, use=use)
            self._ended()

        return finish

    def __del__(self) -> None:
        if not self.released:
            warn(
                f"lease on layer {self.layer!r} was never released; use 'async with'",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<Lease {self.layer!r}{' released' if self.released else ''}>"

    @cached_property
    def _views(self) -> Mapping[str, torch.Tensor]:
        base = self._occupant.placed.base
        return MappingProxyType(
            {
                tensor.name: self._arena.tensor(base + tensor.offset, tensor.nbytes, tensor.dtype, tensor.shape)
                for tensor in self._occupant.plan.tensors
            }
        )

    def _check_held(self) -> None:
        if self.released:
            raise LeaseReleasedError(f"the lease on layer {self.layer!r} is over; prefetch the layer again")


def _nothing() -> None:
    """What is left to do for a lease that was released before."""
