from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import splitzip_aio
from tests.offloading.samples import Network, Sample, make_sample


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("offloading"))


@pytest.fixture
def offloaded(sample: Sample) -> Iterator[Callable[..., Network]]:
    """``offload`` of a fresh network with room for two blocks, which are units; all is let go in the end."""
    models: list[nn.Module] = []

    def make(model: nn.Module | None = None, **options: Any) -> Any:
        usual = {"device": "cpu", "resident_bytes": sample.room_for(2), "units": ["blocks.*"], "ring_bytes": "1MiB"}
        options = usual | options
        models.append(splitzip_aio.offload(sample.fresh() if model is None else model, sample.cache, **options))
        return models[-1]

    yield make
    models.clear()
    gc.collect()
