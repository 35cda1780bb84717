"""Eight codes at a time: what the encoder does to nibbles in a lane's registers, the reverse of ``bits.py``."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["compress", "ones", "squeeze"]


@triton.jit
def squeeze(x, WIDTH: tl.constexpr):
    """Eight nibbles, each below ``2**WIDTH``, as eight codes of WIDTH bits one after another."""
    if WIDTH == 1:
        x = (x | (x >> 3)) & 0x03030303
        x = (x | (x >> 6)) & 0x000F000F
        x = (x | (x >> 12)) & 0xFF
    if WIDTH == 2:
        x = (x | (x >> 2)) & 0x0F0F0F0F
        x = (x | (x >> 4)) & 0x00FF00FF
        x = (x | (x >> 8)) & 0xFFFF
    if WIDTH == 3:
        x = (x & 0x07070707) | ((x >> 1) & 0x38383838)
        x = (x & 0x003F003F) | ((x >> 2) & 0x0FC00FC0)
        x = (x & 0x00000FFF) | ((x >> 4) & 0x00FFF000)
    return x


@triton.jit
def ones(t):
    """How many of the nibbles, each 0 or 1, are 1."""
    return (t * 0x11111111) >> 28


@triton.jit
def compress(x, t):
    """The nibbles of ``x`` where ``t`` has a 1, moved together at the low end; zeros above them.

    Each moves down by the number of zeros of ``t`` below it, bit by bit of that number (Warren, Hacker's Delight,
    section 7-4).
    """
    gaps = 0x11111111 - t
    keep = t * 15
    moves = (gaps * 0x11111111 - gaps) & keep
    x = x & keep
    for k in tl.static_range(3):
        chosen = ((moves >> k) & 0x11111111) * 15
        others = chosen ^ 0xFFFFFFFF
        x = (x & others) | ((x & chosen) >> (4 << k))
        if k < 2:
            moves = (moves & others) | ((moves & chosen) >> (4 << k))
    return x
