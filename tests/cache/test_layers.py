from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.cache.layers import execution_key, layer_name, natural_key


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("blocks.0.attn.weight", "blocks.0"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("params.7", "params.7"),
        ("0.weight", "0"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "lm_head"),
        ("block10.weight", "block10"),
        ("scale", "scale"),
        ("", ""),
        ("a.².weight", "a.²"),  # a digit, but no number
    ],
)
def test_layer_is_the_prefix_up_to_the_first_number_or_the_parent(tensor: str, layer: str) -> None:
    assert layer_name(tensor) == layer


def test_natural_order_compares_numbers_as_numbers() -> None:
    names = ["b.10.w", "b.9.w", "b.1.w", "a", "b.w", "b.02.w", "b.2.w", "b.10.a"]
    assert sorted(names, key=natural_key) == ["a", "b.1.w", "b.02.w", "b.2.w", "b.9.w", "b.10.a", "b.10.w", "b.w"]


@given(st.lists(st.text(alphabet="ab.01٣²", max_size=8), unique=True))
def test_natural_order_is_total(names: list[str]) -> None:
    ordered = sorted(names, key=natural_key)
    backwards = names[::-1]
    assert sorted(backwards, key=natural_key) == ordered
    assert len({natural_key(name) for name in names}) == len(names)


def test_numbers_have_no_limit() -> None:
    assert natural_key("a" + "9" * 10_000) < natural_key("a1" + "0" * 10_000)


@given(st.lists(st.from_regex(r"[ab](\.[ab12]{1,2}){0,3}", fullmatch=True), unique=True))
def test_execution_order_keeps_layers_together(names: list[str]) -> None:
    ordered = [layer_name(name) for name in sorted(names, key=execution_key)]
    assert len([layer for layer, _ in itertools.groupby(ordered)]) == len(set(ordered))
