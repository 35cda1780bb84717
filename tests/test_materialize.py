"""``load_file``: what safetensors would load, by way of a cache that is found, checked or built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import splitzip_aio
from splitzip_aio import (
    CacheNotFoundError,
    CorruptDataError,
    InvalidArgumentError,
    SourceChangedError,
    UnsupportedError,
)
from splitzip_aio.cache import Progress, SplitZipShardCache
from splitzip_aio.errors import CacheError, CheckpointError
from splitzip_aio.materialize import cache_path, copy_tensors, load_file

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made = {f"blocks.{number}.weight": torch.randn(300, 70).bfloat16() * 0.02 for number in range(12)}
    made |= {"ids": torch.arange(33), "mask": torch.tensor([True, False]), "none": torch.empty(0, 7)}
    made |= {"large.weight": torch.randn(1 << 10, 1 << 10).half(), "scale": torch.tensor(0.5)}
    made["twin.weight"] = made["blocks.3.weight"].clone()
    return made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors(), path)
    return path


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], device: str = "cpu") -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].device.type) == (tensor.dtype, device)
        assert torch.equal(found[name].cpu(), tensor), name


@pytest.mark.parametrize("device", DEVICES)
def test_equals_safetensors(checkpoint: Path, device: str) -> None:
    found = load_file(checkpoint, device, build=True)
    check(found, safetensors.torch.load_file(checkpoint), device)
    check(load_file(str(cache_path(checkpoint)), torch.device(device)), tensors(), device)


@pytest.mark.parametrize("device", DEVICES)
def test_each_tensor_has_memory_of_its_own(checkpoint: Path, device: str) -> None:
    """Also of those that are equal, which the cache has once."""
    found = load_file(checkpoint, device, build=True)
    for tensor in found.values():
        tensor.zero_()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    check(load_file(checkpoint, device), tensors(), device)
    twin, other = found["twin.weight"], found["blocks.3.weight"]
    assert twin.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("chunk_bytes", "room"), [(1, None), (100_000, None), (100_000, 1)])
def test_chunks(
    checkpoint: Path, device: str, chunk_bytes: int, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming asks for many chunks in turn, in little room or more; here also where the CPU would decode in place."""
    from splitzip_aio import materialize

    monkeypatch.setattr(materialize, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(materialize, "_decode", lambda cache, entries, meter: stream(cache, entries, "cpu", meter))

    def stream(cache: SplitZipShardCache, entries: list[splitzip_aio.cache.Entry], device: str, meter: object):  # type: ignore[no-untyped-def]
        return materialize._stream(cache, entries, torch.device(device), meter, room, {"ring_bytes": "8MiB"})  # type: ignore[arg-type]

    check(load_file(checkpoint, device, build=True), tensors(), device)
    with SplitZipShardCache(cache_path(checkpoint)) as cache:
        some = ["blocks.7.weight", "ids", "none", "twin.weight"]
        check(copy_tensors(cache, some, device), {name: tensors()[name] for name in some}, device)
        assert copy_tensors(cache, [], device) == {}


def test_progress(checkpoint: Path) -> None:
    told: list[Progress] = []
    load_file(checkpoint, build=True)
    found = load_file(checkpoint, progress=told.append)
    total = sum(tensor.nbytes for tensor in found.values())
    assert [each.done_bytes for each in told] == sorted(each.done_bytes for each in told)
    assert {each.tensor for each in told} == found.keys()
    assert told[-1].done_bytes == told[-1].total_bytes == total


def test_error_of_progress_ends_it(checkpoint: Path) -> None:
    load_file(checkpoint, build=True)

    def stop(_: Progress) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        load_file(checkpoint, progress=stop)


def test_cache_beside_the_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(CacheNotFoundError, match=r"none at .*model.safetensors.splitzip; make one with build=True"):
        load_file(checkpoint)
    check(load_file(checkpoint, build=True), tensors())
    checkpoint.rename(checkpoint.with_suffix(".away"))
    check(load_file(checkpoint), tensors())


def test_cache_home(checkpoint: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    check(load_file(checkpoint, build=True, cache_home=home), tensors())
    (root,) = home.iterdir()
    assert root == cache_path(checkpoint, home)
    assert not cache_path(checkpoint).exists()
    other = tmp_path / "other" / checkpoint.name
    assert cache_path(other, home) != root


def test_directory(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    parts = list(tensors().items())
    safetensors.torch.save_file(dict(parts[:5]), folder / "a.safetensors")
    safetensors.torch.save_file(dict(parts[5:]), folder / "b.safetensors")
    check(load_file(folder, build=True), tensors())
    assert cache_path(folder) == tmp_path / "model.splitzip"


def test_changed_checkpoint(checkpoint: Path) -> None:
    load_file(checkpoint, build=True)
    changed = tensors(1) | {"more": torch.zeros(3)}
    safetensors.torch.save_file(changed, checkpoint)
    with pytest.raises(SourceChangedError, match="changed since the cache was built"):
        load_file(checkpoint)
    check(load_file(checkpoint, build=True), changed)
    check(load_file(checkpoint), changed)


def test_nothing_to_build_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_file(tmp_path / "nothing.safetensors", build=True)


def test_damage(checkpoint: Path) -> None:
    load_file(checkpoint, build=True)
    pack = next((cache_path(checkpoint) / "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptDataError):
        load_file(checkpoint)


@pytest.mark.parametrize("load", [lambda path: load_file(path, "cud"), lambda path: load_file(path, "cuda:99")])
def test_devices_that_are_not_there(checkpoint: Path, load: Callable[[Path], object]) -> None:
    load_file(checkpoint, build=True)
    with pytest.raises((InvalidArgumentError, UnsupportedError), match="device"):
        load(checkpoint)


def test_tensor_that_is_not_there(checkpoint: Path) -> None:
    load_file(checkpoint, build=True)
    with SplitZipShardCache(cache_path(checkpoint)) as cache, pytest.raises(CacheError, match="no tensor 'x'"):
        copy_tensors(cache, ["x", "ids"], "cpu")
