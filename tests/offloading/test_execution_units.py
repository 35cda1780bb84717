"""Which modules are found to be units, and which of them stay."""

from __future__ import annotations

import pytest
from torch import nn

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.offloading.budget import divide
from splitzip_aio.offloading.execution_units import CORE, Unit, find_units
from splitzip_aio.offloading.matching import match
from tests.offloading.samples import Block, Network, Sample, save

MANY = 1 << 40


def units_of(
    model: nn.Module, cache: SplitZipShardCache, *, limit: int = MANY, names: list[str] | None = None
) -> list[Unit]:
    weights = match(model, cache, names=None, compare=False).weights
    return find_units(model, weights, limit_bytes=limit, patterns=names)


@pytest.fixture(scope="module")
def found(sample: Sample) -> list[Unit]:
    with SplitZipShardCache(sample.cache) as cache:
        return units_of(sample.fresh(), cache)


def test_items_of_lists_and_leaves(found: list[Unit]) -> None:
    assert [unit.name for unit in found] == [*(f"blocks.{number}" for number in range(6)), "norm", CORE]
    assert [unit.listed for unit in found] == [True] * 6 + [False, False]


def test_every_weight_is_in_one_unit(found: list[Unit], sample: Sample) -> None:
    names = [place.name for unit in found for _, place in unit.places]
    expected = [name for name, _ in sample.model.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(expected)


def test_tied_and_own_weights_of_modules_with_units_are_the_core(found: list[Unit]) -> None:
    assert {place.name for _, place in found[-1].places} == {"embed.weight", "head.weight", "shift"}


def test_large_items_are_divided(sample: Sample) -> None:
    with SplitZipShardCache(sample.cache) as cache:
        names = [unit.name for unit in units_of(sample.fresh(), cache, limit=sample.block_bytes // 2)]
    assert names[:4] == ["blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.1.norm"]


class Unlisted(nn.Module):
    """Without lists: leaves, of which torch's own composite modules are some."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.block = Block(16)
        self.rnn = nn.LSTM(16, 16)


def test_models_without_lists(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = Unlisted()
    with SplitZipShardCache(save(model, tmp_path_factory.mktemp("unlisted"))) as cache:
        names = [unit.name for unit in units_of(model, cache)]
        assert names == ["attention", "block.norm", "block.up", "block.down", "rnn"]
        assert [unit.name for unit in units_of(model, cache, names=["block"])] == ["attention", "block", "rnn"]


def test_lists_in_lists(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An ``nn.ModuleList`` has no forward, so it is never a unit; an ``nn.Sequential`` has one."""
    inner = [nn.ModuleList([Block(16), Block(16)]), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))]
    model = nn.ModuleDict({"stages": nn.ModuleList(inner)})
    with SplitZipShardCache(save(model, tmp_path_factory.mktemp("nested"))) as cache:
        assert [unit.name for unit in units_of(model, cache)] == ["stages.0.0", "stages.0.1", "stages.1"]
        divided = [unit.name for unit in units_of(model, cache, limit=1000)]
    assert divided[-2:] == ["stages.1.0", "stages.1.2"]


def test_named_units(sample: Sample) -> None:
    with SplitZipShardCache(sample.cache) as cache:
        model = sample.fresh()
        assert [unit.name for unit in units_of(model, cache, names=["blocks.[01]"])][:2] == ["blocks.0", "blocks.1"]
        with pytest.raises(InvalidArgumentError, match=r"no module 'layers.\*'"):
            units_of(model, cache, names=["layers.*"])
        with pytest.raises(InvalidArgumentError, match=r"'blocks.0.up' is inside 'blocks.0'"):
            units_of(model, cache, names=["blocks.*", "blocks.0.up"])
        with pytest.raises(InvalidArgumentError, match="write \\['blocks'\\]"):
            find_units(model, match(model, cache, names=None, compare=False).weights, limit_bytes=1, patterns="blocks")


@pytest.mark.parametrize("room", range(2, 7))
def test_a_prefix_stays(found: list[Unit], sample: Sample, room: int) -> None:
    division = divide(found, sample.room_for(room))
    staying = 6 if room == 6 else room - 2
    assert [unit.name for unit in division.resident] == [CORE, "norm", *(f"blocks.{each}" for each in range(staying))]
    assert [unit.name for unit in division.rotating] == [f"blocks.{each}" for each in range(staying, 6)]
    used = sum(unit.nbytes for unit in division.resident)
    assert used + division.window_bytes <= sample.room_for(room)
    assert division.window_bytes >= sum(unit.nbytes for unit in division.rotating[:2])


def test_too_little_room_says_how_much_would_do(found: list[Unit], sample: Sample) -> None:
    with pytest.raises(InvalidArgumentError, match=r"give [0-9]+ or more") as raised:
        divide(found, sample.room_for(2) - 1024)
    least = int(str(raised.value).partition("give ")[2].split()[0])
    assert least <= sample.room_for(2)
    divide(found, least)
    with pytest.raises(InvalidArgumentError, match="resident_bytes"):
        divide(found, least - 1)


def test_network_without_blocks_in_the_cache(sample: Sample) -> None:
    """Only what the cache has is anyone's business."""
    model = Network(blocks=2).bfloat16()
    with SplitZipShardCache(sample.cache) as cache:
        assert [unit.name for unit in units_of(model, cache)] == ["blocks.0", "blocks.1", "norm", CORE]
