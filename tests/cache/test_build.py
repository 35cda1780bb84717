"""Whole checkpoints, in and out again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from splitzip_aio.cache import BuildReport, Progress, SplitZipShardCache, build_cache
from splitzip_aio.cache.layers import layer_name
from splitzip_aio.codec.dtypes import DTYPE_BITS, tensor_bytes
from splitzip_aio.errors import CacheError, InvalidArgumentError
from tests.cache.samples import (
    Content,
    every_dtype,
    fuzz,
    model,
    noise,
    tree,
    weights,
    write_checkpoint,
    write_sharded,
)


def assert_holds(root: Path, tensors: Mapping[str, Content]) -> None:
    with SplitZipShardCache(root) as cache:
        assert cache.tensors.keys() == tensors.keys()
        for name, (dtype, shape, data) in tensors.items():
            entry = cache.tensors[name]
            assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, shape, len(data))
            assert cache.load_bytes(name).tobytes() == data
        assert cache.verify().ok


def build(tmp_path: Path, tensors: Mapping[str, Content], **options: object) -> BuildReport:
    source = write_checkpoint(tmp_path / "source.safetensors", tensors)
    return build_cache(source, tmp_path / "out", force=True, **options)  # type: ignore[arg-type]


def test_sharded_mixed_tied_and_empty(tmp_path: Path) -> None:
    tensors = model() | every_dtype()
    items = list(tensors.items())
    shards = write_sharded(tmp_path / "hf", [dict(items[::2]), dict(items[1::2])])
    report = build_cache(shards, tmp_path / "cache")
    assert_holds(tmp_path / "cache", tensors)
    sizes = {name: len(data) for name, (_, _, data) in tensors.items()}
    assert report.tensors == len(tensors) == report.encoded + report.stored == sum(report.schedules.values())
    assert report.raw_bytes == sum(sizes.values())
    assert (report.tied, report.tied_bytes) == (1, sizes["head.weight"])
    assert report.compressed_bytes == sum(len(content) for content in tree(tmp_path / "cache").values())
    assert report.ratio == report.compressed_bytes / report.raw_bytes
    assert report.resumed == 0
    with SplitZipShardCache(tmp_path / "cache") as cache:
        tied = cache.tensors["embed.weight"], cache.tensors["head.weight"]
        assert len({(entry.pack, entry.offset, entry.key) for entry in tied}) == 1
        assert cache.metadata == {source.name: {"format": "pt"} for source in cache.manifest.sources}
        for file in cache.manifest.sources:
            assert file.size == (shards / file.name).stat().st_size


def test_torch_gets_back_what_safetensors_saved(tmp_path: Path) -> None:
    tensors = {
        name: torch.randn(5, 4).to(dtype)
        for name, dtype in {
            "a": torch.bfloat16,
            "b": torch.float16,
            "c": torch.float32,
            "d": torch.float8_e4m3fn,
            "e": torch.float8_e5m2,
            "f": torch.float64,
        }.items()
    }
    tensors |= {"g": torch.arange(7), "h": torch.tensor([True, False]), "i": torch.tensor(3.5), "j": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "t.safetensors")
    build_cache(tmp_path / "t.safetensors", tmp_path / "cache")
    expected = load_file(tmp_path / "t.safetensors")
    with SplitZipShardCache(tmp_path / "cache") as cache:
        for name, tensor in expected.items():
            loaded = cache.load_tensor(name)
            assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
            assert cache.lookup(tensor) == cache.tensors[name]
            assert loaded.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_every_bit_pattern(tmp_path: Path) -> None:
    """All 65,536 in 16 bits, all in 8 bits, and every exponent of F32, by every schedule."""
    patterns = np.arange(65536, dtype="<u2").tobytes()
    f32 = (np.arange(65536, dtype="<u4") << 16 | np.arange(65536, dtype="<u4")).tobytes()
    tensors: dict[str, Content] = {
        "bf16": ("BF16", (65536,), patterns),
        "f16": ("F16", (65536,), patterns),
        "e4m3": ("F8_E4M3", (256,), patterns[::2][:256]),
        "e5m2": ("F8_E5M2", (256,), bytes(range(256))),
        "f32": ("F32", (65536,), f32),
    }
    tensors |= {f"{name}.first": (dtype, shape, data) for name, (dtype, shape, data) in tensors.items()}
    for schedule in (None, "top16", "stored", "1,1,1,1", "4", "2,2,3"):
        build(tmp_path, tensors, schedule=schedule)
        assert_holds(tmp_path / "out", tensors)


@pytest.mark.parametrize("elements", [1, 2, 3, 15, 16, 17, 999, 1000, 1001, 4095, 4097])
def test_odd_sizes_and_special_values(tmp_path: Path, elements: int) -> None:
    tensors: dict[str, Content] = {
        "nan": ("BF16", (elements,), b"\xc0\x7f" * elements),
        "zero": ("BF16", (elements,), bytes(2 * elements)),
        "weights": ("BF16", (elements,), weights(elements)),
        "noise": ("BF16", (elements,), noise(2 * elements)),
        "raw": ("U8", (elements,), noise(elements)),
    }
    build(tmp_path, tensors, segment_elements=1000, pack_bytes=4096)
    assert_holds(tmp_path / "out", tensors)


def test_nothing_at_all(tmp_path: Path) -> None:
    report = build(tmp_path, {})
    assert (report.tensors, report.raw_bytes, report.ratio) == (0, 0, 1.0)
    assert_holds(tmp_path / "out", {})
    build(tmp_path, {"e": ("BF16", (3, 0), b"")})
    assert_holds(tmp_path / "out", {"e": ("BF16", (3, 0), b"")})


dtypes = st.sampled_from(sorted(DTYPE_BITS))


@st.composite
def contents(draw: st.DrawFn) -> Content:
    dtype = draw(dtypes)
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    if int(np.prod(shape)) * DTYPE_BITS[dtype] % 8:
        shape = (*shape, 4)
    size = tensor_bytes(dtype, shape)
    seed = draw(st.binary(max_size=40)) or b"\0"
    return dtype, shape, (seed * (size // len(seed) + 1))[:size]


@fuzz(60)
@given(
    tensors=st.dictionaries(st.text(max_size=6).filter(lambda name: name != "__metadata__"), contents(), max_size=6),
    segment_elements=st.integers(1, 40),
    pack_bytes=st.integers(1, 3000),
    schedule=st.sampled_from([None, "top16", "3", "2,3", "1,1,1,1", "stored"]),
)
def test_any_checkpoint_comes_back(
    tmp_path: Path, tensors: dict[str, Content], segment_elements: int, pack_bytes: int, schedule: str | None
) -> None:
    try:
        list(map(str.encode, tensors))
    except UnicodeEncodeError:
        return
    build(tmp_path, tensors, segment_elements=segment_elements, pack_bytes=pack_bytes, schedule=schedule)
    assert_holds(tmp_path / "out", tensors)


def test_execution_order_and_contiguous_layers(tmp_path: Path, cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        assert list(opened.layers) == ["blocks." + str(block) for block in range(12)] + [
            "embed", "empty", "head", "ids", "mask", "scale",
        ]  # fmt: skip
        placed = [entry for entry in opened.tensors.values() if entry.segments and entry.name != "head.weight"]
        assert [(entry.pack, entry.offset) for entry in placed] == sorted(
            (entry.pack, entry.offset) for entry in placed
        )
        for entry, following in itertools.pairwise(placed):
            if entry.pack == following.pack:
                assert following.offset == entry.offset + entry.encoded_bytes  # no gaps: a layer is one extent


def test_packs_are_padded_limited_and_never_straddled(cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        assert len(opened.manifest.packs) > 2
        for place, pack in enumerate(opened.manifest.packs):
            inside = [entry for entry in opened.tensors.values() if entry.segments and entry.pack == place]
            end = max(entry.offset + entry.encoded_bytes for entry in inside)
            assert pack.bytes == -(-end // 4096) * 4096 == (cache / pack.file).stat().st_size
            assert end <= 30_000


def test_extents_cover_every_tensor(cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        for entry in opened.tensors.values():
            extents = list(entry.extents())
            assert sum(extent.nbytes for extent in extents) == entry.encoded_bytes
            assert [extent.start for extent in extents] == [0, *(extent.stop for extent in extents)][: len(extents)]
            assert not extents or extents[-1].stop == entry.nbytes
            assert all(extent.offset % 32 == 0 for extent in extents)


def test_layer_rule_of_the_user_is_kept(tmp_path: Path, checkpoint: Path) -> None:
    build_cache(checkpoint, tmp_path / "out", layer_of=lambda name: "odd" if "bias" in name else layer_name(name))
    with SplitZipShardCache(tmp_path / "out") as opened:
        assert len(opened.layers["odd"]) == 12
        assert list(opened.tensors)[-13:] == [f"blocks.{block}.up.bias" for block in range(12)] + ["scale"]
    with SplitZipShardCache(tmp_path / "out", layer_of=lambda name: name[0]) as opened:
        assert list(opened.layers) == ["b", "e", "h", "i", "m", "s"]


def test_same_input_same_bytes(tmp_path: Path, checkpoint: Path) -> None:
    for out in ("one", "two"):
        build_cache(checkpoint, tmp_path / out)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_schedule_and_coverage_gate(tmp_path: Path) -> None:
    spread = np.repeat(np.arange(64, dtype="<u2") << 7, 50).tobytes()  # 64 exponents, equally often
    tensors: dict[str, Content] = {
        "good": ("BF16", (3200,), weights(3200)),
        "spread": ("BF16", (3200,), spread),
        "int": ("I64", (8,), noise(64)),
        "f32": ("F32", (100,), bytes(400)),
    }
    schedules = {}
    for options in (
        {},
        {"schedule": "top16"},
        {"schedule": (2, 3)},
        {"coverage_min": 0.99},
        {"schedule": "3", "coverage_min": 0.99},
    ):
        build(tmp_path, tensors, **options)
        with SplitZipShardCache(tmp_path / "out") as opened:
            schedules[str(options)] = {name: entry.schedule for name, entry in opened.tensors.items()}
            coverage = {name: entry.coverage for name, entry in opened.tensors.items()}
    assert coverage["int"] is None
    assert coverage["spread"] == 0.25
    assert coverage["good"] is not None
    assert coverage["good"] > 0.99
    chosen, top16, forced, gated, both = schedules.values()
    assert {found["int"] for found in schedules.values()} == {"stored"}
    assert chosen["good"] not in ("stored", "top16")
    assert (top16["good"], top16["f32"]) == ("top16", "stored")  # the published layout is for BF16
    assert (forced["good"], forced["f32"]) == ("2,3", "2,3")
    assert forced["spread"] == "stored"  # coding it costs more than storing it
    assert (gated["good"], gated["spread"]) == (chosen["good"], "stored")
    assert (both["good"], both["spread"]) == ("3", "stored")


@pytest.mark.parametrize(
    "options",
    [
        {"coverage_min": 1.5},
        {"coverage_min": float("nan")},
        {"segment_elements": 0},
        {"segment_elements": (1 << 22) + 1},
        {"pack_bytes": 0},
        {"schedule": "5"},
        {"schedule": "fast"},
    ],
)
def test_options_out_of_range(tmp_path: Path, checkpoint: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        build_cache(checkpoint, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_progress_reaches_the_total(tmp_path: Path, checkpoint: Path) -> None:
    seen: list[Progress] = []
    report = build_cache(checkpoint, tmp_path / "out", segment_elements=500, progress=seen.append)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == report.raw_bytes
    assert len(seen) > report.tensors


def test_growth_is_bounded_by_headers(tmp_path: Path) -> None:
    """What does not compress costs its header and padding, and no more, whatever schedule is asked for."""
    tensors: dict[str, Content] = {dtype: (dtype, (8192,), noise(tensor_bytes(dtype, (8192,)))) for dtype in DTYPE_BITS}
    for schedule in (None, "1,1,1,1", "4,4,4,4", "top16"):
        build(tmp_path, tensors, schedule=schedule)
        with SplitZipShardCache(tmp_path / "out") as opened:
            for entry in opened.tensors.values():
                assert entry.encoded_bytes <= entry.nbytes + 160 + 31


def test_more_than_2_31_bytes_are_counted_right(tmp_path: Path) -> None:
    """Sizes past 2**31 in header, slices and manifest, on a sparse file whose tensor is never read."""
    path = tmp_path / "huge.safetensors"
    header = b'{"w":{"dtype":"U8","shape":[5000000000],"data_offsets":[0,5000000000]}}'
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        os.truncate(file.fileno(), 8 + len(header) + 5_000_000_000)

    class StoppedError(Exception):
        pass

    def stop(name: str) -> str:
        raise StoppedError(name)

    with pytest.raises(StoppedError):
        build_cache(path, tmp_path / "out", layer_of=stop)
    assert not (tmp_path / "out").exists()


def test_out_is_reported_where_it_cannot_be(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CacheError, match="cannot be written"):
        build_cache(checkpoint, "/proc/nowhere/cache")
    build_cache(checkpoint, tmp_path / "a" / "b" / "cache")
    assert (tmp_path / "a" / "b" / "cache" / "manifest.json").exists()
