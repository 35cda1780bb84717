"""Builds that are killed: a process that forks builders and kills them at random times, then checks what is left.

``python -m tests.cache.crashes 1000`` from the root of the repository runs a thousand and prints the counts.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.errors import CacheNotFoundError
from tests.cache.samples import tree, weights, write_checkpoint

OPTIONS = {"segment_elements": 4000, "pack_bytes": 60_000}


def checkpoint(path: Path, seed: int) -> Path:
    tensors = {f"layers.{number}.w": ("BF16", (8000,), weights(8000, seed + number)) for number in range(24)}
    tensors |= {"tied": tensors["layers.3.w"], "none": ("F32", (0,), b"")}
    return write_checkpoint(path, tensors)


def build_and_die(source: Path, out: Path, *, after_s: float) -> bool:
    """Build in a child, killed after so many seconds; whether it had finished by itself."""
    child = os.fork()
    if child == 0:
        build_cache(source, out, force=True, **OPTIONS)  # type: ignore[arg-type]
        os._exit(0)
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0


def state(root: Path, caches: dict[bytes, str]) -> str:
    """Which cache is at ``root``, every byte of it verified; ``absent`` if none."""
    try:
        with SplitZipShardCache(root) as cache:
            assert cache.verify().ok, "a torn cache"
            return caches[(root / "manifest.json").read_bytes()]
    except CacheNotFoundError:
        return "absent"


def run(runs: int, seed: int) -> Counter[str]:
    """Kill that many builds; returns how often each outcome was seen. An AssertionError means data was lost."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        old, new = checkpoint(home / "old.safetensors", 0), checkpoint(home / "new.safetensors", 100)
        caches, trees, took_s = {}, {}, 0.0
        for name, source in (("old", old), ("new", new)):
            started = time.monotonic()
            build_cache(source, home / name, **OPTIONS)  # type: ignore[arg-type]
            took_s = time.monotonic() - started
            trees[name] = tree(home / name)
            caches[trees[name]["manifest.json"]] = name
        for number in range(runs):
            out = home / f"out{number}"
            before = rng.choice(["old", "absent"])
            if before == "old":
                build_cache(old, out, **OPTIONS)  # type: ignore[arg-type]
            while not build_and_die(new, out, after_s=rng.uniform(0, 1.2 * took_s)):
                counts["killed"] += 1
                found = state(out, caches)
                assert found in (before, "new"), f"{found} where {before} was"
                counts[f"{before} cache, then {found}"] += 1
                if counts["killed"] % 2 == 0:
                    break
            report = build_cache(new, out, force=True, **OPTIONS)  # type: ignore[arg-type]
            counts["continued"] += report.resumed > 0
            assert tree(out) == trees["new"], f"left over: {tree(out).keys() ^ trees['new'].keys()}"
    return counts


if __name__ == "__main__":
    for outcome, count in sorted(run(int(sys.argv[1]), seed=int.from_bytes(os.urandom(4), "little")).items()):
        print(f"{count:6d}  {outcome}")
