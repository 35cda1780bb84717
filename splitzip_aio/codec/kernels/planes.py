"""Reading the planes of a coded segment that have a code, or a byte, for every element."""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import formats, layout
from splitzip_aio.codec.kernels.bits import window

__all__ = ["fetch"]

HEADER = tl.constexpr(layout.HEADER_BYTES)
F32 = tl.constexpr(formats.F32.code)
UNBOUNDED = tl.constexpr(0x7FFFFFFF)  # a window whose caller knows that it lies inside the segment


@triton.jit
def first_codes(plane, lane, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """The lanes' eight codes of the first tier."""
    if WIDTH == 1:
        return tl.load(plane + lane).to(tl.uint32)
    if WIDTH == 2:
        return tl.load(plane.to(tl.pointer_type(tl.uint16)) + lane).to(tl.uint32)
    if WIDTH == 4:
        return tl.load(plane.to(tl.pointer_type(tl.uint32)) + lane)
    return window(plane.to(tl.pointer_type(tl.uint32)), lane.to(tl.uint32) * 24, UNBOUNDED, PTX)


@triton.jit
def fetch(segment, codes, at, FORMAT: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr):
    """What lanes ``at`` need first: their codes of the first tier, of WIDTH bits, and their signs and mantissas.

    Zeros for the latter where no byte plane holds them.
    """
    packed = first_codes(codes, at, WIDTH, PTX)
    s = tl.zeros(at.shape, tl.uint64)
    if FORMAT <= F32:
        s = tl.load((segment + HEADER).to(tl.pointer_type(tl.uint64)) + at)
    return packed, s
