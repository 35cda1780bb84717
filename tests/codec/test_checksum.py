"""The checksum of decoded bytes, against a loop over Python integers, and what it must notice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splitzip_aio.codec.checksum import checksum


def by_hand(data: bytes) -> int:
    """The definition, word by word."""
    total = 0
    for group in range((len(data) + 15) // 16):
        mixed = (group * 0x9E3779B1 + 0x85EBCA77) % 2**32
        key = (mixed ^ (mixed >> 15)) | 1
        total += 0x9E3779B97F4A7C15
        for j in range(4):
            word = int.from_bytes(data[16 * group + 4 * j : 16 * group + 4 * j + 4], "little")
            total += word * ((key + j * 0x2C1B3C6E) % 2**32)
    return total % 2**64


def of(data: bytes) -> int:
    return checksum(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0x0000000000000000),
        (b"\0", 0x9E3779B97F4A7C15),
        (bytes(16), 0x9E3779B97F4A7C15),
        (bytes(17), 0x3C6EF372FE94F82A),
        (b"\1", 0x9E3779BA05353DB6),
        (bytes(range(16)), 0xAEDADD5EAA6A1B3D),
        (b"splitzip" * 9, 0x204D25AA48870CF8),
    ],
    ids=["nothing", "zero", "group of zeros", "two groups", "one", "0 to 15", "text"],
)
def test_known_values(data: bytes, expected: int) -> None:
    assert of(data) == expected == by_hand(data)


@given(st.binary(max_size=200))
def test_agrees_with_the_definition(data: bytes) -> None:
    assert of(data) == by_hand(data)


def test_agrees_with_the_definition_where_products_overflow() -> None:
    """Long enough for keys and sums to wrap, with all bits set."""
    data = b"\xff" * 100_003
    assert of(data) == by_hand(data)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_change_of_one_word_is_seen(data: bytes, draw: st.DataObject) -> None:
    word = draw.draw(st.integers(0, (len(data) - 1) // 4))
    stop = min(4 * word + 4, len(data))
    other = draw.draw(st.binary(min_size=stop - 4 * word, max_size=stop - 4 * word))
    changed = data[: 4 * word] + other + data[stop:]
    assume(changed != data)
    assert of(changed) != of(data)


def test_every_change_of_one_byte_is_seen() -> None:
    data = np.random.default_rng(1).integers(0, 256, 48, np.uint8)
    right = checksum(data)
    for place in range(data.size):
        for value in range(256):
            changed = data.copy()
            changed[place] = value
            assert (checksum(changed) == right) == (value == data[place])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=64), st.data())
def test_two_words_that_change_places_are_seen(values: list[int], draw: st.DataObject) -> None:
    """A product of two differences below 2**32 is no multiple of 2**64, so unequal keys are enough."""
    words = np.array(values, "<u4")
    i, j = draw.draw(st.integers(0, words.size - 1)), draw.draw(st.integers(0, words.size - 1))
    assume(words[i] != words[j])
    swapped = words.copy()
    swapped[[i, j]] = words[[j, i]]
    assert checksum(swapped.view(np.uint8)) != checksum(words.view(np.uint8))


@pytest.mark.parametrize("unit", [16, 1024, 8192], ids=["groups", "chunks", "tiles"])
def test_blocks_that_change_places_are_seen(unit: int) -> None:
    blocks = np.random.default_rng(2).integers(0, 256, (12, unit), np.uint8)
    right = checksum(blocks.ravel())
    for i in range(12):
        for j in range(i):
            swapped = blocks.copy()
            swapped[[i, j]] = blocks[[j, i]]
            assert checksum(swapped.ravel()) != right


def test_lengths_that_differ_by_a_group_of_zeros_are_seen() -> None:
    sums = [checksum(np.zeros(size, np.uint8)) for size in range(0, 16 * 1000, 16)]
    assert len(set(sums)) == len(sums)


@given(st.binary(max_size=400), st.integers(1, 9))
def test_the_sum_is_independent_of_order(data: bytes, groups: int) -> None:
    """What a GPU relies on: a block's share needs only its place. Zeros elsewhere add a constant for each group."""
    step = 16 * groups
    total = 0
    for start in range(0, len(data), step):
        alone = bytes(start) + data[start : start + step]
        total += of(alone) - of(bytes(start))
    assert total % 2**64 == of(data)
