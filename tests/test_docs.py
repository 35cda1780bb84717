"""The Python of the README and of every page runs as it stands, top to bottom, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from splitzip_aio.cli.synthetic import write_checkpoint

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script_of(page: Path) -> str:
    """All Python blocks of a page as one script, each at its own line so that tracebacks point into the page."""
    text = page.read_text()
    script = ""
    for block in BLOCK.finditer(text):
        script += "\n" * (text.count("\n", 0, block.start(1)) - script.count("\n")) + block[1]
    return script if torch.cuda.is_available() else script.replace("cuda:0", "cpu")


def test_there_is_python_to_run() -> None:
    assert script_of(ROOT / "README.md")
    assert script_of(ROOT / "docs" / "quickstart.md")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_python_of_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model.safetensors", 1 << 20)
    exec(compile(script_of(page), str(page), "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_shown_exist(page: Path) -> None:
    commands = set(re.findall(r"^(?:\$ )?splitzip-aio ([a-z]+)", page.read_text(), re.MULTILINE))
    assert commands <= {"build", "inspect", "verify", "load", "demo", "doctor", "bench"}
