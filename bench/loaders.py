"""The transport beside other loaders of safetensors, in one run.

    python bench/loaders.py --help

The same as ``splitzip-aio bench loaders``, for a checkout that is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitzip_aio.cli.bench.commands import bench

if __name__ == "__main__":
    bench(["loaders", *sys.argv[1:]], prog_name="bench")
