"""What the kernels that count and encode have in common: which program does what, and reading elements.

A program is one warp and takes one tile, chunk after chunk. A lane owns eight consecutive elements of a chunk, which
are a row of a (LANES, n) tensor of words, bytes or elements, so all that concerns one lane stays in its registers. The
last chunk of a segment may be PARTIAL. ``encode_table.py`` describes the table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitzip_aio.codec import layout
from splitzip_aio.codec.encode_table import ENCODE_WORDS
from splitzip_aio.codec.kernels.bits import permute

__all__ = [
    "assignment",
    "elements_of",
    "exponents_of",
    "places",
    "read_elements",
    "read_words",
    "residuals_of",
    "source_of",
    "split_bf16",
    "unpack",
    "words_of",
]

LANES = tl.constexpr(layout.CHUNK_ELEMENTS // 8)
DESCRIPTOR = tl.constexpr(ENCODE_WORDS["words"])
ELEMENTS = tl.constexpr(ENCODE_WORDS["elements"])
FIRST_TILE = tl.constexpr(ENCODE_WORDS["first_tile"])


@triton.jit
def assignment(base, descriptors, tiles):
    """This program's segment and its descriptor (words), its tile in the segment, and how many elements there are."""
    segment = tl.load((base + tiles).to(tl.pointer_type(tl.int32)) + tl.program_id(0))
    descriptor = (base + descriptors).to(tl.pointer_type(tl.int32)) + segment * DESCRIPTOR
    tile = tl.program_id(0) - tl.load(descriptor + FIRST_TILE)
    return segment, descriptor, tile, tl.load(descriptor + ELEMENTS)


@triton.jit
def source_of(descriptor, BYTES: tl.constexpr):
    """Pointer to a segment's elements of BYTES bytes."""
    address = tl.load(descriptor.to(tl.pointer_type(tl.int64)))
    if BYTES == 1:
        source = address.to(tl.pointer_type(tl.uint8))
    elif BYTES == 2:
        source = address.to(tl.pointer_type(tl.uint16))
    else:
        source = address.to(tl.pointer_type(tl.uint32))
    return tl.multiple_of(source, 16)


@triton.jit
def places(step, COLUMNS: tl.constexpr):
    """(LANES, COLUMNS) numbers of the items of step ``step``, consecutive in a lane."""
    return (tl.arange(0, LANES) + step * LANES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def read_elements(source, chunk, elements, PARTIAL: tl.constexpr):
    """(LANES, 8) elements of a chunk; zero where there is none."""
    place = places(chunk, 8)
    if PARTIAL:
        return tl.load(source + place, mask=place < elements, other=0).to(tl.uint32)
    return tl.load(source + place).to(tl.uint32)


@triton.jit
def read_words(source, chunk, elements, BYTES: tl.constexpr, PARTIAL: tl.constexpr):
    """The same as (LANES, 2 * BYTES) words."""
    if PARTIAL:
        words = words_of(read_elements(source, chunk, elements, True), BYTES, 8)
    else:
        words = tl.load(source.to(tl.pointer_type(tl.uint32)) + places(chunk, 2 * BYTES))
    return words


@triton.jit
def words_of(x, BYTES: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of COLUMNS elements of BYTES bytes as rows of little-endian words."""
    if BYTES == 1:
        a, b = tl.split(tl.reshape(x, [LANES, COLUMNS // 2, 2]))
        c, d = tl.split(tl.reshape(a | (b << 8), [LANES, COLUMNS // 4, 2]))
        words = c | (d << 16)
    elif BYTES == 2:
        a, b = tl.split(tl.reshape(x, [LANES, COLUMNS // 2, 2]))
        words = a | (b << 16)
    else:
        words = x
    return words


@triton.jit
def unpack(words, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """(LANES, n) words as (LANES, n * COUNT) fields of WIDTH bits."""
    shift = (tl.arange(0, COUNT) * WIDTH)[None, None, :].to(tl.uint32)
    fields = (words[:, :, None] >> shift) & ((1 << WIDTH) - 1)
    return tl.reshape(fields, [LANES, words.shape[1] * COUNT])


@triton.jit
def elements_of(words, BYTES: tl.constexpr):
    """(LANES, 8) elements."""
    return words if BYTES == 4 else unpack(words, 4 // BYTES, 8 * BYTES)


@triton.jit
def split_bf16(words, PTX: tl.constexpr):
    """(LANES, 2) words of four exponents, and as many of four residuals, of (LANES, 4) words of two elements."""
    a, b = tl.split(tl.reshape(words, [LANES, 2, 2]))
    low = permute(a, b, 0x6420, PTX)
    high = permute(a, b, 0x7531, PTX)
    exponents = ((high & 0x7F7F7F7F) << 1) | ((low >> 7) & 0x01010101)
    return exponents, (low & 0x7F7F7F7F) | (high & 0x80808080)


@triton.jit
def exponents_of(x, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Exponents of elements."""
    return (x >> MANTISSA_BITS) & ((1 << EXPONENT_BITS) - 1)


@triton.jit
def residuals_of(x, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Residuals of elements: the sign above the mantissa."""
    return (x & ((1 << MANTISSA_BITS) - 1)) | ((x >> (MANTISSA_BITS + EXPONENT_BITS)) << MANTISSA_BITS)
