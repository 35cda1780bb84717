"""Every example runs, and says what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitzip_aio.cli.synthetic import write_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "cold_start.py": (["model.safetensors"], "second start: "),
    "offload_a_decoder.py": (["--width", "64", "--blocks", "8"], "same tokens as the whole model: True"),
    "stream_layers.py": (["model.safetensors"], "model.layers.0: "),
}


def test_all_are_known() -> None:
    """Those that need a GPU and someone else's packages have tests of their own."""
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"ddo_flux.py"} == SAYS.keys()


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, tmp_path: Path) -> None:
    arguments, says = SAYS[name]
    write_checkpoint(tmp_path / "model.safetensors", 1 << 20)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
