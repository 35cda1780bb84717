"""Groups of tensors, the first round over them, views, and the command that says what a cache covers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.vmm_fast.__main__ import main
from splitzip_aio.vmm_fast.catalog import Catalog, Groups, units_of
from splitzip_aio.vmm_fast.rounds import FirstRound
from splitzip_aio.vmm_fast.views import ArenaViews

ROOT = Path(__file__).parent.parent.parent


def entries(*sizes: int, start: int = 0) -> list[Any]:
    """Entries one behind the other in a pack."""
    return [
        SimpleNamespace(name=f"{start + place}", nbytes=size, pack=0, offset=1000 * (start + place), layer="")
        for place, size in enumerate(sizes)
    ]


def grouped(groups: Groups) -> list[list[str]]:
    return [[tensor for tensor, group in groups.by_tensor.items() if group == name] for name in groups.sizes]


def test_groups_are_consecutive_and_bounded() -> None:
    groups = Groups.of([("a", entries(1024, 1024, 3072, 512)[::-1])], group_bytes=4096)
    assert grouped(groups) == [["0", "1"], ["2", "3"]]
    assert list(groups.sizes.values()) == [2048, 3584]
    assert groups.largest_bytes == 3584
    assert groups.layer_of("2") == next(reversed(groups.sizes))
    assert groups.layer_of("other") == "tensor other"
    assert groups.bytes_of(entries(1000, start=9)[0]) == 1024
    assert groups.bytes_of(entries(1)[0]) == 2048


def test_small_tensors_make_no_group_of_their_own() -> None:
    """A bias travels with the weight behind it, however large that is."""
    sizes = [256, 80_128, 256, 199_936, 256, 64_000, 256, 512, 60_160]
    groups = Groups.of([("a", entries(*sizes))], group_bytes=64_000)
    assert grouped(groups) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7", "8"]]
    many = Groups.of([("a", entries(*[256] * 1000))], group_bytes=25_600)
    assert list(many.sizes.values()) == [25_600] * 10


def test_a_shared_tensor_belongs_to_the_first_unit() -> None:
    shared, other = entries(512, 512)
    groups = Groups.of([("a", [shared]), ("b", [shared, other]), ("c", [])], group_bytes=4096)
    assert grouped(groups) == [["0"], ["1"]]
    assert Groups.of([]).largest_bytes == 0


def test_first_round() -> None:
    kept, lost, temporary = (SimpleNamespace(offset=place, nbytes=1, signature=place) for place in range(3))
    temporary.signature = None
    arena = SimpleNamespace(peek_range_signature=lambda offset, nbytes: {0: 0, 1: 7}.get(offset))
    round_ = FirstRound(["a", "b", "c"])
    assert not round_.complete
    round_.note("c", [(arena, temporary)])
    round_.note("a", [(arena, kept)])
    round_.note("a", [(arena, lost)])
    round_.note("elsewhere", [(arena, lost)])
    assert not round_.complete
    round_.note("b", [(arena, kept), (arena, lost)])
    assert round_.complete
    assert list(round_.lost()) == ["c", "b"]
    assert not FirstRound([]).complete


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    names = ["list.10.up.weight", "list.2.up.weight", "list.2.norm.weight", "head.weight", "other.3.weight"]
    save_file({name: torch.randn(64, 8) for name in names}, tmp_path / "model.safetensors", {"version": "1"})
    build_cache(tmp_path / "model.safetensors", tmp_path / "cache")
    return tmp_path / "model.safetensors"


def test_units_by_name(checkpoint: Path) -> None:
    """Without the adapter: a list's item holds what is below it; what is in no unit is in its layer."""
    registry = SimpleNamespace(
        _slices={
            tensor.name: SimpleNamespace(path=checkpoint, offset_bytes=tensor.offset, size_bytes=tensor.nbytes)
            for tensor in sorted(open_checkpoint(checkpoint).tensors, key=lambda each: each.name)
        }
    )
    store = SimpleNamespace(_file_slices=registry, _timeline_units={1: "list.2", 2: "list.10", 3: "head"})
    with SplitZipShardCache(checkpoint.parent / "cache") as cache:
        units = units_of(store, None, Catalog(cache))
        assert [(name, [entry.name for entry in found]) for name, found in units] == [
            ("head", ["head.weight"]),
            ("list.10", ["list.10.up.weight"]),
            ("list.2", ["list.2.norm.weight", "list.2.up.weight"]),
            ("other.3", ["other.3.weight"]),
        ]
        assert units_of(SimpleNamespace(_file_slices=None), None, Catalog(cache)) == []
        assert Catalog(cache).find(None) is None


def test_views_are_made_once_and_outlive_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def make(address: int, size: int, *, owner: Any, backing: str) -> tuple[torch.Tensor, None]:
        made.append((address, size))
        assert backing == "device"
        return torch.zeros(size, dtype=torch.uint8), None

    package, module = ModuleType("ddo_vmm_allocator"), ModuleType("ddo_vmm_allocator.tensor_view")
    module.cuda_uint8_tensor_from_address = make  # type: ignore[attr-defined]
    package.tensor_view = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ddo_vmm_allocator", package)
    monkeypatch.setitem(sys.modules, "ddo_vmm_allocator.tensor_view", module)
    views = ArenaViews()
    first, second = (SimpleNamespace(info=SimpleNamespace(address=1000 * n), backing="device") for n in (1, 2))
    with torch.inference_mode():
        view = views(first, 24, 8)
    view.copy_(torch.ones(8, dtype=torch.uint8))
    assert views(first, 24, 8) is view
    views(second, 24, 8)
    views(first, 24, 4)
    assert made == [(1024, 8), (2024, 8), (1024, 4)]
    views.clear()
    assert views(first, 24, 8) is not view


def test_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "splitzip_aio.vmm_fast", str(checkpoint), str(tmp_path / "cache")]
    good = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert "5 of 5 tensors, 10240 of 10240 bytes" in good.stdout
    assert f"enable_splitzip_fast_transport(loaded.hook, {str(tmp_path / 'cache')!r})" in good.stdout
    save_file({"x": torch.zeros(4)}, tmp_path / "other.safetensors")
    assert main([str(tmp_path / "other.safetensors"), str(tmp_path / "cache")]) == 1
    assert "0 of 1 tensors" in capsys.readouterr().err
    assert main([str(checkpoint), str(tmp_path / "nothing")]) == 1
    save_file(load_file(checkpoint), checkpoint, {"version": "2"})
    assert main([str(checkpoint), str(tmp_path / "cache")]) == 1
    assert "changed since the cache was built" in capsys.readouterr().err
