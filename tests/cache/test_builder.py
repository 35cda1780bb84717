"""Tensors added one by one, and the directory they are built in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitzip_aio.cache import SplitZipShardCache, SplitZipShardCacheBuilder, build_cache
from splitzip_aio.errors import (
    CacheBusyError,
    CacheExistsError,
    ClosedError,
    InvalidArgumentError,
    UnsupportedError,
)
from tests.cache.samples import tree


def test_tensors_one_by_one(tmp_path: Path) -> None:
    base = torch.randn(64, 48).bfloat16()
    tensors = {
        "z": base,
        "a": base.t(),  # strides of its own
        "m": base[::2, 1:],
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(4, 0, dtype=torch.int16),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "grad": torch.nn.Parameter(torch.randn(5)),
        "again": base.clone(),
    }
    with SplitZipShardCacheBuilder(tmp_path / "cache", segment_elements=100) as builder:
        for name, tensor in tensors.items():
            builder.add_tensor(name, tensor)
        report = builder.finish()
    assert (report.tensors, report.tied) == (8, 1)
    with SplitZipShardCache(tmp_path / "cache") as cache:
        assert list(cache.tensors) == list(tensors)  # the caller's order
        for name, tensor in tensors.items():
            assert torch.equal(cache.load_tensor(name), tensor.detach().resolve_conj())
        assert cache.tensors["again"].offset == cache.tensors["z"].offset
        assert cache.manifest.sources == ()
        cache.check_sources(tmp_path)


def test_pairs_of_f4_are_counted_as_elements(tmp_path: Path) -> None:
    pairs = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 3)
    with SplitZipShardCacheBuilder(tmp_path / "cache") as builder:
        builder.add_tensor("p", pairs)
        builder.finish()
    with SplitZipShardCache(tmp_path / "cache") as cache:
        assert (cache.tensors["p"].dtype, cache.tensors["p"].shape) == ("F4", (2, 6))
        loaded = cache.load_tensor("p")
        assert (loaded.dtype, loaded.shape) == (pairs.dtype, pairs.shape)
        assert loaded.view(torch.uint8).equal(pairs.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.empty(2, device="meta")],
    ids=["dtype", "sparse", "meta"],
)
def test_what_safetensors_cannot_hold(tmp_path: Path, tensor: torch.Tensor) -> None:
    with SplitZipShardCacheBuilder(tmp_path / "cache") as builder:
        with pytest.raises(UnsupportedError):
            builder.add_tensor("x", tensor)
        builder.add_tensor("y", torch.ones(1))  # the builder goes on
        assert builder.finish().tensors == 1


def test_names(tmp_path: Path) -> None:
    with SplitZipShardCacheBuilder(tmp_path / "cache") as builder:
        builder.add_tensor("x", torch.ones(1))
        for name in ("x", "\ud800"):
            with pytest.raises(InvalidArgumentError, match="tensor"):
                builder.add_tensor(name, torch.ones(1))
        builder.add_tensor("übel/../\n\0", torch.ones(2))
        assert builder.finish().tensors == 2
    with SplitZipShardCache(tmp_path / "cache") as cache:
        assert list(cache.tensors) == ["x", "übel/../\n\0"]


def test_layers_have_names(tmp_path: Path) -> None:
    with SplitZipShardCacheBuilder(tmp_path / "cache", layer_of=lambda name: "") as builder:
        with pytest.raises(InvalidArgumentError, match="'x': layer_of gave an empty name"):
            builder.add_tensor("x", torch.ones(1))
        builder.add_tensor("", torch.ones(1))
        builder.finish()
    with SplitZipShardCache(tmp_path / "cache") as cache:
        assert list(cache.layers) == [""]


def test_forgotten_builder_and_cache_say_so(tmp_path: Path) -> None:
    builder = SplitZipShardCacheBuilder(tmp_path / "cache")
    with pytest.warns(ResourceWarning, match="unfinished builder"):
        del builder
    SplitZipShardCacheBuilder(tmp_path / "cache").finish()
    opened = SplitZipShardCache(tmp_path / "cache")
    with pytest.warns(ResourceWarning, match="unclosed cache"):
        del opened


def test_without_finish_nothing_stays(tmp_path: Path) -> None:
    with SplitZipShardCacheBuilder(tmp_path / "cache") as builder:
        builder.add_tensor("x", torch.ones(1))
        assert (tmp_path / "cache").exists()
    assert not (tmp_path / "cache").exists()
    for act in (builder.finish, lambda: builder.add_tensor("y", torch.ones(1)), lambda: builder.resume("plan")):
        with pytest.raises(ClosedError):
            act()
    builder.abort()


def test_finish_is_final(tmp_path: Path) -> None:
    builder = SplitZipShardCacheBuilder(tmp_path / "cache")
    builder.finish()
    builder.abort()
    with pytest.raises(ClosedError):
        builder.finish()
    assert tree(tmp_path / "cache").keys() == {"manifest.json"}


def test_resume_comes_first(tmp_path: Path) -> None:
    with SplitZipShardCacheBuilder(tmp_path / "cache") as builder:
        builder.add_tensor("x", torch.ones(1))
        with pytest.raises(InvalidArgumentError, match="before the first tensor"):
            builder.resume("plan")


def test_complete_cache_needs_force(cache: Path, checkpoint: Path) -> None:
    before = tree(cache)
    with pytest.raises(CacheExistsError, match="--force"):
        build_cache(checkpoint, cache)
    assert tree(cache) == before
    report = build_cache(checkpoint, cache, force=True)
    assert tree(cache) != before  # other segments than the fixture's
    assert sum(map(len, tree(cache).values())) == report.compressed_bytes  # nothing of the old one is left


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "packs/mine.szp", "packs/sub/file", "manifest.json"])
def test_what_is_not_a_cache_is_not_touched(tmp_path: Path, checkpoint: Path, name: str, force: bool) -> None:
    out = tmp_path / "mine"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    if name == "manifest.json":
        (out / "index.html").write_text("a web page's")
    before = tree(out)
    with pytest.raises(CacheExistsError, match="is not a cache"):
        build_cache(checkpoint, out, force=force)
    assert tree(out) == before


def test_directory_of_packs_must_be_one(tmp_path: Path, checkpoint: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "packs").symlink_to(elsewhere)
    with pytest.raises(CacheExistsError, match="'packs'"):
        build_cache(checkpoint, out)
    assert list(elsewhere.iterdir()) == []


def test_out_is_a_file(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CacheExistsError, match="is a file"):
        build_cache(checkpoint, checkpoint)


def test_files_beside_a_cache_stay(cache: Path, checkpoint: Path) -> None:
    (cache / "README.md").write_text("about")
    (cache / "config.json").write_text("{}")
    build_cache(checkpoint, cache, force=True)
    assert (cache / "README.md").read_text() == "about"


def test_damaged_cache_is_replaced_with_force_only(cache: Path, checkpoint: Path) -> None:
    (cache / "manifest.json").write_text("{")
    with pytest.raises(CacheExistsError, match="already holds"):
        build_cache(checkpoint, cache)
    report = build_cache(checkpoint, cache, force=True)
    assert sum(map(len, tree(cache).values())) == report.compressed_bytes


def test_one_builder_at_a_time(tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "out"
    with SplitZipShardCacheBuilder(out) as builder:
        for force in (False, True):
            with pytest.raises(CacheBusyError, match="another builder"):
                build_cache(checkpoint, out, force=force)
        builder.add_tensor("x", torch.ones(1))
        builder.finish()
    with SplitZipShardCache(out) as cache:
        assert list(cache.tensors) == ["x"]
    assert not list(out.glob(".*"))


def test_loser_does_not_disturb(tmp_path: Path) -> None:
    out = tmp_path / "out"
    builder = SplitZipShardCacheBuilder(out)
    with pytest.raises(CacheBusyError):
        SplitZipShardCacheBuilder(out)
    builder.abort()
    assert not out.exists()
    SplitZipShardCacheBuilder(out).finish()
