"""What is foreseen after which demands."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.errors import InvalidArgumentError, UnknownLayerError
from splitzip_aio.forecast import Forecast


def after(demands: str, *, layers: str = "abcdefgh", order: str | None = None) -> str:
    """What is foreseen after these demands."""
    forecast = Forecast(list(layers), order=None if order is None else list(order))
    for layer in demands:
        forecast.note(layer)
    return "".join(forecast.coming)


@pytest.mark.parametrize("demands", ["", "a", "ab", "aaaa", "abab", "aceg", "dcba"])
def test_nothing_before_two_steps_as_foreseen(demands: str) -> None:
    assert after(demands) == ""


def test_the_execution_order_ends_with_its_last_layer() -> None:
    assert after("abc") == "defgh"
    assert after("defgh") == ""


def test_a_round_joins_its_end_to_its_start() -> None:
    assert after("abcdefgha") == "bcdefgh"
    assert after("abcdefghabc") == "defghab"
    assert after("cdecdec") == "de"


def test_asking_again_changes_nothing() -> None:
    assert after("aabbbcc") == after("abc")


def test_another_order_is_known_after_a_round_of_it() -> None:
    assert after("adgbehcf") == ""
    assert after("adgbehcfadg") == "behcfad"
    assert after("adgbehcf" * 2 + "a") == "dgbehcf"


def test_a_surprise_is_learned_and_trust_comes_back() -> None:
    assert after("abcdh") == ""
    assert after("abcdhabcd") == "habc"


def test_a_given_order_is_believed_at_once_and_goes_round() -> None:
    assert after("", order="hgfedcba") == ""
    assert after("c", order="hgfedcba") == "bahgfed"
    assert after("c", order="acbd") == "bda"
    assert after("h", order="acbd") == ""
    assert after("ab", order="acbd") == ""


def test_a_wrong_order_is_refused() -> None:
    with pytest.raises(UnknownLayerError, match=r"order\[1\]: no layer 'x'"):
        Forecast(["a"], order=["a", "x"])
    with pytest.raises(InvalidArgumentError, match=r"order\[2\]: 'a' is there twice"):
        Forecast(["a", "b"], order=["a", "b", "a"])
    with pytest.raises(InvalidArgumentError, match="names of layers, found 'ab'"):
        Forecast(["a", "b"], order="ab")
    assert list(Forecast([], order=[]).coming) == []


@given(st.lists(st.sampled_from("abcdef"), max_size=40))
def test_it_never_repeats_itself_nor_names_the_latest(demands: list[str]) -> None:
    foreseen = after("".join(demands), layers="abcdef")
    assert len(set(foreseen)) == len(foreseen)
    assert not demands or demands[-1] not in foreseen


@pytest.mark.parametrize("seed", range(5))
def test_any_loop_is_foreseen_from_its_third_round_on(seed: int) -> None:
    layers = [str(number) for number in range(12)]
    order = random.Random(seed).sample(layers, 12)
    forecast = Forecast(layers)
    for step in range(5 * 12):
        if step >= 2 * 12:
            assert next(iter(forecast.coming)) == order[step % 12]
        forecast.note(order[step % 12])
