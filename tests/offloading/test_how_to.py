"""What the how-to pages show, with small models under the names that the pages use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import splitzip_aio

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def first_block(page: str, resident_bytes: int) -> dict[str, Any]:
    """Run the block that offloads, in less memory than the page's model needs; what it has defined."""
    text = BLOCK.findall((PAGES / page).read_text())[0].replace("4GiB", str(resident_bytes))
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text if torch.cuda.is_available() else text.replace('"cuda"', '"cpu"'), page, "exec"), names)
    return names


def test_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    from splitzip_aio.cli.bench.offload_subjects import FluxTransformer

    monkeypatch.chdir(tmp_path)
    subject, folder = FluxTransformer(1), Path("FLUX.1-dev/transformer")
    folder.mkdir(parents=True)
    subject.save(folder, torch.device("cpu"))
    report = splitzip_aio.build_cache(folder, "transformer-cache")
    model = first_block("diffusers.md", report.raw_bytes // 3)["transformer"]
    device = torch.device(splitzip_aio.offload_statistics(model).device)
    assert splitzip_aio.offload_statistics(model).rotating
    with torch.inference_mode():
        assert torch.equal(subject.run(model, device), subject.run(subject.load(folder).to(device), device))
    splitzip_aio.detach(model)


def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from splitzip_aio.cli.bench.offload_subjects import LlamaDecoder

    monkeypatch.chdir(tmp_path)
    subject, folder = LlamaDecoder(1), Path("Llama-3-8B")
    folder.mkdir()
    subject.save(folder, torch.device("cpu"))
    report = splitzip_aio.build_cache(folder, "llama-cache")
    model = first_block("transformers.md", report.raw_bytes * 2 // 3)["model"]
    device = torch.device(splitzip_aio.offload_statistics(model).device)
    assert splitzip_aio.offload_statistics(model).rotating
    with torch.inference_mode():
        expected = subject.run(subject.load(folder).to(device), device, 0.25)
        assert torch.equal(subject.run(model, device, 0.25), expected)
    splitzip_aio.detach(model)
