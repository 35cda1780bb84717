"""Stream a checkpoint layer by layer, from an event loop, and say what each layer is.

python examples/stream_layers.py model.safetensors [--device cuda]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import anyio
import torch

import splitzip_aio


async def stream(cache: Path, device: str) -> None:
    """Ask for each layer in turn; the next ones are read meanwhile."""
    async with splitzip_aio.open_transport(cache, device=device, ring_bytes="64MiB", arena_bytes="1GiB") as transport:
        for layer in transport.layers:
            async with await transport.prefetch(layer) as lease:
                largest = max(lease.tensors.values(), key=lambda tensor: tensor.nbytes)
                print(f"{layer}: {len(lease.tensors)} tensors, the largest {tuple(largest.shape)} of {largest.dtype}")
        statistics = transport.statistics()
        print(f"{statistics.decoded_bytes} bytes out of {statistics.wire_bytes}")


def main() -> None:
    """Compress to a scratch folder, and stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        splitzip_aio.build_cache(options.checkpoint, Path(scratch) / "cache")
        anyio.run(stream, Path(scratch) / "cache", options.device)


if __name__ == "__main__":
    main()
