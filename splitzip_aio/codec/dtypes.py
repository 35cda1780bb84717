"""The dtypes of safetensors: how many bits an element has, and which torch dtype, if any, holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitzip_aio.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPE_BITS", "MAX_DIMENSIONS", "flat_contents", "tensor_bytes", "tensor_contents", "torch_view"]

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits of one element, by safetensors dtype name."""

MAX_DIMENSIONS = 64
"""What torch and numpy can hold."""

_LIMIT = 1 << 63
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_PAIRS_OF_F4 = "float4_e2m1fn_x2"  # torch counts pairs, safetensors counts elements
_OUR_NAMES = {theirs: ours for ours, theirs in _TORCH_NAMES.items()} | {_PAIRS_OF_F4: "F4"}


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this safetensors dtype and shape.

    Raises:
        ValueError: no such tensor exists; the text says why, for callers to put into an error of their own.
    """
    if dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {dtype[:40]!r}, expected one of {', '.join(DTYPE_BITS)}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
    extent, empty = 1, False
    for size in shape:
        if not 0 <= size < _LIMIT:
            raise ValueError(f"dimension {size}, expected 0 to 2**63 - 1")
        empty = empty or size == 0
        extent *= size or 1
        if extent >= _LIMIT:  # also with a zero among them: strides must be representable
            raise ValueError(f"shape {list(shape)} has 2**63 elements or more")
    bits = 0 if empty else extent * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{extent} elements of {DTYPE_BITS[dtype]} bits are no whole number of bytes")
    if bits >= 8 * _LIMIT:
        raise ValueError(f"shape {list(shape)} of {dtype} has 2**63 bytes or more")
    return bits // 8


def tensor_contents(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
    """Safetensors dtype name, shape, and the elements as (nbytes,) uint8 on the CPU, in row-major order.

    Shares memory with a contiguous CPU tensor, copies any other.

    Raises:
        UnsupportedError: safetensors has no such dtype, or the tensor is not dense.
    """
    dtype, shape, flat = flat_contents(tensor, "cpu")
    contents: NDArray[np.uint8] = flat.numpy()
    return dtype, shape, contents


def flat_contents(tensor: torch.Tensor, device: torch.device | str) -> tuple[str, tuple[int, ...], torch.Tensor]:
    """``tensor_contents`` as a (nbytes,) uint8 tensor on ``device``."""
    import torch

    dtype, shape = _safetensors_dtype(tensor.dtype), tuple(tensor.shape)
    lone_pair = dtype == "F4" and not shape
    if dtype is None or lone_pair or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UnsupportedError(
            f"a {tensor.layout} tensor of {tensor.dtype}, shape {shape}, on {tensor.device}: safetensors holds dense "
            f"tensors with data, of {', '.join(DTYPE_BITS)}; convert it first"
        )
    if dtype == "F4":
        shape = (*shape[:-1], 2 * shape[-1])
        tensor = tensor.view(torch.uint8)  # torch 2.8 cannot copy the dtype itself
    plain = tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()
    if not plain.numel():  # may have a stride that cannot be viewed
        return dtype, shape, torch.empty(0, dtype=torch.uint8, device=plain.device)
    return dtype, shape, plain.reshape(-1).view(torch.uint8)


def torch_view(contents: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """View (nbytes,) uint8 ``contents``, on any device, as a tensor of this safetensors dtype and shape.

    F4 is seen as pairs (``float4_e2m1fn_x2``, last dimension halved). What torch has no dtype for (F6, F4 of an odd
    last dimension) stays (nbytes,) uint8.
    """
    import torch

    name = _TORCH_NAMES.get(dtype)
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        name, shape = _PAIRS_OF_F4, (*shape[:-1], shape[-1] // 2)
    target = getattr(torch, name, None) if name else None
    if target is None:
        return contents
    if not contents.numel():  # may have a stride that cannot be viewed
        return torch.empty(tuple(shape), dtype=target, device=contents.device)
    return contents.view(target).reshape(tuple(shape))


def _safetensors_dtype(dtype: torch.dtype) -> str | None:
    return _OUR_NAMES.get(str(dtype).removeprefix("torch."))
