"""Each stage of a stream alone, then all together, on each tier.

    python bench/overlap.py --help

The same as ``splitzip-aio bench overlap``, for a checkout that is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitzip_aio.cli.bench.commands import bench

if __name__ == "__main__":
    bench(["overlap", *sys.argv[1:]], prog_name="bench")
