"""Makes tests/codec/golden, once: ``python -m tests.codec.make_golden``. Files that exist are left alone.

What is there must decode for ever, so a file is added when the format gains something, and none is ever replaced.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from splitzip_aio.cache import build_cache
from splitzip_aio.codec.dtypes import torch_view
from splitzip_aio.codec.formats import BF16, RAW, ElementFormat
from splitzip_aio.codec.layout import CHUNK_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.schedule import CANDIDATES, Schedule
from tests.codec.data import CODED, FORMATS, Bytes, bursts, random_bits, rare_exponents, weights
from tests.codec.hostile import encode

__all__ = ["CACHE", "GOLDEN", "decoded_path", "segment_path", "segments"]

GOLDEN = Path(__file__).parent / "golden"
CACHE = GOLDEN / "cache"
CHECKPOINT = GOLDEN / "model.safetensors"
EXTREMES = tuple(Schedule.parse(text) for text in ("1", "1,1,1,1", "4,4,4,4", "1,2,3,4"))


def decoded_path(fmt: ElementFormat) -> Path:
    """What all segments of a format decode to."""
    return GOLDEN / f"{fmt.name}.bin"


def segment_path(fmt: ElementFormat, schedule: Schedule) -> Path:
    """The segment of a format in a schedule."""
    return GOLDEN / f"{fmt.name}-{str(schedule).replace(',', '')}.segment"


def segments() -> Iterator[tuple[ElementFormat, Schedule]]:
    """Every segment that is kept: each schedule of the package in each format, and the outermost that there can be."""
    for fmt in FORMATS:
        for schedule in CANDIDATES if fmt == RAW else (*CANDIDATES, *EXTREMES):
            if schedule.applies_to(fmt):
                yield fmt, schedule


def elements(fmt: ElementFormat) -> Bytes:
    """Weights, escapes one by one and in runs, and noise; of BF16 more than a tile, of the others more than a chunk."""
    rng = np.random.default_rng(2026)
    if fmt == RAW:
        return random_bits(RAW, 1001, rng)
    count = TILE_ELEMENTS - CHUNK_ELEMENTS if fmt == BF16 else 301
    parts = [weights(fmt, count, rng), bursts(fmt, 1500, rng), rare_exponents(fmt, 515, rng), random_bits(fmt, 32, rng)]
    return np.concatenate(parts)


def tensors() -> dict[str, torch.Tensor]:
    """A checkpoint of every coded dtype and some others, with tied, empty and scalar tensors."""
    rng = np.random.default_rng(2027)
    found = {
        f"blocks.{i}.{fmt.name}": torch_view(torch.from_numpy(weights(fmt, 2100, rng)), fmt.name, (3, 700))
        for i, fmt in enumerate(CODED)
    }
    found["blocks.1.tied"] = found["blocks.0.BF16"].clone()
    found["steps"] = torch.arange(77)
    found["mask"] = torch.arange(50) % 3 == 0
    found["scale"] = torch.tensor(1.5, dtype=torch.bfloat16)
    found["nothing"] = torch.empty(0, 4, dtype=torch.bfloat16)
    return found


def main() -> None:
    """Write what is missing."""
    GOLDEN.mkdir(exist_ok=True)
    for fmt, schedule in segments():
        if not decoded_path(fmt).exists():
            decoded_path(fmt).write_bytes(elements(fmt).tobytes())
        if not segment_path(fmt, schedule).exists():
            data = np.frombuffer(decoded_path(fmt).read_bytes(), np.uint8)
            segment_path(fmt, schedule).write_bytes(encode(data, fmt, schedule).tobytes())
    if not CACHE.exists():
        safetensors.torch.save_file(tensors(), CHECKPOINT, metadata={"made by": "make_golden.py"})
        with tempfile.TemporaryDirectory() as scratch:
            # Small segments, so that there are several of a tensor.
            build_cache(CHECKPOINT, Path(scratch) / "cache", segment_elements=1024, pack_bytes=16_384)
            shutil.copytree(Path(scratch) / "cache", CACHE)


if __name__ == "__main__":
    main()
