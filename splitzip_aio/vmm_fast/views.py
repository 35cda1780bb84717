"""Where in the consumer's memory a weight goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from splitzip_aio.errors import UnsupportedError

__all__ = ["ArenaView", "ArenaViews"]

ArenaView: TypeAlias = Callable[[Any, int, int], torch.Tensor]
"""From an arena, an offset and a size to its bytes there, (size,) uint8."""


class ArenaViews:
    """Views over the arenas of ``ddo_vmm_allocator``, kept for later: making one asks the driver about its address.

    A weight's range is mapped whenever its view is asked for, since the consumer faults it in before; its address is
    the same each time.

    Raises:
        UnsupportedError: ``ddo_vmm_allocator`` is not installed.
    """

    def __init__(self) -> None:
        try:
            from ddo_vmm_allocator import tensor_view
        except ImportError as exc:
            raise UnsupportedError(
                "ddo_vmm_allocator cannot be imported; install 'splitzip-aio[ddo]', or give arena_view_fn"
            ) from exc
        self._make = tensor_view.cuda_uint8_tensor_from_address
        self._views: dict[tuple[int, int, int], tuple[Any, torch.Tensor]] = {}

    def __call__(self, native: Any, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes there, (nbytes,) uint8 on the arena's GPU."""
        place = (id(native), offset, nbytes)
        known = self._views.get(place)
        if known is None or known[0] is not native:
            with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
                tensor, _ = self._make(native.info.address + offset, nbytes, owner=native, backing=native.backing)
            known = self._views[place] = (native, tensor)
        return known[1]

    def clear(self) -> None:
        """Let go of all views, and of the arenas they are of."""
        self._views.clear()
