"""build, inspect and verify: exit codes, text, JSON, and what bad input looks like from outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio import SplitZipShardCache
from tests.cli.conftest import CommandLine, flip, pack_of


def point_pack_at(manifest: Path, target: str) -> None:
    text = manifest.read_text()
    manifest.write_text(text.replace(f"packs/{pack_of(manifest.parent).name}", target))
    assert target in manifest.read_text()


def one_line(text: str) -> str:
    """The error line, which is the last and follows nothing but progress."""
    lines = text.splitlines()
    assert "Traceback" not in text
    assert lines[-1].startswith("splitzip-aio: error: ")
    assert all(line.endswith("...") or " of " in line for line in lines[:-1])
    return lines[-1]


class TestBuild:
    def test_reports_what_it_made(self, cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
        done = cli("build", checkpoint, tmp_path / "cache")
        assert done.code == 0
        fields = dict(line.split(maxsplit=1) for line in done.out.splitlines())
        assert fields["cache"] == str(tmp_path / "cache")
        assert 0.6 < float(fields["ratio"]) < 0.8
        assert fields.keys() == {"cache", "tensors", "raw", "compressed", "ratio", "time"}
        assert done.err.startswith(f"build {tmp_path / 'cache'} ...\n")
        with SplitZipShardCache(tmp_path / "cache") as cache:
            assert cache.tensors.keys() == load_file(checkpoint).keys()

    def test_json_is_one_document_and_nothing_else(self, cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
        done = cli("build", checkpoint, tmp_path / "cache", "--json")
        report = done.document
        size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
        assert done.code == 0
        assert done.err == ""
        assert report["root"] == str(tmp_path / "cache")
        assert report["compressed_bytes"] == size
        assert report["tensors"] == report["encoded"] + report["stored"]
        assert report["ratio"] == pytest.approx(report["compressed_bytes"] / report["raw_bytes"])

    def test_several_sources(self, cli: CommandLine, tmp_path: Path) -> None:
        for name in ("a", "b"):
            save_file({f"{name}.weight": torch.zeros(3)}, tmp_path / f"{name}.safetensors")
        done = cli("build", tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "cache", "--json")
        assert done.document["tensors"] == 2

    @pytest.mark.parametrize(("schedule", "name"), [("top16", "top16"), ("2,3", "2,3"), ("stored", "stored")])
    def test_schedule_is_obeyed(
        self, cli: CommandLine, checkpoint: Path, tmp_path: Path, schedule: str, name: str
    ) -> None:
        done = cli("build", checkpoint, tmp_path / "cache", "--schedule", schedule, "--json")
        assert max(done.document["schedules"].items(), key=lambda item: item[1])[0] == name

    def test_coverage_gate_is_obeyed(self, cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
        done = cli("build", checkpoint, tmp_path / "cache", "--coverage-min", "1", "--json")
        assert done.document["stored"] > 0

    def test_existing_cache_needs_force(self, cli: CommandLine, checkpoint: Path, cache: Path) -> None:
        before = (cache / "manifest.json").read_bytes()
        refused = cli("build", checkpoint, cache)
        assert refused.code == 1
        assert str(cache) in one_line(refused.err)
        assert (cache / "manifest.json").read_bytes() == before
        assert cli("build", checkpoint, cache, "--force").code == 0

    def test_foreign_directory_is_refused_even_with_force(
        self, cli: CommandLine, checkpoint: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "thesis.txt").write_text("years of work")
        done = cli("build", checkpoint, tmp_path, "--force")
        assert done.code == 1
        assert str(tmp_path) in one_line(done.err)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    @pytest.mark.parametrize(
        "content",
        [b"", b"\x00" * 7, (1 << 60).to_bytes(8, "little") + b"{}", b"\x10" + b"\x00" * 7 + b"not json at all."],
        ids=["empty", "short", "huge-header", "not-json"],
    )
    def test_garbage_names_the_file_and_leaves_nothing(self, cli: CommandLine, tmp_path: Path, content: bytes) -> None:
        source = tmp_path / "bad.safetensors"
        source.write_bytes(content)
        done = cli("build", source, tmp_path / "cache")
        assert done.code == 1
        assert str(source) in one_line(done.err)
        assert not (tmp_path / "cache").exists()

    def test_truncated_checkpoint(self, cli: CommandLine, checkpoint: Path, tmp_path: Path) -> None:
        source = tmp_path / "cut.safetensors"
        source.write_bytes(checkpoint.read_bytes()[:-1])
        done = cli("build", source, tmp_path / "cache")
        assert done.code == 1
        assert str(source) in one_line(done.err)

    def test_missing_source(self, cli: CommandLine, tmp_path: Path) -> None:
        done = cli("build", tmp_path / "absent.safetensors", tmp_path / "cache")
        assert done.code == 1
        assert "absent.safetensors" in one_line(done.err)

    def test_error_in_json(self, cli: CommandLine, tmp_path: Path) -> None:
        done = cli("build", tmp_path / "absent.safetensors", tmp_path / "cache", "--json")
        assert done.code == 1
        assert done.document["error"]["type"] == "CheckpointError"
        assert done.document["error"]["message"] in one_line(done.err)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--schedule", "9,9"),
            ("--schedule", "best"),
            ("--coverage-min", "2"),
            ("--coverage-min", "many"),
            ("--fast",),
        ],
    )
    def test_wrong_usage_is_2(
        self, cli: CommandLine, checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...]
    ) -> None:
        done = cli("build", checkpoint, tmp_path / "cache", *arguments)
        assert done.code == 2
        assert "Traceback" not in done.err
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize("command", ["build", "inspect", "verify", "load"])
    def test_without_arguments_it_helps(self, cli: CommandLine, command: str) -> None:
        done = cli(command)
        assert done.code == 2
        assert "Usage: splitzip-aio" in done.out + done.err

    def test_one_argument_is_too_few(self, cli: CommandLine, checkpoint: Path) -> None:
        assert cli("build", checkpoint).code == 2


class TestInspect:
    def test_text(self, cli: CommandLine, built: Path) -> None:
        done = cli("inspect", built)
        assert done.code == 0
        assert f"{built}, format 2, 1 pack\n" in done.out
        assert "model.safetensors" in done.out
        assert "BF16" in done.out
        assert "\x1b" not in done.out
        assert done.err == ""

    def test_json_lists_every_tensor(self, cli: CommandLine, built: Path, checkpoint: Path) -> None:
        summary = cli("inspect", built, "--json").document
        tensors = load_file(checkpoint)
        assert {tensor["name"]: tuple(tensor["shape"]) for tensor in summary["tensors"]} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }
        assert summary["raw_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
        assert summary["layers"][:2] == ["model.embed_tokens", "model.layers.0"]
        assert sum(group["tensors"] for group in summary["groups"]) == len(tensors)
        assert summary["sources"][0]["metadata"] == {"format": "pt"}

    @pytest.mark.parametrize("command", ["inspect", "verify", "load"])
    @pytest.mark.parametrize(
        ("spoil", "expected"),
        [
            (lambda path: path.unlink(), "manifest.json"),
            (lambda path: path.write_text("nonsense"), "JSON"),
            (lambda path: path.write_text(json.dumps({"format": 99})), "format"),
            (lambda path: point_pack_at(path, "../../etc/passwd"), "packs[0].file"),
            (lambda path: point_pack_at(path, "/etc/passwd"), "packs[0].file"),
        ],
        ids=["missing", "not-json", "format", "dot-dot", "absolute"],
    )
    def test_bad_manifest_names_what_is_wrong(
        self, cli: CommandLine, cache: Path, command: str, spoil: Callable[[Path], object], expected: str
    ) -> None:
        spoil(cache / "manifest.json")
        done = cli(command, cache)
        assert done.code == 1
        assert str(cache) in one_line(done.err)
        assert expected in one_line(done.err)

    def test_no_such_directory(self, cli: CommandLine, tmp_path: Path) -> None:
        done = cli("inspect", tmp_path / "nowhere")
        assert done.code == 1
        assert "nowhere" in one_line(done.err)


class TestVerify:
    def test_intact(self, cli: CommandLine, built: Path) -> None:
        done = cli("verify", built)
        assert done.code == 0
        assert done.out.endswith("all intact\n")

    def test_flipped_byte_names_the_tensor(self, cli: CommandLine, cache: Path) -> None:
        with SplitZipShardCache(cache) as opened:
            entry = opened.tensors["model.layers.3.mlp.up_proj.weight"]
        flip(pack_of(cache), entry.offset + entry.encoded_bytes // 2)
        done = cli("verify", cache)
        assert done.code == 1
        damaged = [line for line in done.out.splitlines() if line.startswith("damaged: ")]
        assert len(damaged) == 1
        assert entry.name in damaged[0]
        assert "1 damaged" in done.out
        document = cli("verify", cache, "--json").document
        assert document["ok"] is False
        assert [damage["tensor"] for damage in document["damaged"]] == [entry.name]

    def test_short_pack(self, cli: CommandLine, cache: Path) -> None:
        pack = pack_of(cache)
        with pack.open("r+b") as file:
            file.truncate(pack.stat().st_size // 2)
        done = cli("verify", cache, "--json")
        assert done.code == 1
        names = {damage["tensor"] for damage in done.document["damaged"]}
        assert "model.layers.5.mlp.up_proj.weight" in names
        assert "model.layers.0.mlp.up_proj.weight" not in names

    def test_json(self, cli: CommandLine, built: Path) -> None:
        done = cli("verify", built, "--json")
        assert done.document["ok"] is True
        assert done.document["damaged"] == []
        assert done.err == ""


class TestApp:
    def test_version(self, cli: CommandLine) -> None:
        assert cli("--version").out == "splitzip-aio 0.1.0\n"

    def test_help_lists_the_commands(self, cli: CommandLine) -> None:
        done = cli("--help")
        assert done.code == 0
        for command in ("build", "inspect", "verify", "load", "demo", "doctor"):
            assert command in done.out

    def test_unknown_command(self, cli: CommandLine) -> None:
        assert cli("explode").code == 2
