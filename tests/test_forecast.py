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


@given(rounds=st.lists(st.permutations("abcdefg"), min_size=1, max_size=3), skipped=st.lists(st.integers(0, 60)))
def test_going_along_sees_what_looking_anew_does(rounds: list[list[str]], skipped: list[int]) -> None:
    """Orders repeated, changed and broken; what comes is asked for each time, or only at the end."""
    demands = [layer for order in rounds for layer in order * 3]
    demands = [layer for place, layer in enumerate(demands) if place not in skipped]
    along, anew = Forecast("abcdefg"), Forecast("abcdefg")
    for layer in demands:
        along.note(layer)
        anew.note(layer)
        anew._coming = None
        assert dict(along.coming) == dict(anew.coming)
        assert list(along.coming) == list(anew.coming)
        assert [along.coming.get(layer, -1) for layer in "abcdefg"] == [
            anew.coming.get(layer, -1) for layer in "abcdefg"
        ]
        assert len(along.coming) == len(list(along.coming))
