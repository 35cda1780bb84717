"""Offloaded models on a GPU: equal to the resident one, in bounded memory, on several streams, and no graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import splitzip_aio
from splitzip_aio import UnsupportedError
from tests.offloading.samples import Block, block_bytes, save

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS = 1024, 12


class Stack(nn.Module):
    """Blocks, and a buffer that a forward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().bfloat16().eval()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stack(), tmp_path_factory.mktemp("offload"), segment_elements=1 << 20)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()


@pytest.fixture
def expected(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return stack().cuda()(x).clone()


@pytest.fixture
def model(cache: Path) -> Iterator[nn.Module]:
    offloaded = splitzip_aio.offload(
        stack(), cache, device="cuda", resident_bytes=4 * block_bytes(stack()), units=["blocks.*"], ring_bytes="64MiB"
    )
    yield offloaded
    del offloaded
    gc.collect()


def test_passes_are_equal_without_synchronizing(model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    with torch.inference_mode():
        outputs = [model(x) for _ in range(20)]
    assert all(torch.equal(output, expected) for output in outputs)
    statistics = splitzip_aio.offload_statistics(model)
    assert statistics.resident == ("blocks.0", "blocks.1")
    assert statistics.device == "cuda:0"
    assert statistics.transport is not None
    assert statistics.transport.host is not None
    assert statistics.transport.host.pinned


def test_memory_is_bounded(cache: Path, x: torch.Tensor, expected: torch.Tensor) -> None:
    """Beyond what the resident model's pass has left, such as the workspace of cuBLAS."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget, ring = 4 * block_bytes(stack()), 8 << 20
    model = splitzip_aio.offload(
        stack(), cache, device="cuda", resident_bytes=budget, units=["blocks.*"], ring_bytes=ring
    )
    with torch.inference_mode():
        for _ in range(5):
            assert torch.equal(model(x), expected)
    peak = torch.cuda.max_memory_allocated() - before
    activations = 64 * x.nbytes
    assert peak <= budget + 2 * block_bytes(stack()) + ring + activations
    assert peak < sum(parameter.nbytes for parameter in stack().parameters())
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_streams_of_several_threads(model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    """Each uses the weights on a stream of its own, with work before it that makes streams run apart."""

    def run(number: int) -> bool:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            torch.cuda._sleep(1_000_000 * (number % 4))
            return torch.equal(model(x), expected)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(24)))


def test_slow_stream_keeps_its_weights(model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    """The host runs far ahead: nothing may be overwritten before the stream has used it."""
    with torch.inference_mode():
        torch.cuda._sleep(200_000_000)
        outputs = [model(x) for _ in range(3)]
    assert all(torch.equal(output, expected) for output in outputs)


def test_graph_capture_is_refused(model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="CUDA graph"), torch.cuda.graph(graph):
        model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


def test_autocast(model: nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        assert torch.equal(model(x), stack().cuda()(x))


def test_meta_and_detach(cache: Path, x: torch.Tensor, expected: torch.Tensor) -> None:
    with torch.device("meta"):
        model = Stack().eval()
    model.scale = torch.full((WIDTH,), 0.5, dtype=torch.bfloat16)
    splitzip_aio.offload(model, cache, device="cuda", resident_bytes=2 * block_bytes(stack()), units=["blocks.*"])
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    splitzip_aio.detach(model)
    assert {each.device.type for each in [*model.parameters(), *model.buffers()]} == {"cpu"}
    for name, parameter in stack().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_to_where_it_is(model: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
    with torch.inference_mode():
        assert torch.equal(model.to("cuda").cuda()(x), expected)
    with pytest.raises(UnsupportedError, match="cannot become"):
        model.cpu()


def test_load_file(tmp_path: Path) -> None:
    weights = {f"w{number}": torch.randn(500, 1000).bfloat16() for number in range(90)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    for _ in range(2):
        found = splitzip_aio.load_file(tmp_path / "model.safetensors", "cuda", build=True)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in weights.items())
