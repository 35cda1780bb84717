"""The long runs of bench/soak.py, made short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mixed", "--minutes", "0.1"], ["  runs", "fault eio", "layer: right bytes", "rss_bytes", "malloc_bytes"]),
        (["runs", "--count", "5", "--drivers", "threads"], ["5  runs", "fault bit-flip"]),
        (["cancellations", "--count", "40", "--drivers", "threads"], ["none lost", "from cancel to the slot reusable"]),
        (["flips", "--count", "60"], ["60  noticed in all, 0 missed"]),
    ],
    ids=lambda value: value[0],
)
def test_it_runs_and_reports(arguments: list[str], said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "bench/soak.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or arguments[0] == "mixed", done.stdout  # six seconds are too few to tell a drift
    for words in said:
        assert words in done.stdout
