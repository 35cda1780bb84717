"""Load a checkpoint as a server does when it starts: with a bar, and with a cache that the first start leaves behind.

python examples/cold_start.py model.safetensors [--device cuda] [--cache-home /var/cache/splitzip]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import splitzip_aio
from splitzip_aio.cache import Progress


def bar(progress: Progress) -> None:
    """One line on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        share = progress.done_bytes / max(1, progress.total_bytes)
        print(f"\r{'#' * round(40 * share):<40} {share:4.0%}", end="\n" if share == 1 else "", file=sys.stderr)


def main() -> None:
    """Load twice: the second time finds the cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache-home", type=Path)
    options = parser.parse_args()
    for start in ("first", "second"):
        began = time.perf_counter()
        weights = splitzip_aio.load_file(
            options.checkpoint, options.device, build=True, cache_home=options.cache_home, progress=bar
        )
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        seconds = time.perf_counter() - began
        print(f"{start} start: {len(weights)} tensors, {nbytes / 1e6:.1f} MB in {seconds:.2f} s")


if __name__ == "__main__":
    main()
