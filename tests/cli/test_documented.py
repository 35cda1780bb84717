"""docs/cli.md names every command, every option and every field of the JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = ("build", "inspect", "verify", "load", "demo", "bench overlap", "bench loaders", "bench offload", "doctor")


def section(command: str) -> str:
    """The part of the page under the command's heading."""
    _, found, rest = PAGE.read_text().partition(f"\n## {command}\n")
    assert found
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_options(cli: CommandLine, command: str) -> None:
    page = cli(*command.split(), "--help").out
    told = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", page, re.MULTILINE)) - {"--help", "--json"}
    documented = set(re.findall(r"^\| `(--[a-z-]+)` \|", section(command), re.MULTILINE))
    assert documented == told


def test_fields(cli: CommandLine, checkpoint: Path, built: Path, tmp_path: Path) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "build": (checkpoint, tmp_path / "cache"),
        "inspect": (built,),
        "verify": (built,),
        "load": (built, "--device", "cpu"),
        "demo": ("--size", "1MiB", "--device", "cpu"),
        "bench overlap": ("--gigabytes", "0.001", "--repeats", "1", "--device", "cpu", "--ring", "8MiB"),
        "bench loaders": ("--gigabytes", "0.001", "--repeats", "1", "--device", "cpu", "--ring", "8MiB"),
        "bench offload": ("--gigabytes", "0.001", "--repeats", "1", "--device", "cpu", "--peers", ""),
        "doctor": (),
    }
    for command in COMMANDS:
        document = cli(*command.split(), *arguments[command], "--json").document
        documented = set(re.findall(r"`([a-z_]+)`", section(command).partition("JSON:")[2]))
        assert document.keys() <= documented, command
        for rows in (value for value in document.values() if isinstance(value, list) and value):
            assert not isinstance(rows[0], dict) or rows[0].keys() <= documented, command
