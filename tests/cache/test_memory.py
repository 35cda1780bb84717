"""Memory stays at a few segments, however large a tensor is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

GIB = 1 << 30

# A sparse checkpoint with marks at both ends and around 2**31, built and verified (which compares content keys) in a
# process of its own. Prints how much the peak of its memory rose above that of a small build.
SCRIPT = """
import json, os, resource, sys
from pathlib import Path
from splitzip_aio.cache import SplitZipShardCache, build_cache

home, elements = Path(sys.argv[1]), int(sys.argv[2])

def checkpoint(name, elements):
    size = 2 * elements
    header = json.dumps({"w": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, size]}}).encode()
    marks = [0, size // 2 - 2, size // 2, size - 2]
    with open(home / name, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for mark in marks:
            file.seek(8 + len(header) + mark)
            file.write(b"ab")
    return home / name, marks

build_cache(checkpoint("small.safetensors", 1 << 21)[0], home / "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
path, marks = checkpoint("large.safetensors", elements)
report = build_cache(path, home / "large")
built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with SplitZipShardCache(home / "large") as cache:
    ok = cache.verify().ok
verified = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({
    "raw": report.raw_bytes, "ratio": report.ratio, "ok": ok, "seconds": report.seconds,
    "build_bytes": built - before, "verify_bytes": verified - before,
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_building_from_4_gib_adds_little_memory() -> None:
    with tempfile.TemporaryDirectory() as scratch:  # pytest's own would be kept, with a cache of 2.5 GB
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, scratch, str(2 * GIB)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["raw"] == 4 * GIB
    assert found["ratio"] < 0.7
    assert found["build_bytes"] < 256 << 20
    assert found["verify_bytes"] < 256 << 20
