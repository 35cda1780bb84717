from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from splitzip_aio.cache.checkpoint import CheckpointReader, open_checkpoint
from splitzip_aio.errors import CheckpointError, SourceChangedError
from tests.cache.samples import Content, weights, write_checkpoint, write_sharded

A: dict[str, Content] = {"a": ("U8", (3,), b"abc")}
B: dict[str, Content] = {"b": ("U8", (2,), b"de"), "c": ("U8", (1,), b"f")}


def names(sources: object) -> list[str]:
    return [tensor.name for tensor in open_checkpoint(sources).tensors]  # type: ignore[arg-type]


def test_file_files_directory_and_index(tmp_path: Path) -> None:
    one, two = write_checkpoint(tmp_path / "x10.safetensors", A), write_checkpoint(tmp_path / "x9.safetensors", B)
    assert names(one) == names(str(one)) == ["a"]
    assert names([one, str(two)]) == ["a", "b", "c"]
    assert names(tmp_path) == ["b", "c", "a"]  # files in natural order
    assert names(iter([two])) == ["b", "c"]


def test_index_decides_which_files_count(tmp_path: Path) -> None:
    shards = write_sharded(tmp_path / "hf", [A, B])
    write_checkpoint(shards / "consolidated.safetensors", A | B)
    assert names(shards) == names(shards / "model.safetensors.index.json") == ["a", "b", "c"]


def test_usual_index_wins_and_several_others_are_ambiguous(tmp_path: Path) -> None:
    shards = write_sharded(tmp_path / "hf", [A, B])
    usual = shards / "model.safetensors.index.json"
    other = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    (shards / "model.fp16.safetensors.index.json").write_text(other)
    assert names(shards) == ["a", "b", "c"]
    usual.rename(shards / "x.safetensors.index.json")
    with pytest.raises(CheckpointError, match="several indexes"):
        open_checkpoint(shards)
    (shards / "x.safetensors.index.json").unlink()
    assert names(shards) == ["a"]


def test_symbolic_links_are_the_users_own(tmp_path: Path) -> None:
    """Hugging Face's snapshots are links into a store of blobs."""
    shards = write_sharded(tmp_path / "hf", [A, B])
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in shards.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert names(snapshot) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names shard 'gone.safetensors'.*fetch it"),
        ({"weight_map": {"zz": "model-00001-of-00002.safetensors"}}, "places 'zz' in .*no such tensor"),
        ({"weight_map": {"a": "../x.safetensors"}}, "'a'.*'../x.safetensors'"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'a'.*'/etc/passwd'"),
        ({"weight_map": {"a": 3}}, "'a'.*found 3"),
        ({"weight_map": {"a": ".."}}, "'a'"),
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": []}, "weight_map"),
        ([], "weight_map"),
        ("{", "expected"),
    ],
)
def test_bad_index(tmp_path: Path, content: object, problem: str) -> None:
    shards = write_sharded(tmp_path / "hf", [A, B])
    index = shards / "model.safetensors.index.json"
    index.write_text(content if content == "{" else json.dumps(content))
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(shards)
    assert str(index) in str(caught.value)


def test_index_with_a_tensor_twice(tmp_path: Path) -> None:
    shards = write_sharded(tmp_path / "hf", [A, B])
    (shards / "model.safetensors.index.json").write_text('{"weight_map":{"a":"x","a":"y"}}')
    with pytest.raises(CheckpointError, match="'a' occurs twice"):
        open_checkpoint(shards)


def test_twins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one = write_checkpoint(tmp_path / "x.safetensors", A)
    same_tensor = write_checkpoint(tmp_path / "y.safetensors", A)
    same_name = write_checkpoint(tmp_path / "sub" / "x.safetensors", B)
    with pytest.raises(CheckpointError, match=r"y\.safetensors: tensor 'a' is also in .*x\.safetensors"):
        open_checkpoint([one, same_tensor])
    with pytest.raises(CheckpointError, match="same file name"):
        open_checkpoint([one, same_name])
    with pytest.raises(CheckpointError, match="same file name"):
        open_checkpoint([one, one])


def test_nothing_there(tmp_path: Path) -> None:
    for sources, problem in ([], "no source"), (tmp_path, "found none"), (tmp_path / "gone", "No such file"):
        with pytest.raises(CheckpointError, match=problem):
            open_checkpoint(sources)  # type: ignore[arg-type]


def test_reader_reads_any_piece(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "x.safetensors", A)
    write_checkpoint(tmp_path / "y.safetensors", B)
    checkpoint = open_checkpoint(tmp_path)
    with CheckpointReader(checkpoint) as reader:
        for tensor in checkpoint.tensors * 2:
            data = (A | B)[tensor.name][2]
            for offset in range(len(data)):
                out = np.full(len(data) - offset, 0xEE, np.uint8)
                reader.read_into(tensor, offset, out)
                assert out.tobytes() == data[offset:]
        reader.check_unchanged()


def change_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


@pytest.mark.parametrize("change", [change_in_place, replace, shorten, Path.unlink])
@pytest.mark.parametrize("opened", [False, True])
def test_changed_source(tmp_path: Path, change: object, opened: bool) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"w": ("BF16", (1000,), weights(1000))})
    checkpoint = open_checkpoint(path)
    (tensor,) = checkpoint.tensors
    with CheckpointReader(checkpoint) as reader:
        if opened:
            reader.read_into(tensor, 0, np.empty(10, np.uint8))
        change(path)  # type: ignore[operator]
        with pytest.raises(SourceChangedError, match=r"x\.safetensors"):
            reader.check_unchanged()
        if not opened or change is shorten:
            with pytest.raises(SourceChangedError, match=r"x\.safetensors"):
                reader.read_into(tensor, 0, np.empty(tensor.nbytes, np.uint8))
