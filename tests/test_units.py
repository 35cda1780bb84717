"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (256 << 20, 256 << 20),
        ("0", 0),
        ("4096", 4096),
        ("17B", 17),
        ("256MiB", 256 << 20),
        ("256mib", 256 << 20),
        ("2GiB", 2 << 30),
        ("64 MB", 64_000_000),
        (" 3 kB ", 3000),
        ("1TiB", 1 << 40),
        ("1TB", 10**12),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
    ],
)
def test_accepts(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "expected a size"),
        ("MiB", "expected a size"),
        ("-1MiB", "expected a size"),
        ("1e6", "expected a size"),
        ("1_000", "expected a size"),
        ("1 2 MiB", "expected a size"),
        ("٣MiB", "expected a size"),
        ("9" * 21, "expected a size"),
        ("256M", "write 'MiB' or 'MB'"),
        ("5 parsecs", "unknown unit 'parsecs'"),
        ("1.5B", "not a whole number of bytes"),
        ("0.0001kB", "not a whole number of bytes"),
        (-1, "cannot be negative"),
        (True, "expected bytes"),
        (1.5, "expected bytes"),
        (None, "expected bytes"),
    ],
)
def test_refuses(value: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"ring_bytes: .*{message}"):
        parse_bytes(value, name="ring_bytes")  # type: ignore[arg-type]


@given(st.integers(0, 10**18), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"]))
def test_integers_of_any_unit_are_exact(number: int, unit: str) -> None:
    factor = 1
    if len(unit) > 1:
        factor = (1024 if "i" in unit else 1000) ** ("KMGT".index(unit[0].upper()) + 1)
    assert parse_bytes(f"{number}{unit}") == number * factor
