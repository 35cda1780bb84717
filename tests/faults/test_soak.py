"""The long runs of bench/soak.py, made short."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def log_level_as_before() -> Iterator[None]:
    logger = logging.getLogger("splitzip_aio")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mixed", "--minutes", "0.05"], ["  runs", "fault eio", "layer: right bytes", "rss_bytes", "malloc_bytes"]),
        (["runs", "--count", "5", "--drivers", "threads"], ["5  runs", "fault bit-flip"]),
        (["cancellations", "--count", "40", "--drivers", "threads"], ["none lost", "from cancel to the slot reusable"]),
        (["flips", "--count", "60"], ["60  noticed in all, 0 missed"]),
    ],
    ids=lambda value: value[0],
)
def test_it_runs_and_reports(
    soak: ModuleType,
    arguments: list[str],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setattr("sys.argv", ["soak.py", *arguments, "--json", str(kept)])
    code = soak.main()
    out = capsys.readouterr().out
    assert code == 0 or arguments[0] == "mixed", out  # three seconds are too few to tell a drift
    for words in said:
        assert words in out
    if arguments[0] in ("mixed", "runs"):
        counts = json.loads(kept.read_text())
        counts = counts.get("threads", counts)
        assert sum(counts["faults"].values()) > 0
        assert counts["layers"]["right bytes"] > 0
        assert counts["seconds"] > 0
