"""Safetensors' dtypes: their sizes by the library itself, and tensors to bytes and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec.dtypes import DTYPE_BITS, MAX_DIMENSIONS, tensor_bytes, tensor_contents, torch_view
from splitzip_aio.errors import UnsupportedError

WITHOUT_TORCH = {"F6_E2M3", "F6_E3M2"}
TORCH_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)


def any_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits in this dtype; of bool, zeros and ones."""
    count = int(np.prod(shape, dtype=int)) * torch.empty(0, dtype=dtype).element_size()
    noise = torch.from_numpy(np.random.default_rng(count).integers(0, 256, count, np.uint8))
    if not count:
        return torch.empty(shape, dtype=dtype)
    return (noise & 1 if dtype == torch.bool else noise).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.dtype == torch.float4_e2m1fn_x2:
        tensor = tensor.view(torch.uint8)  # torch 2.8 cannot copy the dtype itself
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_list_is_whole() -> None:
    names = {tensor_contents(torch.empty(2, dtype=dtype))[0] for dtype in TORCH_DTYPES}
    assert names == DTYPE_BITS.keys() - WITHOUT_TORCH


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 0, 6), (6,)], ids=str)
def test_names_shapes_and_bytes_are_those_safetensors_writes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = any_tensor(dtype, shape)
    blob = safetensors.torch.save({"x": tensor})
    length = int.from_bytes(blob[:8], "little")
    entry = json.loads(blob[8 : 8 + length])["x"]
    name, found, contents = tensor_contents(tensor)
    assert (name, list(found)) == (entry["dtype"], entry["shape"])
    assert contents.tobytes() == blob[8 + length :]
    assert tensor_bytes(name, found) == contents.size


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 0, 6), (5,), (1, 1, 1), ()], ids=str)
def test_contents_lead_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = any_tensor(dtype, shape)
    if dtype == torch.float4_e2m1fn_x2 and not shape:
        with pytest.raises(UnsupportedError, match="float4"):  # safetensors has no shape for two lone elements
            tensor_contents(tensor)
        return
    name, found, contents = tensor_contents(tensor)
    back = torch_view(torch.from_numpy(contents), name, found)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_strides_are_followed(dtype: torch.dtype) -> None:
    tensor = any_tensor(dtype, (6, 8))
    for view in (tensor.t(), tensor[1::2, ::3], tensor[:, 3], tensor[0:1].expand(4, 8)):
        name, shape, contents = tensor_contents(view)
        assert torch_view(torch.from_numpy(contents), name, shape).shape == view.shape
        assert contents.tobytes() == bits(view)


def test_contiguous_memory_is_shared() -> None:
    tensor = torch.zeros(8, dtype=torch.bfloat16)
    contents = tensor_contents(tensor)[2]
    contents[:2] = (0x80, 0x3F)
    assert tensor[0] == 1


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert tensor_contents(tensor.conj())[2].tobytes() == bits(tensor.conj().resolve_conj())
    imaginary = tensor.conj().imag
    assert imaginary.is_neg()
    assert tensor_contents(imaginary)[2].tobytes() == bits(torch.tensor([-2.0, 4.0]))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
    ids=["complex128", "sparse", "meta"],
)
def test_what_safetensors_cannot_hold_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="convert it first"):
        tensor_contents(tensor)


@pytest.mark.parametrize(("dtype", "shape"), [("F6_E2M3", (4,)), ("F6_E3M2", (2, 2)), ("F4", (2, 3))], ids=str)
def test_what_torch_cannot_hold_stays_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    memory = torch.zeros(tensor_bytes(dtype, shape), dtype=torch.uint8)
    assert torch_view(memory, dtype, shape) is memory


@given(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 9), max_size=5))
def test_sizes_are_products(dtype: str, shape: list[int]) -> None:
    total = DTYPE_BITS[dtype]
    for size in shape:
        total *= size
    if total % 8:
        with pytest.raises(ValueError, match="whole number of bytes"):
            tensor_bytes(dtype, shape)
    else:
        assert tensor_bytes(dtype, shape) == total // 8


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("F5", (1,), "unknown dtype 'F5'"),
        ("x" * 10_000, (1,), "unknown dtype 'x{40}'"),
        ("U8", (-1,), "dimension -1"),
        ("U8", (2**63,), "dimension"),
        ("U8", (2**32, 2**32), "elements or more"),
        ("U8", (2**32, 2**32, 0), "elements or more"),
        ("I64", (2**61,), "bytes or more"),
        ("U8", (1,) * (MAX_DIMENSIONS + 1), "dimensions"),
        ("F4", (3,), "whole number of bytes"),
    ],
)
def test_no_such_tensor(dtype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as failed:
        tensor_bytes(dtype, shape)
    assert len(str(failed.value)) < 400


def test_the_largest_tensors() -> None:
    assert tensor_bytes("U8", (2**63 - 1,)) == 2**63 - 1
    assert tensor_bytes("I64", (2**30, 2**30 - 1)) == 8 * 2**30 * (2**30 - 1)
    assert tensor_bytes("F32", ()) == 4
