"""Seconds of fuzzing, and all of the corpus; ``tests/fuzz/fuzzing.py`` says how to fuzz for longer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.fuzzing import CORPUS
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
SECONDS = 1.5


def test_no_input_is_worse_than_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzzing", "--seconds", str(SECONDS)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted_and_mutations_differ(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    seeds = list(target.seeds())
    assert seeds
    chance = random.Random(0)
    for seed in seeds[:3]:
        assert target.check(seed).startswith(("accepted", "built"))
        assert sum(target.mutate(seed, chance) != seed for _ in range(20)) > 10


def test_there_is_a_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} >= {"manifest", "segment", "checkpoint", "index"}
