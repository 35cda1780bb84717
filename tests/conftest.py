"""Fixtures and switches that every test shares."""

from __future__ import annotations

import os

import pytest
import torch

REQUIRE_GPU = "SPLITZIP_REQUIRE_GPU"

if not torch.cuda.is_available():
    # Triton reads it when it decorates a kernel, so before anything imports one.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each ``@pytest.mark.anyio`` test under both event loops."""
    return str(request.param)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a ``gpu`` test where there is no GPU, or fail it where one was promised."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(f"{REQUIRE_GPU}=1, but torch {torch.__version__} sees no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")
