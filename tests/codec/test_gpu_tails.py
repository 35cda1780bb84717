"""Where tiles' tails start: a sum over as many tiles as a segment can have, which is more than a warp's lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitzip_aio.codec.layout import MAX_SEGMENT_ELEMENTS, TILE_ELEMENTS
from tests.codec.interpreter import INTERPRETER_SINCE

triton = pytest.importorskip("triton", minversion=INTERPRETER_SINCE)
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("splitzip_aio.codec.kernels.count")
tail_before = kernels.tail_before
MOST_TILES = MAX_SEGMENT_ELEMENTS // TILE_ELEMENTS


@triton.jit
def probe_kernel(sizes, out, tile):
    tl.store(out, tail_before(sizes, tile))


@pytest.mark.parametrize("tile", [0, 1, 127, 128, 129, MOST_TILES - 1])
def test_bits_before_a_tile(tile: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = np.random.default_rng(tile).integers(0, 24 * TILE_ELEMENTS, MOST_TILES).astype(np.int32)
    found = torch.empty(1, dtype=torch.int32, device=device)
    probe_kernel[(1,)](torch.from_numpy(sizes).to(device), found, tile)
    assert found.item() == sizes[:tile].sum()
