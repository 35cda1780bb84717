"""bench: on a small checkpoint, what it reports, and that wrong bytes have no speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from splitzip_aio.cli.bench import commands, peers
from splitzip_aio.cli.bench.measure import Times
from splitzip_aio.cli.bench.peers import PEERS, Peer
from tests.cli.conftest import CommandLine, flip, pack_of

SMALL = ("--gigabytes", "0.002", "--repeats", "2", "--device", "cpu", "--ring", "8MiB")


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitzip_aio.cli.bench.overlap._PROBE_S", 0.1)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that benchmarks leave their checkpoint and cache in."""
    return tmp_path_factory.mktemp("bench")


def test_overlap(cli: CommandLine, kept: Path) -> None:
    done = cli("bench", "overlap", *SMALL, "--dir", kept, "--json")
    assert done.code == 0
    report = done.document
    assert 0.6 < report["wire_bytes"] / report["raw_bytes"] < 0.8
    for tier in report["tiers"]:
        assert set(tier["stages"]) == ({"decode"} if tier["tier"] == "host tier" else {"read", "decode"})
        slowest = tier["stages"][tier["slowest"]]["median_s"]
        assert slowest == max(times["median_s"] for times in tier["stages"].values())
        assert (tier["rested"] is None) == (tier["tier"] == "disk")
        assert tier["efficiency"] == pytest.approx(slowest / tier["together"]["median_s"])
    assert [tier["tier"] for tier in report["tiers"]][:2] == ["disk", "page cache"]
    came = {
        tier["tier"]: (tier["buffered_bytes"] + tier["mapped_bytes"], tier["host_bytes"]) for tier in report["tiers"]
    }
    for tier, (there, elsewhere) in {"page cache": came["page cache"], "host tier": came["host tier"][::-1]}.items():
        assert elsewhere == 0, tier
        assert there >= report["wire_bytes"], tier  # the rest is read ahead for the next round
    assert report["wake_ups"]["naps"] > 0


def test_overlap_in_words_and_pictures(cli: CommandLine, kept: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "pass.png"
    done = cli("bench", "overlap", *SMALL, "--dir", kept, "--tiers", "page-cache", "--timeline", picture)
    assert done.code == 0
    assert "page cache: efficiency" in done.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(picture.with_suffix(".json").read_text())["traceEvents"]


def test_what_was_made_is_used_again(cli: CommandLine, tmp_path: Path) -> None:
    arguments = ("bench", "loaders", *SMALL, "--dir", tmp_path, "--tiers", "page-cache", "--peers", "")
    assert cli(*arguments).code == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert cli(*arguments).code == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_loaders(cli: CommandLine, kept: Path) -> None:
    done = cli("bench", "loaders", *SMALL, "--dir", kept, "--json")
    assert done.code == 0
    ours, *others = done.document["loaders"]
    assert ours["name"] == "splitzip-aio"
    assert {"disk", "page cache"} <= ours["times"].keys()
    by_name = {loader["name"]: loader for loader in others}
    assert by_name.keys() == {peer.name for peer in PEERS}
    assert by_name["safetensors"]["times"].keys() == {"disk", "page cache"}
    assert done.document["speedups"].keys() == ours["times"].keys()
    for loader in others:
        assert bool(loader["times"]) == (loader["refused"] is None)


def test_an_absent_peer_is_reported(cli: CommandLine, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Peer("absent", ("no-such-distribution",), peers._safetensors, gpu_only=False)
    monkeypatch.setattr(commands, "PEERS", (absent,))
    done = cli("bench", "loaders", *SMALL, "--dir", kept, "--tiers", "page-cache")
    assert done.code == 0
    assert "absent: not installed" in done.out


def wrong(files: Sequence[Path], device: torch.device) -> Mapping[str, torch.Tensor]:
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    next(iter(tensors.values())).view(torch.uint8)[0, 0] ^= 1
    return tensors


def broken(files: Sequence[Path], device: torch.device) -> Mapping[str, torch.Tensor]:
    raise RuntimeError("out of order")


@pytest.mark.parametrize(("load", "said"), [(wrong, "wrong bytes in 1 tensors"), (broken, "out of order")])
def test_a_peer_that_is_wrong_has_no_speed(
    cli: CommandLine, kept: Path, monkeypatch: pytest.MonkeyPatch, load: peers.Load, said: str
) -> None:
    monkeypatch.setattr(commands, "PEERS", (Peer("bad", ("safetensors",), load, gpu_only=False),))
    done = cli("bench", "loaders", *SMALL, "--dir", kept, "--tiers", "page-cache", "--json")
    (_, bad) = done.document["loaders"]
    assert said in bad["refused"]
    assert bad["times"] == {}


@pytest.mark.parametrize("what", ["overlap", "loaders"])
def test_a_damaged_cache_has_no_speed(cli: CommandLine, kept: Path, tmp_path: Path, what: str) -> None:
    assert cli("bench", what, *SMALL, "--dir", tmp_path, "--tiers", "page-cache").code == 0
    pack = pack_of(tmp_path / "bench-cache")
    flip(pack, pack.stat().st_size // 2)
    done = cli("bench", what, *SMALL, "--dir", tmp_path, "--tiers", "page-cache")
    assert done.code == 1
    assert done.out == ""
    assert "checksum" in done.err


@pytest.mark.parametrize("what", ["overlap", "loaders"])
def test_bytes_that_are_whole_but_not_the_source_have_no_speed(cli: CommandLine, tmp_path: Path, what: str) -> None:
    """Every checksum is right: only the comparison with the checkpoint can tell."""
    assert cli("bench", what, *SMALL, "--dir", tmp_path, "--tiers", "page-cache").code == 0
    source = tmp_path / "bench.safetensors"
    flip(source, source.stat().st_size - 1)
    done = cli("bench", what, *SMALL, "--dir", tmp_path, "--tiers", "page-cache")
    assert done.code == 1
    assert done.out == ""
    assert "no speed is reported" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tiers", "floppy"), "--tiers: expected some of disk, page-cache"),
        (("--gigabytes", "0"), "--gigabytes"),
        (("--ring", "plenty"), "--ring"),
    ],
)
def test_wrong_usage(cli: CommandLine, arguments: tuple[str, str], said: str) -> None:
    done = cli("bench", "overlap", *arguments)
    assert done.code == 2
    assert said in done.err


def test_times() -> None:
    times = Times.of([3.0, 1.0, 2.0])
    assert (times.median_s, times.least_s, times.most_s, times.runs) == (2.0, 1.0, 3.0, 3)
    assert times.rate(4_000_000_000) == 2.0
