"""demo: from nothing, and from a checkpoint of one's own; what it prints; that it notices a wrong bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.cli.demo import Comparison, same_bits
from tests.cli.conftest import CommandLine


def test_from_nothing(cli: CommandLine, tmp_path: Path) -> None:
    done = cli("demo", "--size", "1MiB", "--device", "cpu", "--dir", tmp_path)
    assert done.code == 0
    fields = dict(line.split("  ", 1) for line in done.out.splitlines())
    wanted = {"raw", "compressed", "ratio", "device", "driver", "speed, raw", "speed, wire", "bit-exact"}
    assert fields.keys() >= wanted
    assert fields["bit-exact"].strip() == "yes"
    assert fields["device"].strip().startswith("cpu, ")
    assert "direct" in fields["driver"] or "buffered" in fields["driver"]
    assert not os.listdir(tmp_path)


def test_json(cli: CommandLine, tmp_path: Path) -> None:
    done = cli("demo", "--size", "1MiB", "--device", "cpu", "--dir", tmp_path, "--json")
    report = done.document
    assert done.err == ""
    assert report.keys() == {"checkpoint", "build", "ratio", "stream", "bit_exact", "differing"}
    assert report["checkpoint"] is None
    assert report["bit_exact"] is True
    assert report["stream"]["raw_bytes"] == report["build"]["raw_bytes"]
    assert report["ratio"] == pytest.approx(report["build"]["compressed_bytes"] / report["build"]["raw_bytes"])


def test_own_checkpoint_of_every_kind(cli: CommandLine, tmp_path: Path) -> None:
    """Tied, empty, scalar, with NaNs and of dtypes that do not compress."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    tied = torch.randn(100, 100).to(torch.bfloat16)
    tensors = {
        "a.every_bit_pattern": bits.view(torch.bfloat16),
        "a.empty": torch.zeros(0, 7),
        "a.scalar": torch.tensor(-0.0),
        "b.ids": torch.arange(1000),
        "b.mask": torch.tensor([True, False, True]),
        "b.float8": torch.randn(333).to(torch.float8_e4m3fn),
        "c.tied": tied,
        "d.tied": tied.clone(),
    }
    save_file(tensors, tmp_path / "mine.safetensors")
    before = (tmp_path / "mine.safetensors").read_bytes()
    done = cli("demo", "--checkpoint", tmp_path / "mine.safetensors", "--device", "cpu", "--json")
    assert done.code == 0
    assert done.document["bit_exact"] is True
    assert done.document["checkpoint"] == str(tmp_path / "mine.safetensors")
    assert done.document["stream"]["tensors"] == len(tensors)
    assert (tmp_path / "mine.safetensors").read_bytes() == before


def test_wrong_bits_are_noticed(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("splitzip_aio.cli.demo.same_bits", lambda left, right: left.numel() > 1000)
    done = cli("demo", "--checkpoint", checkpoint, "--device", "cpu", "--dir", tmp_path)
    assert done.code == 1
    assert "bit-exact    NO" in done.out
    assert "differs: model.layers.0.input_layernorm.weight\n" in done.out
    assert not os.listdir(tmp_path)


def test_comparison(checkpoint: Path) -> None:
    tensors = load_file(checkpoint)
    name = "model.layers.2.attn.q_proj.weight"
    with Comparison(open_checkpoint(checkpoint)) as comparison:
        assert comparison.differing == set(tensors)
        changed = tensors[name].clone()
        changed.view(torch.int16)[0, 0] ^= 1
        comparison.visit(tensors | {name: changed})
        assert comparison.differing == {name}
        comparison.visit({name: tensors[name]})
    assert comparison.differing == set()


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(1.0), torch.tensor(1.0), True),
    ],
)
def test_same_bits(left: torch.Tensor, right: torch.Tensor, same: bool) -> None:
    assert same_bits(left, right) is same


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--size", "1"), 2, "65536"),
        (("--size", "much"), 2, "much"),
        (("--size", "900TB"), 1, "--dir"),
        (("--checkpoint", "absent.safetensors"), 1, "absent.safetensors"),
        (("--dir", "/absent/folder"), 1, "/absent/folder"),
    ],
)
def test_what_cannot_be_done(cli: CommandLine, arguments: tuple[str, str], code: int, said: str) -> None:
    done = cli("demo", "--device", "cpu", *arguments)
    assert done.code == code
    assert said in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


@pytest.mark.gpu
def test_best_device_is_the_gpu(cli: CommandLine, tmp_path: Path) -> None:
    report = cli("demo", "--size", "16MiB", "--dir", tmp_path, "--json").document
    assert report["bit_exact"] is True
    assert report["stream"]["gpu"] == torch.cuda.get_device_name()
