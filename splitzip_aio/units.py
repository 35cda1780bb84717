"""Sizes in bytes as people write them: ``268435456``, ``"256MiB"``, ``"2 GB"``."""

from __future__ import annotations

import re
from fractions import Fraction

from splitzip_aio.errors import InvalidArgumentError

__all__ = ["parse_bytes"]

_PREFIXES = ("k", "m", "g", "t")
_FACTORS = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES, 1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES, 1)}
)
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,20}(?:\.[0-9]{1,12})?)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: int | str, *, name: str = "size") -> int:
    """Turn a size into bytes.

    Args:
        value: bytes as an integer, or a decimal number with a unit: ``B``, ``kB`` ``MB`` ``GB`` ``TB``
            (powers of 1000) or ``KiB`` ``MiB`` ``GiB`` ``TiB`` (powers of 1024), in any case, with or
            without a space; no unit means bytes.
        name: what the size is for, to begin an error message with.

    Raises:
        InvalidArgumentError: not a size, negative, or not a whole number of bytes.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidArgumentError(f"{name}: expected bytes or text like '256MiB', found {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise InvalidArgumentError(f"{name}: a size cannot be negative, found {value}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise InvalidArgumentError(f"{name}: expected a size like '256MiB' or '2GB', found {value!r}")
    unit = match["unit"]
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        hint = f"; write '{unit}iB' or '{unit}B'" if unit.lower() in _PREFIXES else ""
        raise InvalidArgumentError(f"{name}: unknown unit {unit!r} in {value!r}{hint}")
    size = Fraction(match["number"]) * factor
    if size.denominator != 1:
        raise InvalidArgumentError(f"{name}: {value!r} is not a whole number of bytes")
    return int(size)
