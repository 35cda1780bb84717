"""Checkpoints with weights as training leaves them, made from a seed: for the demo, benchmarks and tests."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.errors import InvalidArgumentError

__all__ = ["MIN_CHECKPOINT_BYTES", "Weight", "header", "trained_weights", "write_checkpoint", "write_weights"]

MIN_CHECKPOINT_BYTES = 64 << 10
"""The smallest checkpoint that ``write_checkpoint`` makes."""

_BLOCKS_AT_LEAST = 6
_MAX_WIDTH = 4096
_MATRICES = (
    # name, rows and columns in units of the model's width: 16 squares of the width in all
    ("attn.q_proj", 1, 1),
    ("attn.k_proj", 1, 1),
    ("attn.v_proj", 1, 1),
    ("attn.o_proj", 1, 1),
    ("mlp.gate_proj", 4, 1),
    ("mlp.up_proj", 4, 1),
    ("mlp.down_proj", 1, 4),
)
_SQUARES = sum(rows * columns for _, rows, columns in _MATRICES)


class Weight(NamedTuple):
    """A BF16 tensor of a checkpoint that is made up."""

    name: str
    shape: tuple[int, ...]


def trained_weights(rows: int, columns: int, *, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A BF16 tensor (rows, columns) whose exponents are distributed as those of a trained linear layer.

    Each row is Gaussian; the rows' scales are log-normal (0.4 octaves) around 0.02. The entropy of the
    exponents is then about 2.65 bits, which is what trained transformer layers show.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    octaves = torch.randn(rows, 1, device=device, generator=generator).mul_(0.4)
    values = torch.randn(rows, columns, device=device, generator=generator)
    return values.mul_(octaves.exp2_().mul_(0.02)).to(torch.bfloat16)


def write_checkpoint(
    path: str | os.PathLike[str],
    nbytes: int,
    *,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> None:
    """Write a safetensors file of a decoder-only transformer in BF16, of nearly ``nbytes`` bytes of weights.

    The same arguments give the same bytes on the same release of torch. One tensor is in memory at a time.

    Args:
        path: the file to write; replaced if it exists.
        nbytes: bytes of weights, at least ``MIN_CHECKPOINT_BYTES``; what is left over is less than a row.
        seed: of the random generator.
        progress: called after each tensor.

    Raises:
        InvalidArgumentError: ``nbytes`` is too small.
        OSError: the file cannot be written.
    """
    if nbytes < MIN_CHECKPOINT_BYTES:
        raise InvalidArgumentError(f"a checkpoint of {nbytes} bytes: at least {MIN_CHECKPOINT_BYTES} are needed")
    write_weights(path, list(_transformer(nbytes)), seed=seed, progress=progress)


def write_weights(
    path: str | os.PathLike[str],
    weights: Sequence[Weight],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: ProgressCallback | None = None,
) -> None:
    """Write a safetensors file of these tensors, made on ``device``, one in memory at a time.

    Raises:
        OSError: the file cannot be written.
    """
    done, total = 0, sum(_bytes(weight) for weight in weights)
    with open(path, "wb") as file:
        file.write(header(weights))
        for index, weight in enumerate(weights):
            data = _values(weight, seed=seed * 1_000_003 + index, device=device).cpu().view(torch.uint8).numpy()
            file.write(data.data)
            done += data.nbytes
            if progress is not None:
                progress(Progress(done, total, weight.name))


def _transformer(nbytes: int) -> Iterator[Weight]:
    """Blocks as wide as leaves room for a few of them; what no block fills goes to the embedding."""
    width = _MAX_WIDTH
    while _BLOCKS_AT_LEAST * _block_bytes(width) > nbytes and width > 16:
        width //= 2
    blocks = max(1, nbytes // _block_bytes(width))
    rows = (nbytes - blocks * _block_bytes(width)) // (2 * width)
    if rows:
        yield Weight("model.embed_tokens.weight", (rows, width))
    for block in range(blocks):
        prefix = f"model.layers.{block}"
        yield Weight(f"{prefix}.input_layernorm.weight", (width,))
        for name, row_units, column_units in _MATRICES:
            yield Weight(f"{prefix}.{name}.weight", (row_units * width, column_units * width))


def _block_bytes(width: int) -> int:
    return 2 * (_SQUARES * width * width + width)


def _bytes(weight: Weight) -> int:
    return 2 * math.prod(weight.shape)


def _values(weight: Weight, *, seed: int, device: torch.device | str) -> torch.Tensor:
    if len(weight.shape) == 1:
        return trained_weights(1, weight.shape[0], seed=seed, device=device).add_(1).flatten()
    return trained_weights(*weight.shape, seed=seed, device=device).flatten()


def header(weights: Sequence[Weight]) -> bytes:
    """The safetensors header of these tensors: its length as a little-endian u64, then JSON padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + _bytes(weight)
        entries[weight.name] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
