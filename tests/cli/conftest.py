"""The command line in this process, and a small checkpoint and cache to use it on."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from splitzip_aio import build_cache
from splitzip_aio.cli import main
from splitzip_aio.cli.synthetic import write_checkpoint


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


class CommandLine(Protocol):
    def __call__(self, *arguments: object) -> Outcome: ...


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["splitzip-aio", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ending:
            main()
        captured = capfd.readouterr()
        code = ending.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1 MiB; not to be changed."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    write_checkpoint(path, 1 << 20)
    return path


@pytest.fixture(scope="session")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of it; not to be changed."""
    root = tmp_path_factory.mktemp("built") / "cache"
    build_cache(checkpoint, root)
    return root


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A copy of the cache, to be damaged."""
    return shutil.copytree(built, tmp_path / "cache")


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def pack_of(cache: Path) -> Path:
    """The only pack of a small cache."""
    (pack,) = (cache / "packs").iterdir()
    return pack
