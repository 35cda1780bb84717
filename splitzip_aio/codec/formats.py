"""Element formats: where a floating-point element keeps its exponent, and what remains.

An element is split into its exponent, which is worth coding, and its residual, which is not: the sign above the
mantissa, ``1 + mantissa_bits`` bits. The residual is kept as one or two bit planes: the low eight bits, then
the rest. Whatever has no exponent field (integers, booleans, F64) is ``RAW``: its elements are bytes and are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F16",
    "F32",
    "RAW",
    "ElementFormat",
    "element_format",
    "format_from_code",
]


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """Bit layout of one element, least significant bits first: mantissa, exponent, sign.

    ``name`` is the safetensors dtype name, ``code`` the byte that stands for the format in a segment header.
    ``RAW`` has no exponent and no residual; one of its elements is one byte.
    """

    name: str
    code: int
    element_bytes: int
    exponent_bits: int
    mantissa_bits: int

    @property
    def residual_bits(self) -> int:
        """Bits of sign and mantissa in an element; 0 for ``RAW``."""
        return 1 + self.mantissa_bits if self.exponent_bits else 0

    @property
    def low_bits(self) -> int:
        """Bits an element has in the first residual plane."""
        return min(8, self.residual_bits)

    @property
    def high_bits(self) -> int:
        """Bits an element has in the second residual plane; 0 when there is none."""
        return self.residual_bits - self.low_bits


RAW = ElementFormat("RAW", 0, 1, 0, 0)
BF16 = ElementFormat("BF16", 1, 2, 8, 7)
F16 = ElementFormat("F16", 2, 2, 5, 10)
F32 = ElementFormat("F32", 3, 4, 8, 23)
F8_E4M3 = ElementFormat("F8_E4M3", 4, 1, 4, 3)
F8_E5M2 = ElementFormat("F8_E5M2", 5, 1, 5, 2)

_BY_CODE = {fmt.code: fmt for fmt in (RAW, BF16, F16, F32, F8_E4M3, F8_E5M2)}
_BY_NAME = {fmt.name: fmt for fmt in _BY_CODE.values()}


def element_format(dtype: str) -> ElementFormat:
    """Format of a safetensors dtype name; ``RAW`` for every dtype without an exponent worth coding."""
    return _BY_NAME.get(dtype, RAW)


def format_from_code(code: int) -> ElementFormat | None:
    """Format a segment header's byte stands for, or None when no such format exists."""
    return _BY_CODE.get(code)
