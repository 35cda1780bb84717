"""Layers and their order: which tensors are used together, and which come first.

The order is natural: names are compared piece by piece with numbers as numbers, so ``blocks.2`` precedes
``blocks.10``. A checkpoint does not say in which order its layers run; for models that number their blocks, this is
that order but for the ends (an ``lm_head`` sorts before ``model.layers``). Streaming is right in any order, and
fastest in the order of use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["LayerRule", "execution_key", "layer_name", "natural_key"]

LayerRule: TypeAlias = Callable[[str], str]
"""From a tensor's name to its layer's."""

NaturalKey: TypeAlias = tuple[tuple[str | tuple[int, str], ...], str]

_NUMBER = re.compile(r"([0-9]+)")


def layer_name(tensor_name: str) -> str:
    """Layer of a tensor: its name up to the first part that is a number, else all but its last part.

    ``model.layers.3.mlp.up.weight`` is in ``model.layers.3``, ``model.norm.weight`` in ``model.norm``; a name without
    parts is a layer of its own.
    """
    parts = tensor_name.split(".")
    for place, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or tensor_name


def natural_key(name: str) -> NaturalKey:
    """Sort key that compares runs of digits as numbers; unequal names have unequal keys."""
    pieces: list[str | tuple[int, str]] = []
    for place, piece in enumerate(_NUMBER.split(name)):
        digits = piece.lstrip("0")
        # Of equally long digit strings the larger number is the larger string: no conversion, so no limit.
        pieces.append((len(digits), digits) if place % 2 else piece)
    return tuple(pieces), name


def execution_key(tensor_name: str, layer_of: LayerRule = layer_name) -> tuple[NaturalKey, NaturalKey]:
    """Sort key of tensors: by layer, then by name, each naturally; a layer's tensors stay together."""
    return natural_key(layer_of(tensor_name)), natural_key(tensor_name)
