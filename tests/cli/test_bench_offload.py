"""bench offload: on a small model, what it reports, and that wrong output has no speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from splitzip_aio.cli.bench import offload, offload_command, offload_peers
from splitzip_aio.cli.bench.offload_peers import CONTENDERS, Contender, Setting
from splitzip_aio.cli.bench.passes import Tier
from tests.cli.conftest import CommandLine

SMALL = ("bench", "offload", "--gigabytes", "0.001", "--repeats", "1", "--device", "cpu")


@contextmanager
def resident(setting: Setting, tier: Tier) -> Iterator[nn.Module]:
    yield setting.subject.load(setting.checkpoint)


@contextmanager
def wrong(setting: Setting, tier: Tier) -> Iterator[nn.Module]:
    model = setting.subject.load(setting.checkpoint)
    with torch.no_grad():
        model.get_parameter("blocks.0.up.weight")[0, 0] += 1
    yield model


@contextmanager
def failing(setting: Setting, tier: Tier) -> Iterator[nn.Module]:
    raise RuntimeError("out of order")
    yield


def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that are there on every machine."""
    others = [Contender(each.__name__, "torch", each, gpu_only=False) for each in (resident, wrong, failing)]
    for module in (offload, offload_command, offload_peers):
        monkeypatch.setattr(module, "CONTENDERS", (CONTENDERS[0], *others))


def test_report(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    peers(monkeypatch)
    done = cli(*SMALL, "--dir", tmp_path, "--picture", tmp_path / "offload.png", "--json")
    assert done.code == 0, done.err
    report = done.document
    rows = {(row["name"], row["tier"]): row for row in report["rows"]}
    assert 0.6 < report["compressed_bytes"] / report["raw_bytes"] < 0.8
    assert report["resident_bytes"] < report["raw_bytes"] / 3
    for tier in Tier:
        assert rows["splitzip-aio", tier.value]["times"]["median_s"] > 0
        assert rows["resident", tier.value]["refused"] is None
        assert "not the resident model's" in rows["wrong", tier.value]["refused"]
        assert "RuntimeError: out of order" in rows["failing", tier.value]["refused"]
    assert rows["splitzip-aio", "host tier"]["pinned_bytes"] > 0
    assert rows["splitzip-aio", "disk"]["pinned_bytes"] == 0
    assert (tmp_path / "offload.png").read_bytes().startswith(b"\x89PNG")


def test_in_words(cli: CommandLine, tmp_path: Path) -> None:
    done = cli(*SMALL, "--dir", tmp_path, "--tiers", "page-cache")
    assert done.code == 0, done.err
    assert "every output was the resident model's, bit for bit" in done.out
    assert "page cache" in done.out
    assert "diffusers group offload: " in done.out
    assert "disk" not in done.out


@pytest.mark.parametrize("size", ["0", "-1"])
def test_size(cli: CommandLine, size: str) -> None:
    assert cli("bench", "offload", "--gigabytes", size, "--device", "cpu").code == 2


@pytest.mark.parametrize(
    "option", [("--model", "gpt"), ("--tiers", "tape"), ("--peers", "nobody"), ("--resident", "x")]
)
def test_unknown(cli: CommandLine, option: tuple[str, str]) -> None:
    done = cli(*SMALL, *option)
    assert done.code == 2
    assert option[0] in done.err


def test_our_own_wrong_output_ends_it(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Contender("splitzip-aio", None, wrong, gpu_only=False)
    for module in (offload, offload_command, offload_peers):
        monkeypatch.setattr(module, "CONTENDERS", (ours,))
    done = cli(*SMALL, "--dir", tmp_path, "--peers", "")
    assert done.code == 1
    assert "the output is not the resident model's" in done.err
