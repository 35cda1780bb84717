"""The made-up checkpoint: valid, reproducible, of the size asked for, and as compressible as trained weights."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from splitzip_aio import InvalidArgumentError
from splitzip_aio.cli.synthetic import MIN_CHECKPOINT_BYTES, trained_weights, write_checkpoint


@pytest.mark.parametrize("nbytes", [MIN_CHECKPOINT_BYTES, 1_000_000, 5 << 20])
def test_checkpoint_has_the_size_asked_for(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "model.safetensors"
    done: list[int] = []
    write_checkpoint(path, nbytes, progress=lambda now: done.append(now.done_bytes))
    tensors = load_file(path)
    held = sum(tensor.nbytes for tensor in tensors.values())
    width = tensors["model.layers.0.input_layernorm.weight"].numel()
    assert done == sorted(done)
    assert held == done[-1]
    assert nbytes - 2 * width < held <= nbytes
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "model.layers.5.mlp.down_proj.weight" in tensors


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, 1 << 20, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_tensors_differ_from_each_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", 1 << 20)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "q_proj" in name]  # noqa: SIM118
        contents = {file.get_tensor(name).view(torch.int16).numpy().tobytes() for name in names}
    assert len(contents) == len(names) > 1


def test_exponents_are_those_of_trained_layers() -> None:
    """Trained layers show 2.5 to 2.8 bits of entropy; uniform noise would show 8."""
    bits = trained_weights(1024, 1024, seed=0).view(torch.int16).numpy().view(np.uint16)
    counts = np.bincount((bits.ravel() >> 7) & 0xFF)
    share = counts[counts > 0] / counts.sum()
    assert 2.5 < -(share * np.log2(share)).sum() < 2.8


def test_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=str(MIN_CHECKPOINT_BYTES)):
        write_checkpoint(tmp_path / "model.safetensors", MIN_CHECKPOINT_BYTES - 1)
    assert not os.listdir(tmp_path)
