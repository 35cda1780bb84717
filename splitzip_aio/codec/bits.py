"""Little-endian bit planes: element ``i`` of width ``w`` occupies bits ``[i * w, (i + 1) * w)``, lowest bit first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_bits", "to_bits", "unpack_bits"]


def to_bits(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """(n,) unsigned values as (n * width,) bits, one a byte."""
    shifts = np.arange(width, dtype=values.dtype)
    bits: NDArray[np.uint8] = ((values[:, None] >> shifts) & values.dtype.type(1)).astype(np.uint8).ravel()
    return bits


def pack_bits(values: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """(n,) unsigned values as a plane of ``ceil(n * width / 8)`` bytes."""
    return np.packbits(to_bits(values, width), bitorder="little")


def unpack_bits(plane: NDArray[np.uint8], width: int, count: int, *, start: int = 0) -> NDArray[np.uint16]:
    """``count`` values of ``width`` bits (at most 16), the first at bit ``start`` of the (bytes,) plane."""
    first = start // 8
    bits = np.unpackbits(plane[first : (start + count * width + 7) // 8], bitorder="little")
    window = bits[start - 8 * first :][: count * width].reshape(count, width).astype(np.uint16)
    values: NDArray[np.uint16] = (window << np.arange(width, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    return values
