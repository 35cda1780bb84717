"""The 64-bit checksum of decoded bytes, in plain numpy: what every decoder must reproduce.

The bytes, padded with zeros to whole groups of 16, are groups ``q = 0, 1, ...`` of four little-endian words
``w0..w3``. With all products and sums modulo 2**64::

    checksum = sum over q of (GROUP + w0 * k(q) + w1 * (k(q) + STEP) + w2 * (k(q) + 2 * STEP) + w3 * (k(q) + 3 * STEP))
    k(q)     = 1 | (m ^ (m >> 15)),  m = (q * 0x9E3779B1 + 0x85EBCA77) mod 2**32;  k(q) + j * STEP is taken mod 2**32

Multipliers are odd, so a change confined to one word is always seen, and so are two different words of a group that
change places; other changes escape with a chance of about 2**-32 or less. The constant ``GROUP`` makes a group that was
never processed visible even if its data are zero. The sum is independent of order, which is what lets a GPU add up
tiles as they finish. The form is a multilinear hash (Carter and Wegman 1979; Lemire and Kaser 2014) with generated
keys.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUP", "GROUP_BYTES", "KEY_OFFSET", "KEY_STEP", "STEP", "checksum"]

GROUP_BYTES = 16
GROUP = 0x9E3779B97F4A7C15
KEY_STEP = 0x9E3779B1
KEY_OFFSET = 0x85EBCA77
STEP = 0x2C1B3C6E


def checksum(data: NDArray[np.uint8]) -> int:
    """Checksum of (n,) bytes, as an int in [0, 2**64)."""
    groups = -(-data.size // GROUP_BYTES)
    padded = np.zeros(groups * GROUP_BYTES, np.uint8)
    padded[: data.size] = data
    words = padded.view("<u4").reshape(groups, 4).astype(np.uint64)
    mixed = np.arange(groups, dtype=np.uint32) * np.uint32(KEY_STEP) + np.uint32(KEY_OFFSET)
    keys = (mixed ^ (mixed >> np.uint32(15))) | np.uint32(1)
    steps = (np.arange(4, dtype=np.uint64) * np.uint64(STEP)).astype(np.uint32)
    total = (words * (keys[:, None] + steps).astype(np.uint64)).sum(dtype=np.uint64)
    return (int(total) + groups * GROUP) % 2**64
