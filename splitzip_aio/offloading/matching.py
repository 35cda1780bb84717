"""Which parameters of a model are which tensors of a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from splitzip_aio.cache import Entry, SplitZipShardCache
from splitzip_aio.cache.content import content_key
from splitzip_aio.codec.dtypes import tensor_contents, torch_view
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError
from splitzip_aio.offloading.placeholder import OffloadedWeight

__all__ = ["Matched", "NameRule", "Place", "Weight", "kind_of", "match"]

NameRule: TypeAlias = Callable[[str], str]
"""From the name of a parameter in the model to its name in the cache."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module has a parameter or a buffer."""

    owner: str
    module: nn.Module
    attribute: str

    @property
    def name(self) -> str:
        """As in ``state_dict``."""
        return f"{self.owner}.{self.attribute}" if self.owner else self.attribute


@dataclass(slots=True)
class Weight:
    """A parameter and all its places, tied ones having several; ``entry`` is the cache's tensor, if it is there."""

    tensor: torch.Tensor
    places: list[Place] = field(default_factory=list)
    entry: Entry | None = None
    requires_grad: bool = False

    @property
    def name(self) -> str:
        """That of the first place."""
        return self.places[0].name


@dataclass(frozen=True, slots=True)
class Matched:
    """What a model consists of.

    Attributes:
        weights: parameters that the cache has.
        kept: parameters that it does not have, and that stay as they are.
        buffers: buffers; ``entry`` is set if their values come from the cache.
    """

    weights: tuple[Weight, ...]
    kept: tuple[Weight, ...]
    buffers: tuple[Weight, ...]


def match(model: nn.Module, cache: SplitZipShardCache, *, names: NameRule | None, compare: bool) -> Matched:
    """Find each parameter by its names in the cache, or else by its content.

    Raises:
        InvalidArgumentError: nothing was found, a parameter differs from the cache's, or one without values is not
            there; names them.
        UnsupportedError: the model is offloaded already.
    """
    parameters, buffers = _collect(model, "_parameters"), _collect(model, "_buffers")
    if any(isinstance(weight.tensor, OffloadedWeight) for weight in parameters):
        raise UnsupportedError("offload: the model, or a part of it, is offloaded already; call detach on that first")
    rule = names or _same
    for weight in parameters:
        weight.entry = _by_name(weight, cache, rule)
    for buffer in buffers:
        buffer.entry = _by_name(buffer, cache, rule) if buffer.tensor.is_meta else None
    _by_content([weight for weight in parameters if weight.entry is None], cache)
    found = [weight for weight in parameters if weight.entry is not None]
    if not found:
        raise InvalidArgumentError(_nothing_matches(parameters, cache))
    _check([*found, *(each for each in buffers if each.entry is not None)], cache, compare=compare)
    _check_values([each for each in (*parameters, *buffers) if each.entry is None], cache)
    kept = tuple(weight for weight in parameters if weight.entry is None)
    return Matched(tuple(found), kept, tuple(buffers))


def _same(name: str) -> str:
    return name


def _collect(model: nn.Module, registry: str) -> list[Weight]:
    """Every parameter, or buffer, once, with all its places."""
    found: dict[int, Weight] = {}
    for owner, module in model.named_modules():
        for attribute, tensor in getattr(module, registry).items():
            if tensor is not None:
                weight = found.setdefault(id(tensor), Weight(tensor, requires_grad=tensor.requires_grad))
                weight.places.append(Place(owner, module, attribute))
    return list(found.values())


def _by_name(weight: Weight, cache: SplitZipShardCache, rule: NameRule) -> Entry | None:
    entries = (cache.lookup_by_name(rule(place.name)) for place in weight.places)
    return next((entry for entry in entries if entry is not None), None)


def _by_content(weights: Sequence[Weight], cache: SplitZipShardCache) -> None:
    """Hash what has the dtype and shape of something in the cache: names may differ, contents cannot."""
    kinds = {kind_of(entry) for entry in cache.tensors.values()}
    likely = [
        weight
        for weight in weights
        if not weight.tensor.is_meta and (weight.tensor.dtype, tuple(weight.tensor.shape)) in kinds
    ]
    by_key = {entry.key: entry for entry in cache.tensors.values()} if likely else {}
    for weight, key in zip(likely, _keys(likely), strict=True):
        weight.entry = by_key.get(key)


def kind_of(entry: Entry) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor, as torch has them."""
    seen = torch_view(torch.empty(entry.nbytes, dtype=torch.uint8, device="meta"), entry.dtype, entry.shape)
    return seen.dtype, tuple(seen.shape)


def _keys(weights: Sequence[Weight]) -> list[str]:
    """Content keys; the hash leaves the GIL alone."""

    def key(weight: Weight) -> str:
        return content_key(*tensor_contents(weight.tensor))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="splitzip_aio_hash") as pool:
        return list(pool.map(key, weights))


def _check(weights: Sequence[Weight], cache: SplitZipShardCache, *, compare: bool) -> None:
    """Shapes always; dtypes and contents of what has any."""
    problems = [problem for weight in weights for problem in _differences(weight)]
    if not problems and compare:
        present = [weight for weight in weights if not weight.tensor.is_meta]
        problems = [
            f"{weight.name}: its values are not those of {weight.entry.name!r} in the cache"
            for weight, key in zip(present, _keys(present), strict=True)
            if weight.entry is not None and weight.entry.key != key
        ]
    if problems:
        raise InvalidArgumentError(
            f"offload: the model is not the one in {cache.root}: {_some(problems)}. Build a cache of this model, or "
            "load the checkpoint that the cache is of; compare=False takes the cache's values for the model's"
        )


def _differences(weight: Weight) -> Iterator[str]:
    assert weight.entry is not None
    dtype, shape = kind_of(weight.entry)
    if tuple(weight.tensor.shape) != shape:
        yield f"{weight.name}: shape {tuple(weight.tensor.shape)}, and {shape} in the cache"
    elif weight.tensor.dtype != dtype and not weight.tensor.is_meta:
        yield f"{weight.name}: {weight.tensor.dtype}, and {dtype} in the cache (load the model with dtype={dtype})"


def _check_values(weights: Sequence[Weight], cache: SplitZipShardCache) -> None:
    """What is not in the cache must have values already."""
    empty = [weight.name for weight in weights if weight.tensor.is_meta]
    if empty:
        raise InvalidArgumentError(
            f"offload: on the meta device, and not in {cache.root}: {_some(empty)}. Give these values first (buffers "
            "that are no part of a checkpoint are computed when a model is made on a real device), tie what is tied, "
            "or say what they are called in the cache with names="
        )


def _nothing_matches(weights: Sequence[Weight], cache: SplitZipShardCache) -> str:
    ours = _some([weight.name for weight in weights]) if weights else "no parameters"
    return (
        f"offload: nothing to offload: the model has {ours}; the cache {cache.root} has {_some(list(cache.tensors))}. "
        "Say how names in the model become names in the cache with names=, such as names=lambda name: 'model.' + name"
    )


def _some(texts: Sequence[str]) -> str:
    rest = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + rest
