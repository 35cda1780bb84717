"""One cache, streamed in every way; each test runs on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitzip_aio.cache import build_cache
from splitzip_aio.transport import opening
from tests.cache.samples import write_checkpoint
from tests.simulated import SimulatedCudaArena
from tests.transport.samples import Sample, ten_layers


@pytest.fixture(params=["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device to stream to; ``simulated`` is the CPU by way of the GPU's arena."""
    if request.param == "simulated":
        monkeypatch.setattr(opening, "HostArena", SimulatedCudaArena)
        return "cpu"
    return str(request.param)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Ten layers of equal size in two packs, every tensor of several segments."""
    root = tmp_path_factory.mktemp("streamed")
    tensors = ten_layers()
    checkpoint = write_checkpoint(root / "model.safetensors", tensors)
    build_cache(checkpoint, root / "cache", segment_elements=2048, pack_bytes=200_000)
    return Sample(root / "cache", tensors)


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    """What a test opens it closes, by the numbers of the kernel."""
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def open_descriptors() -> dict[str, str]:
    """Descriptors of this process and what they are, but for those that the event loops and CUDA keep."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # the one that lists the directory
            continue
        if ".szp" in target or "io_uring" in target or "manifest" in target or target == "anon_inode:[eventfd]":
            found[entry.name] = target
    return found
