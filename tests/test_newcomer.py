"""A newcomer's path: a clone, a new virtual environment, and README.md from top to bottom, every snippet."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from splitzip_aio.cli.synthetic import write_checkpoint

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLONED = (
    *("splitzip_aio", "tests", "bench", "docs", "examples", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"),
    *("mkdocs.yml", "tox.ini"),
)
REQUIRE_INDEX = "SPLITZIP_REQUIRE_MODELS"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer has cloned, with the checkpoint that README.md speaks of."""
    root = tmp_path_factory.mktemp("newcomer") / "clone"
    root.mkdir()
    for name in CLONED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=all_but_machine_code)
        elif source.exists():
            shutil.copy(source, root / name)
    write_checkpoint(root / "model.safetensors", 1 << 20)
    return root


def all_but_machine_code(folder: str, names: list[str]) -> list[str]:
    """Of compiled files only what Numba made, which takes half a minute to make again and is not what is tested."""
    return [name for name in names if folder.endswith("__pycache__") and not name.endswith((".nbi", ".nbc"))]


@pytest.fixture(scope="module")
def environment(clone: Path) -> dict[str, str]:
    """A new virtual environment; what this one has installed counts as installed, so that nothing large is fetched."""
    folder = clone.parent / "venv"
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [
        path for path in [*site.getsitepackages(), *sys.path] if path.endswith(("site-packages", "dist-packages"))
    ]
    (packages / "installed_elsewhere.pth").write_text("\n".join(dict.fromkeys(others)))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PYTEST"))
    }
    return kept | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}


def snippets() -> list[tuple[str, str]]:
    """Language and text of each, in order; without a GPU where there is none."""
    text = (ROOT / "README.md").read_text()
    if not torch.cuda.is_available():
        text = text.replace("cuda:0", "cpu")
    return BLOCK.findall(text)


def run(command: list[str], clone: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_readme_from_top_to_bottom(clone: Path, environment: dict[str, str]) -> None:
    done = run(["pip", "install", "--quiet", "hatchling"], clone, environment)
    if done.returncode:
        if os.environ.get(REQUIRE_INDEX) == "1":
            pytest.fail(f"{REQUIRE_INDEX}=1, but pip says: {done.stderr}", pytrace=False)
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    assert any("&& pytest -n 2\n" in text for _, text in snippets())
    languages = [language for language, _ in snippets()]
    assert languages.count("sh") >= 3
    assert languages.count("python") >= 2
    program = ""
    for language, text in snippets():
        if language == "sh":
            # The tests run otherwise, this one among them; here, that they can.
            command = text.replace("&& pytest -n 2\n", "&& python -m pytest -q tests/test_units.py\n")
            done = run(["bash", "-euo", "pipefail", "-c", command], clone, environment)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            shutil.rmtree(clone / "cache", ignore_errors=True)  # the same is made again in Python
        else:
            program += text
    done = run(["python", "-c", program], clone, environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "torch.Size([1, 256])" in done.stdout


def test_what_was_installed_is_the_clone(clone: Path, environment: dict[str, str]) -> None:
    """And not the package of the environment that runs the tests."""
    done = run(["python", "-c", "import splitzip_aio; print(splitzip_aio.__file__)"], clone.parent, environment)
    if done.returncode:
        pytest.skip("nothing was installed")
    assert Path(done.stdout.strip()).is_relative_to(clone)
