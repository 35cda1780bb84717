"""load: a whole cache through the real pipeline, and what it reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from splitzip_aio import CorruptDataError, InvalidArgumentError, SplitZipShardCache, build_cache
from splitzip_aio.cache import Progress
from splitzip_aio.cli.streaming import StreamReport, best_device, stream_cache
from tests.cli.conftest import CommandLine, flip, pack_of


def test_text(cli: CommandLine, built: Path) -> None:
    done = cli("load", built, "--device", "cpu", "--driver", "threads")
    assert done.code == 0
    fields = {line.split("  ")[0].strip(): line for line in done.out.splitlines()}
    assert fields.keys() >= {"layers", "device", "driver", "streaming", "speed, raw", "speed, wire"}
    assert " cpu, " in fields["device"]
    assert "threads, " in fields["driver"]
    assert done.err.startswith(f"stream {built} to cpu ...\n")


def test_json(cli: CommandLine, built: Path, checkpoint: Path) -> None:
    done = cli("load", built, "--device", "cpu", "--driver", "threads", "--json")
    report = done.document
    tensors = load_file(checkpoint)
    raw_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert done.code == 0
    assert done.err == ""
    assert report["tensors"] == len(tensors)
    assert report["raw_bytes"] == report["statistics"]["decoded_bytes"] == raw_bytes
    assert 0.6 < report["wire_bytes"] / raw_bytes < 0.8
    assert report["raw_bytes_per_s"] == pytest.approx(raw_bytes / report["seconds"])
    assert report["driver"] == "threads"
    assert report["gpu"] is None
    assert report["statistics"]["ring"]["free"] == report["statistics"]["ring"]["slots"]


def test_damage_names_the_tensor(cli: CommandLine, cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        entry = opened.tensors["model.layers.3.mlp.up_proj.weight"]
    flip(pack_of(cache), entry.offset + entry.encoded_bytes // 2)
    done = cli("load", cache, "--device", "cpu", "--json")
    assert done.code == 1
    assert done.document["error"]["type"] == "CorruptDataError"
    assert entry.name in done.document["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--device", "toaster"), "toaster"), (("--driver", "floppy"), "floppy"), (("--device", "cuda:99"), "cuda:99")],
)
def test_what_no_machine_has(cli: CommandLine, built: Path, arguments: tuple[str, str], said: str) -> None:
    done = cli("load", built, *arguments)
    assert done.code in (1, 2)
    assert said in done.err
    assert "Traceback" not in done.err


def test_fallbacks_are_in_the_report_and_not_on_stderr(cli: CommandLine, built: Path) -> None:
    """Without a handler, Python writes warnings of a library to stderr by itself."""
    done = cli("load", built, "--device", "cpu", "--driver", "auto", "--json")
    assert done.err == ""
    assert logging.getLogger("splitzip_aio").handlers


class TestStreamCache:
    def stream(
        self, root: Path, visited: dict[str, torch.Tensor] | None = None, told: list[Progress] | None = None
    ) -> StreamReport:
        def visit(tensors: Mapping[str, torch.Tensor]) -> None:
            assert visited is not None
            visited.update({name: tensor.clone() for name, tensor in tensors.items()})

        return anyio.run(
            partial(
                stream_cache,
                root,
                device=torch.device("cpu"),
                driver="threads",
                total_bytes=1,
                progress=(told if told is not None else []).append,
                visit=None if visited is None else visit,
            )
        )

    def test_visits_every_tensor_with_its_values(self, built: Path, checkpoint: Path) -> None:
        visited: dict[str, torch.Tensor] = {}
        self.stream(built, visited)
        expected = load_file(checkpoint)
        assert visited.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(visited[name].view(torch.int16), tensor.view(torch.int16))

    def test_progress_goes_layer_by_layer(self, built: Path) -> None:
        told: list[Progress] = []
        report = self.stream(built, told=told)
        assert len(told) == report.layers
        assert [now.done_bytes for now in told] == sorted({now.done_bytes for now in told})
        assert told[-1].done_bytes == report.raw_bytes

    def test_one_layer_and_empty_tensors(self, tmp_path: Path) -> None:
        save_file({"only": torch.zeros(0)}, tmp_path / "model.safetensors")
        build_cache(tmp_path / "model.safetensors", tmp_path / "cache")
        report = self.stream(tmp_path / "cache")
        assert (report.layers, report.tensors, report.raw_bytes) == (1, 1, 0)

    def test_damage_ends_it(self, cache: Path) -> None:
        flip(pack_of(cache), 1000)
        with pytest.raises(CorruptDataError):
            self.stream(cache)


def test_best_device() -> None:
    assert best_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert best_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidArgumentError, match="toaster"):
        best_device("toaster")


@pytest.mark.gpu
def test_gpu(cli: CommandLine, built: Path) -> None:
    report = cli("load", built, "--device", "cuda", "--json").document
    assert report["gpu"] == torch.cuda.get_device_name()
    assert report["device"].startswith("cuda")
