"""Content keys: equal dtype, shape and bytes, equal key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

__all__ = ["ContentHasher", "content_key"]


class ContentHasher:
    """BLAKE3 over dtype, shape and bytes, fed piece by piece.

    The hash starts with ``dtype NUL dimensions-in-decimal-joined-by-comma NUL``, so that a (2, 3) and a (3, 2) tensor
    of the same bytes differ.
    """

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._hash = blake3(f"{dtype}\0{','.join(map(str, shape))}\0".encode())

    def update(self, data: NDArray[np.uint8]) -> None:
        """Append the tensor's next bytes."""
        self._hash.update(data.data)

    def hexdigest(self) -> str:
        """The key: 64 hexadecimal digits."""
        return self._hash.hexdigest()


def content_key(dtype: str, shape: Sequence[int], data: NDArray[np.uint8]) -> str:
    """Key of a whole tensor given as (nbytes,) uint8."""
    hasher = ContentHasher(dtype, shape)
    hasher.update(data)
    return hasher.hexdigest()
