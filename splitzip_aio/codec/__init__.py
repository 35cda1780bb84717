"""The codec: tensors to segments and back, on the CPU and on GPUs, without files or event loops.

Names are imported when they are first used, so that the CPU codec does not load torch, nor anything Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitzip_aio.codec.codebook import SplitZipCodebook, calibrate_codebook
    from splitzip_aio.codec.gpu import GpuSplitZipDecoder, PendingDecode, triton_available
    from splitzip_aio.codec.gpu_encode import GpuSplitZipEncoder
    from splitzip_aio.codec.schedule import Schedule
    from splitzip_aio.codec.tensors import PayloadMeta, decode_torch, encode_torch

__all__ = [
    "GpuSplitZipDecoder",
    "GpuSplitZipEncoder",
    "PayloadMeta",
    "PendingDecode",
    "Schedule",
    "SplitZipCodebook",
    "calibrate_codebook",
    "decode_torch",
    "encode_torch",
    "triton_available",
]

_MODULES = {
    "GpuSplitZipDecoder": "gpu",
    "GpuSplitZipEncoder": "gpu_encode",
    "PayloadMeta": "tensors",
    "PendingDecode": "gpu",
    "Schedule": "schedule",
    "SplitZipCodebook": "codebook",
    "calibrate_codebook": "codebook",
    "decode_torch": "tensors",
    "encode_torch": "tensors",
    "triton_available": "gpu",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
