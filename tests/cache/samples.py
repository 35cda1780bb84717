"""Checkpoints and caches for the tests of this package, made byte by byte: any dtype, any damage."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from splitzip_aio.cache.manifest import MANIFEST_NAME, Manifest, encode_manifest
from splitzip_aio.codec.dtypes import DTYPE_BITS, tensor_bytes

FUZZ_SCALE = int(os.environ.get("SPLITZIP_FUZZ_SCALE", "1"))  # 100 or more for a long run

Bytes = NDArray[np.uint8]
Content = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def fuzz(examples: int) -> settings:
    """Settings of a fuzz test, whose examples overwrite each other's files."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples * FUZZ_SCALE, deadline=None, suppress_health_check=quiet)


def weights(elements: int, seed: int = 0) -> bytes:
    """BF16 weights with the exponents of trained ones: compressible."""
    values = (np.random.default_rng(seed).standard_normal(elements) * 0.02).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def noise(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def every_dtype(seed: int = 0) -> dict[str, Content]:
    """One tensor of each dtype, (6, 20)."""
    shape = (6, 20)
    return {
        f"mixed.{dtype}": (dtype, shape, noise(tensor_bytes(dtype, shape), seed + place))
        for place, dtype in enumerate(DTYPE_BITS)
    }


def model() -> dict[str, Content]:
    """A small model: embeddings, twelve blocks, an empty tensor, a scalar, tied weights, other dtypes."""
    tensors: dict[str, Content] = {
        "embed.weight": ("BF16", (50, 64), weights(3200, 1)),
        "head.weight": ("BF16", (50, 64), weights(3200, 1)),
        "empty": ("F32", (0, 7), b""),
        "scale": ("F32", (), noise(4)),
        "ids": ("I64", (33,), noise(264)),
        "mask": ("BOOL", (5,), bytes([0, 1, 1, 0, 1])),
    }
    for block in range(12):
        tensors[f"blocks.{block}.up.weight"] = ("BF16", (48, 64), weights(3072, 10 + block))
        tensors[f"blocks.{block}.up.bias"] = ("F16", (48,), noise(96, 10 + block))
    return tensors


def safetensors_bytes(tensors: Mapping[str, Content], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return framed(json.dumps(header).encode()) + b"".join(data for _, _, data in tensors.values())


def framed(header: bytes) -> bytes:
    """A header with its length before it."""
    return len(header).to_bytes(8, "little") + header


def write_checkpoint(path: Path, tensors: Mapping[str, Content], metadata: Mapping[str, str] | None = None) -> Path:
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def write_sharded(directory: Path, shards: Sequence[Mapping[str, Content]]) -> Path:
    """Shards and their index as Hugging Face lays them out; returns the directory."""
    directory.mkdir(exist_ok=True)
    places = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_checkpoint(directory / name, tensors, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def edit_manifest(root: Path, edit: Any) -> None:
    """Change a manifest's JSON by ``edit(object)`` and give it a valid checksum, as a forger would."""
    path = root / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    edit(content)
    try:
        path.write_bytes(encode_manifest(msgspec.convert(content, Manifest)))
    except msgspec.ValidationError:
        path.write_text(json.dumps(content))


def tree(root: Path) -> dict[str, bytes]:
    """Every file beneath a directory, by relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
