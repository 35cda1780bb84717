"""An offloaded model computes what it would with all its weights in memory, in every way that it may be called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitzip_aio
from splitzip_aio import InvalidArgumentError, OffloadWarning, UnsupportedError
from splitzip_aio.offloading.placeholder import OffloadedWeight
from tests.offloading.samples import BLOCKS, Network, Sample, ids, network, save

Offloaded = Callable[..., Network]


def check(model: nn.Module, sample: Sample) -> None:
    assert torch.equal(model(ids()), sample.expected)


def assert_away(model: nn.Module) -> None:
    """Nothing of the blocks is in memory, and nobody holds a lease on one, but the two that are asked for ahead."""
    assert all(isinstance(parameter, OffloadedWeight) for parameter in model.get_submodule("blocks").parameters())
    transport = splitzip_aio.offload_statistics(model).transport
    assert transport is not None
    assert transport.residency.leased <= 2


def test_passes_are_equal(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded()
    assert_away(model)
    for _ in range(5):
        check(model, sample)
        assert_away(model)
    statistics = splitzip_aio.offload_statistics(model)
    assert statistics.rotating == tuple(f"blocks.{number}" for number in range(BLOCKS))
    assert statistics.resident == ("(core)", "norm")
    assert statistics.entered == 5 * BLOCKS
    assert 0 <= statistics.ready <= statistics.entered
    assert statistics.rotating_bytes == BLOCKS * sample.block_bytes
    assert statistics.window_bytes == 2 * sample.block_bytes
    assert statistics.resident_bytes + statistics.window_bytes <= sample.room_for(2)


def test_memory_is_bounded(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded()
    check(model, sample)
    transport = splitzip_aio.offload_statistics(model).transport
    assert transport is not None
    assert transport.arena.capacity_bytes == 2 * sample.block_bytes
    assert transport.arena.peak_bytes <= 2 * sample.block_bytes


def test_a_cyclic_pass_brings_each_unit_once(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded(resident_bytes=sample.room_for(4))
    statistics = splitzip_aio.offload_statistics(model)
    assert statistics.resident == ("(core)", "norm", "blocks.0", "blocks.1")
    for _ in range(10):
        check(model, sample)
    transport = splitzip_aio.offload_statistics(model).transport
    assert transport is not None
    rotating = BLOCKS - 2
    assert 10 * rotating - 20 <= transport.residency.loaded <= 10 * rotating + 2


def test_everything_fits(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded(resident_bytes="1GiB", units=None)
    check(model, sample)
    statistics = splitzip_aio.offload_statistics(model)
    assert statistics.transport is None
    assert statistics.rotating == ()
    splitzip_aio.detach(model)
    check(model, sample)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(offloaded: Offloaded, sample: Sample, context: Callable[[], Any]) -> None:
    with context():
        model = offloaded()
        check(model, sample)
    check(model, sample)


def test_autocast(tmp_path: Path) -> None:
    """It keeps casts of weights, but none of those that are replaced."""
    model = network().float()
    cache = save(model, tmp_path)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(ids())
        splitzip_aio.offload(model, cache, device="cpu", resident_bytes="600KB", units=["blocks.*"])
        assert splitzip_aio.offload_statistics(model).rotating
        for _ in range(3):
            assert torch.equal(model(ids()), expected)
    splitzip_aio.detach(model)


@pytest.mark.parametrize("host_cache_bytes", [0, "auto", "16MiB"])
def test_host_cache(offloaded: Offloaded, sample: Sample, host_cache_bytes: int | str) -> None:
    model = offloaded(host_cache_bytes=host_cache_bytes)
    for _ in range(4):
        check(model, sample)
    statistics = splitzip_aio.offload_statistics(model)
    assert statistics.transport is not None
    assert (statistics.transport.host is None) == (host_cache_bytes == 0)
    assert bool(statistics.transport.host_bytes) == (host_cache_bytes != 0)


def test_many_threads(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded()
    with ThreadPoolExecutor(6) as pool:
        for output in pool.map(lambda _: model(ids()), range(30)):
            assert torch.equal(output, sample.expected)
    assert_away(model)


def test_two_threads_in_one_block(offloaded: Offloaded, sample: Sample) -> None:
    """The first to leave does not take the weights from the other."""
    model = offloaded()
    inside, leave = threading.Event(), threading.Event()

    def stay(module: nn.Module, arguments: object, output: object) -> None:
        if threading.current_thread() is thread:
            inside.set()
            assert leave.wait(60)

    model.blocks[2].norm.register_forward_hook(stay)
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model(ids())))
    thread.start()
    assert inside.wait(60)
    check(model, sample)
    assert not any(isinstance(each, OffloadedWeight) for each in model.blocks[2].parameters())
    with pytest.raises(UnsupportedError, match="in the model's forward"):
        splitzip_aio.detach(model)
    leave.set()
    thread.join()
    assert torch.equal(outputs[0], sample.expected)
    assert_away(model)


def test_another_order_is_learned(offloaded: Offloaded, sample: Sample) -> None:
    model, order = offloaded(), [4, 0, 5, 2, 1, 3]
    model.blocks = nn.ModuleList(model.blocks[number] for number in order)
    plain = sample.fresh()
    plain.blocks = nn.ModuleList(plain.blocks[number] for number in order)
    expected = plain(ids())
    for _ in range(6):
        assert torch.equal(model(ids()), expected)


def test_only_some_blocks_run(offloaded: Offloaded, sample: Sample) -> None:
    model, plain = offloaded(), sample.fresh()
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    for number in [3, 3, 0, 5, 5, 1, 3] * 3:
        assert torch.equal(model.blocks[number](x), plain.blocks[number](x))
        assert torch.equal(model.blocks[number].forward(x), plain.blocks[number](x))


class Recursive(nn.Module):
    """Calls itself, and another block in the midst of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Caller(), Caller(), Caller()])
        self.blocks[0].other.append(self.blocks[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks[2](self.blocks[0](x, 2), 1)
        return result


class Caller(nn.Module):
    """One linear layer, applied again and again, with another block's between; that one is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.other: list[nn.Module] = []

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth:
            x = self(x, depth - 1)
        for other in self.other:
            x = other(x, 0)
        result: torch.Tensor = self.linear(x)
        return result


@pytest.fixture
def recursive(tmp_path: Path) -> tuple[Recursive, Path]:
    torch.manual_seed(0)
    model = Recursive().bfloat16()
    return model, save(model, tmp_path)


def test_reentrant_units(recursive: tuple[Recursive, Path]) -> None:
    model, cache = recursive
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    expected = model(x).detach()
    splitzip_aio.offload(model, cache, device="cpu", resident_bytes=2 * 8448, units=["blocks.*"])
    for _ in range(3):
        assert torch.equal(model(x), expected)
    with ThreadPoolExecutor(4) as pool:
        for output in pool.map(lambda _: model(x), range(20)):
            assert torch.equal(output, expected)
    splitzip_aio.detach(model)


def test_nesting_without_room_is_refused(recursive: tuple[Recursive, Path]) -> None:
    """Three blocks inside each other, room for two: it would wait for ever."""
    model, cache = recursive
    model.blocks[1].other.append(model.blocks[2])
    splitzip_aio.offload(model, cache, device="cpu", resident_bytes=2 * 8448, units=["blocks.*"])
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"'blocks.2' is called inside of 'blocks.1'.*more resident_bytes"):
        model(x)
    model.blocks[1].other.clear()
    model(x)
    splitzip_aio.detach(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_let_everything_go(offloaded: Offloaded, sample: Sample, error: type[BaseException]) -> None:
    model = offloaded()

    def fail(*_: object) -> None:
        raise error("of the hook")

    for number in (0, 3):
        hook = model.blocks[number].norm.register_forward_hook(fail)
        with pytest.raises(error, match="of the hook"):
            model(ids())
        hook.remove()
        assert_away(model)
    check(model, sample)


def test_gradients_through_offloaded_weights_are_refused(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded()
    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"backward pass would need the weights of 'blocks.0'"):
        model.blocks[0](x)
    assert_away(model)
    with torch.no_grad():
        model.blocks[0](x)
    with pytest.raises(UnsupportedError, match="cannot be trained"):
        model.requires_grad_(True)
    model.requires_grad_(False)


class WithAdapter(nn.Module):
    """LoRA in a few lines."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        weight = base.weight  # an adapter is made to fit it
        self.down = nn.Parameter(torch.full((4, weight.shape[1]), 0.1, dtype=weight.dtype, device=weight.device))
        self.up = nn.Parameter(torch.full((weight.shape[0], 4), 0.1, dtype=weight.dtype, device=weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + (x @ self.down.T) @ self.up.T
        return result


def test_adapters_added_later(offloaded: Offloaded, sample: Sample) -> None:
    model, plain = offloaded(), sample.fresh()
    for each in (model, plain):
        for block in each.blocks:
            block.up = WithAdapter(block.up)
    with torch.no_grad():
        assert torch.equal(model(ids()), plain(ids()))
    assert sorted(name for name, each in model.named_parameters() if each.requires_grad) == sorted(
        f"blocks.{number}.up.{part}" for number in range(BLOCKS) for part in ("down", "up")
    )
    splitzip_aio.detach(model)
    with torch.no_grad():
        assert torch.equal(model(ids()), plain(ids()))


def test_weights_used_outside_of_their_unit(offloaded: Offloaded, sample: Sample) -> None:
    """Right, and not quietly."""
    model = offloaded(units=["blocks.*.up", "blocks.*.down"])
    plain = sample.fresh().blocks[1].up.weight
    with pytest.warns(OffloadWarning, match=r"'blocks.1.up.weight' are needed outside of the forward of 'blocks.1.up'"):
        total = torch.sum(model.blocks[1].up.weight)
    assert torch.equal(total, plain.detach().sum())


def test_state_dict(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded()
    found, expected = model.state_dict(), sample.model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    block = model.blocks[3].state_dict()
    assert torch.equal(block["up.weight"], expected["blocks.3.up.weight"])


def test_detach(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded()
    check(model, sample)
    assert splitzip_aio.detach(model) is model
    assert torch.equal(model(ids()).detach(), sample.expected)
    for name, parameter in sample.fresh().named_parameters():
        found = model.get_parameter(name)
        assert type(found) is nn.Parameter
        assert torch.equal(found, parameter), name
        assert found.requires_grad == parameter.requires_grad
    assert model.head.weight is model.embed.weight
    assert not any("forward" in module.__dict__ for module in model.modules())
    with pytest.raises(InvalidArgumentError, match="is not offloaded"):
        splitzip_aio.detach(model)
    with pytest.raises(InvalidArgumentError, match="is not offloaded"):
        splitzip_aio.offload_statistics(model)
    offloaded(model)
    check(model, sample)


def test_threads_end_with_the_model(sample: Sample) -> None:
    def transports() -> int:
        return sum(thread.name == "splitzip_aio" for thread in threading.enumerate())

    import gc

    gc.collect()
    before = transports()
    model = splitzip_aio.offload(
        sample.fresh(), sample.cache, device="cpu", resident_bytes=sample.room_for(2), units=["blocks.*"]
    )
    model(ids())
    assert transports() == before + 1
    del model
    gc.collect()
    assert transports() == before


def test_model_on_the_meta_device(offloaded: Offloaded, sample: Sample) -> None:
    with torch.device("meta"):
        model = Network()
    model.scale = torch.full((64,), 0.5, dtype=torch.bfloat16)
    model.places = torch.arange(8)
    model.eval()
    offloaded(model)
    check(model, sample)
    splitzip_aio.detach(model)
    check(model, sample)


def test_buffers_on_the_meta_device_come_from_the_cache(offloaded: Offloaded, sample: Sample) -> None:
    with torch.device("meta"):
        model = Network()
    with pytest.raises(InvalidArgumentError, match=r"on the meta device, and not in .*places"):
        offloaded(model)
    model.places = torch.arange(8)
    check(offloaded(model), sample)


def test_what_cannot_be_done(offloaded: Offloaded, tmp_path: Path) -> None:
    import copy
    import pickle

    model = offloaded()
    with pytest.raises(UnsupportedError, match="offloaded already"):
        offloaded(model)
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="offloaded"):
            refused(model)
    with pytest.raises(UnsupportedError, match=r"cannot become torch.float16"):
        model.half()
    with pytest.raises(RuntimeError, match="offloaded"):
        model.load_state_dict(network().state_dict())
    everything = offloaded(resident_bytes="1GiB")
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(everything)
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        pickle.dumps(everything)


def test_moving_to_where_it_is(offloaded: Offloaded, sample: Sample) -> None:
    """``pipeline.to(device)`` is what many programs do with all their models."""
    model = offloaded()
    model.extra = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.to("cpu").to(torch.bfloat16).cpu().eval()
    assert_away(model)
    check(model, sample)


@pytest.mark.parametrize("device", ["cud", "cuda:99", "meta"])
def test_device_that_is_not_there(offloaded: Offloaded, sample: Sample, device: str) -> None:
    model = sample.fresh()
    with pytest.raises((UnsupportedError, InvalidArgumentError), match="device"):
        offloaded(model, device=device)
    check(model, sample)


@pytest.mark.slow
def test_compiled(offloaded: Offloaded, sample: Sample) -> None:
    """Right, with its units as they are."""
    model = offloaded()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(ids()), sample.expected)
