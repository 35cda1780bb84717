"""Parameters are found by name or content, and a cache of another model is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import splitzip_aio
from splitzip_aio import InvalidArgumentError
from tests.offloading.samples import Network, Sample, ids, network

Offloaded = Callable[..., Network]


class Wrapped(nn.Module):
    """The network under another name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def test_by_content(offloaded: Offloaded, sample: Sample) -> None:
    model = offloaded(Wrapped(sample.fresh()), units=["inner.blocks.*"])
    assert torch.equal(model(ids()), sample.expected)
    assert len(splitzip_aio.offload_statistics(model).rotating) == 6


def test_by_a_rule(offloaded: Offloaded, sample: Sample) -> None:
    with torch.device("meta"):
        model = Wrapped(Network())
    model.inner.places = torch.arange(8)
    model = offloaded(model, units=["inner.blocks.*"], names=lambda name: name.removeprefix("inner."))
    assert torch.equal(model(ids()), sample.expected)


def test_equal_contents_in_several_units(offloaded: Offloaded, sample: Sample) -> None:
    """Found by content, both are one tensor of the cache, which comes with one unit only."""
    model = Wrapped(sample.fresh())
    with torch.no_grad():
        model.inner.blocks[4].up.weight.copy_(model.inner.blocks[1].up.weight)
        expected = model(ids())
    offloaded(model, units=["inner.blocks.*"], resident_bytes=2 * sample.room_for(2))
    for _ in range(3):
        assert torch.equal(model(ids()), expected)


def test_nothing_matches(offloaded: Offloaded) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"nothing to offload: the model has 0.weight, 0.bias; .*blocks.0.*names="
    ):
        offloaded(nn.Sequential(nn.Linear(3, 3)))


def test_other_values(offloaded: Offloaded, sample: Sample) -> None:
    model = sample.fresh()
    with torch.no_grad():
        model.blocks[2].up.bias[7] += 1
    with pytest.raises(InvalidArgumentError, match=r"blocks.2.up.bias: its values are not those of"):
        offloaded(model)
    assert not torch.equal(model(ids()), sample.expected)
    offloaded(model, compare=False)
    assert torch.equal(model(ids()), sample.expected)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda: network().float(), r"embed.weight: torch.float32, and torch.bfloat16 in the cache .*dtype="),
        (lambda: network(width=32), r"embed.weight: shape \(50, 32\), and \(50, 64\) in the cache"),
    ],
)
def test_other_kinds(offloaded: Offloaded, model: Callable[[], nn.Module], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        offloaded(model())


def test_parameters_that_the_cache_lacks_stay(offloaded: Offloaded, sample: Sample) -> None:
    model = sample.fresh()
    model.more = nn.Linear(3, 3)
    weight = model.more.weight
    offloaded(model)
    assert model.more.weight is weight
    assert weight.requires_grad
    assert torch.equal(model(ids()).detach(), sample.expected)


def test_a_refused_model_is_as_it_was(offloaded: Offloaded, sample: Sample) -> None:
    model = sample.fresh()
    before = dict(model.named_parameters())
    for options in ({"resident_bytes": 1000}, {"driver": "nothing"}, {"host_cache_bytes": -1}, {"units": ["x"]}):
        with pytest.raises(splitzip_aio.SplitZipError):
            offloaded(model, **options)
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert torch.equal(model(ids()).detach(), sample.expected)
