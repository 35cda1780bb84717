"""Coders of a build: which one a device gets, and that they make the same cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from splitzip_aio.cache import SplitZipShardCacheBuilder, builder
from splitzip_aio.codec.coders import CpuSegmentCoder, GpuSegmentCoder, SegmentCoder, open_coder
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError
from tests.codec.interpreter import INTERPRETER_SINCE


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def build(root: Path, tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    with SplitZipShardCacheBuilder(root, segment_elements=512) as building:
        for name, tensor in tensors.items():
            building.add_tensor(name, tensor)
        building.finish()
    return files(root)


def test_both_coders_build_the_same_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors of one, several and no batches; a batch has two segments here."""
    pytest.importorskip("triton", minversion=None if torch.cuda.is_available() else INTERPRETER_SINCE)
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5, 317).to(torch.bfloat16),
        "b": torch.arange(300),
        "c": torch.randn(700).to(torch.float16),
        "d": torch.empty(0, 3),
    }
    expected = build(tmp_path / "cpu", tensors)
    used: list[str] = []

    def open_gpu(device: str) -> SegmentCoder:
        used.append(device)
        coder = GpuSegmentCoder("cuda" if torch.cuda.is_available() else "cpu")
        coder.batch_bytes = 2048
        return coder

    monkeypatch.setattr(builder, "open_coder", open_gpu)
    found = build(tmp_path / "gpu", tensors)
    assert used == ["auto"]
    assert found == expected
    assert len(json.loads(found["manifest.json"])["blobs"][0]["segments"]) == 4


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """More segments than threads, and fewer; sizes that grow and shrink from tensor to tensor."""
    torch.manual_seed(1)
    sizes = (700, 40_000, 511, 3, 9_000)
    tensors = {f"t{place}": torch.randn(size).to(torch.bfloat16) for place, size in enumerate(sizes)}
    coders = iter([CpuSegmentCoder(1), CpuSegmentCoder(workers)])
    monkeypatch.setattr(builder, "open_coder", lambda device: next(coders))
    expected = build(tmp_path / "one", tensors)
    assert build(tmp_path / "several", tensors) == expected


def test_a_device_by_name() -> None:
    assert isinstance(open_coder("cpu"), CpuSegmentCoder)
    assert isinstance(open_coder("auto"), GpuSegmentCoder if torch.cuda.is_available() else CpuSegmentCoder)
    for device in ("tpu", "meta", "cuda:x"):
        with pytest.raises(InvalidArgumentError, match="auto, cpu, cuda"):
            open_coder(device)
    with pytest.raises(UnsupportedError, match="CUDA devices"):
        open_coder("cuda:99")
