"""Fixtures of the cache's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitzip_aio.cache import build_cache
from tests.cache.samples import model, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the sample model."""
    return write_checkpoint(tmp_path / "model.safetensors", model(), {"format": "pt"})


@pytest.fixture
def cache(tmp_path: Path, checkpoint: Path) -> Path:
    """A cache of it: segments of 1000 elements, so that weights have several, and several packs."""
    build_cache(checkpoint, tmp_path / "cache", segment_elements=1000, pack_bytes=30_000)
    return tmp_path / "cache"
