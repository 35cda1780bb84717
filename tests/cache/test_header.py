"""Damaged, contradictory and hostile safetensors headers."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.cache.header import MAX_HEADER_BYTES, read_header
from splitzip_aio.codec.dtypes import DTYPE_BITS
from splitzip_aio.errors import CheckpointError
from tests.cache.samples import every_dtype, framed, fuzz, safetensors_bytes, write_checkpoint


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    read_header(path)


def file_of(header: Any, data: bytes = b"\0" * 4) -> bytes:
    return framed(json.dumps(header).encode()) + data


DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "header length"),
    "seven bytes": (b"\0" * 7, "header length"),
    "length 0": (b"\0" * 8, "header length"),
    "length 2**60": ((1 << 60).to_bytes(8, "little") + b"{}", "header length"),
    "length past the end": (framed(b"{}")[:-1], "header length"),
    "garbage": (os.urandom(64)[:7] + b"\1" * 57, "header length"),
    "no json": (framed(b"hello"), "header"),
    "not utf-8": (framed(b'{"\xff":1}'), "header"),
    "deep": (framed(b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
    "huge number": (framed(b'{"a":' + b"9" * 5000 + b"}"), "header"),
    "nan": (framed(b'{"a":NaN}'), "NaN"),
    "a list": (framed(b"[]"), "expected an object"),
    "twice": (framed(b'{"a":1,"a":2}'), "'a' occurs twice"),
    "surrogate": (framed(b'{"\\ud800":{}}'), "surrogate"),
    "metadata not strings": (file_of({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "metadata a list": (file_of({"__metadata__": [1]}, b""), "__metadata__"),
    "entry a number": (file_of({"a": 3}, b""), "'a'"),
    "no dtype": (file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}), r"'a'\.dtype"),
    "unknown dtype": (file_of({"a": entry(dtype="F7")}), r"'a'\.dtype.*'F7'"),
    "shape of strings": (file_of({"a": entry(shape=["4"])}), r"'a'\.shape"),
    "shape of floats": (file_of({"a": entry(shape=[4.0])}), r"'a'\.shape"),
    "shape of bools": (file_of({"a": entry(shape=[True, 4])}), r"'a'\.shape"),
    "negative": (file_of({"a": entry(shape=[-1, -4])}), r"'a'\.shape.*-1"),
    "shape overflows": (file_of({"a": entry(shape=[1 << 40, 1 << 40])}), r"'a'\.shape"),
    "zero times overflow": (file_of({"a": entry(shape=[0, 1 << 40, 1 << 40], offsets=[0, 0])}), r"'a'\.shape"),
    "65 dimensions": (file_of({"a": entry(shape=[1] * 64 + [4])}), r"'a'\.shape.*65"),
    "half bytes": (file_of({"a": entry(dtype="F4", shape=[7])}), r"'a'\.shape.*whole number"),
    "offsets of one": (file_of({"a": entry(offsets=[0])}), r"'a'\.data_offsets"),
    "offsets reversed": (file_of({"a": entry(offsets=[4, 0])}), r"'a'\.data_offsets"),
    "offsets negative": (file_of({"a": entry(offsets=[-4, 0])}), r"'a'\.data_offsets"),
    "offsets past the end": (file_of({"a": entry(offsets=[4, 8])}), r"'a'\.data_offsets.*ends at 8.*4 bytes"),
    "size is not shape": (file_of({"a": entry(shape=[3])}), r"'a'\.data_offsets.*3 bytes, found 4"),
    "overlap": (
        file_of({"a": entry(), "b": entry(offsets=[2, 6])}, b"\0" * 6),
        r"'b'\.data_offsets: overlaps 'a'.*begin 4, found 2",
    ),
    "same range": (file_of({"a": entry(), "b": entry()}), "overlaps"),
    "gap": (file_of({"a": entry(), "b": entry(offsets=[5, 9])}, b"\0" * 9), "'b'.*gap after 'a'"),
    "gap at the start": (file_of({"a": entry(offsets=[1, 5])}, b"\0" * 5), "gap after the header"),
    "data nobody claims": (file_of({"a": entry()}, b"\0" * 5), "data: tensors end at 4"),
    "truncated data": (file_of({"a": entry()}, b"\0" * 3), r"'a'\.data_offsets.*ends at 4"),
}


@pytest.mark.parametrize(("content", "field"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_an_error_that_names_file_and_field(tmp_path: Path, content: bytes, field: str) -> None:
    path = tmp_path / "bad.safetensors"
    with pytest.raises(CheckpointError, match=field) as caught:
        read(path, content)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_header_limit(tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(CheckpointError, match=f"header length: expected 2 to {MAX_HEADER_BYTES}"):
        read_header(path)


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "absent"):
        with pytest.raises(CheckpointError, match=name if name != "." else str(tmp_path)):
            read_header(tmp_path / name)


def test_every_dtype_and_what_the_reference_allows(tmp_path: Path) -> None:
    """All dtypes, padding after the JSON, empty tensors anywhere, an unknown field: valid."""
    tensors = every_dtype()
    path = write_checkpoint(tmp_path / "all.safetensors", tensors, {"format": "pt", "empty": ""})
    found = read_header(path)
    assert {tensor.dtype for tensor in found.tensors} == set(DTYPE_BITS)
    raw = path.read_bytes()
    for tensor in found.tensors:
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == tensors[tensor.name][2]
    assert found.metadata == {"format": "pt", "empty": ""}
    odd = {"x": entry(shape=[0], offsets=[0, 0]), "a": {**entry(), "note": 1}, "z": entry(shape=[0, 3], offsets=[4, 4])}
    path.write_bytes(framed(json.dumps(odd).encode() + b"   ") + b"\0" * 4)
    assert [tensor.nbytes for tensor in read_header(path).tensors] == [0, 4, 0]
    path.write_bytes(framed(b'{"__metadata__":null}'))
    assert read_header(path).tensors == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
small = st.integers(-2, 9)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "X"]) | json_values,
        "shape": st.lists(small | json_values, max_size=3) | json_values,
        "data_offsets": st.tuples(small, small) | st.lists(small, max_size=3) | json_values,
    }
)


@fuzz(300)
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | json_values),
    data=st.binary(max_size=12),
)
def test_any_header_is_valid_or_a_checkpoint_error(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(framed(json.dumps(header).encode()) + data)
    try:
        found = read_header(path)
    except CheckpointError:
        return
    size = path.stat().st_size
    covered = sorted((tensor.offset, tensor.nbytes) for tensor in found.tensors)
    assert sum(nbytes for _, nbytes in covered) == len(data)
    assert all(0 <= offset <= offset + nbytes <= size for offset, nbytes in covered)


@fuzz(300)
@given(place=st.integers(0, 200), bit=st.integers(0, 7), length=st.integers(0, 200))
def test_flipped_and_cut_headers_are_valid_or_checkpoint_errors(
    tmp_path: Path, place: int, bit: int, length: int
) -> None:
    content = bytearray(safetensors_bytes({"a": ("U8", (4,), b"abcd"), "b": ("F4", (2,), b"x")}, {"k": "v"}))
    content[place % len(content)] ^= 1 << bit
    path = tmp_path / "flipped.safetensors"
    for damaged in (content, content[: length % len(content)]):
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            assert read_header(path).identity.size == len(damaged)
