"""Torch tensors through encode_torch and decode_torch, compared as bits."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.codec.codebook import SplitZipCodebook, calibrate_codebook
from splitzip_aio.codec.dtypes import torch_view
from splitzip_aio.codec.formats import BF16, ElementFormat
from splitzip_aio.codec.layout import SEGMENT_ELEMENTS, TILE_ELEMENTS
from splitzip_aio.codec.schedule import CANDIDATES, STORED, TOP16, Schedule
from splitzip_aio.codec.tensors import PayloadMeta, decode_torch, encode_torch
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError, UnsupportedError
from tests.codec.data import CODED, Bytes, elements, random_bits, schedules, weights
from tests.codec.test_dtypes import TORCH_DTYPES, any_tensor, bits

FOREIGN = SplitZipCodebook("BF16", bytes(range(200, 256)), 0.5)


def trained(*shape: int) -> torch.Tensor:
    """(shape) BF16 weights."""
    count = int(np.prod(shape))
    return torch.from_numpy(weights(BF16, count, np.random.default_rng(count))).view(torch.bfloat16).reshape(shape)


def check(tensor: torch.Tensor, **options: Any) -> PayloadMeta:
    """Encode, write the meta down, read it, decode into poisoned memory and into new; return the meta."""
    payload, meta = encode_torch(tensor, **options)
    meta = PayloadMeta.from_json(meta.to_json())
    assert (payload.dtype, payload.shape) == (torch.uint8, (meta.compressed_bytes,))
    plain = tensor.detach()
    memory = torch.full((plain.numel() * plain.element_size(),), 0xA5, dtype=torch.uint8)
    out = memory.view(tensor.dtype).reshape(tensor.shape) if memory.numel() else torch.empty_like(plain)
    assert decode_torch(payload, meta, out=out) is out
    for found in (out, decode_torch(payload, meta)):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert not found.requires_grad
        assert bits(found) == bits(plain)
    return meta


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 0, 6), (5,), (), (257, 130)], ids=str)
def test_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if dtype != torch.float4_e2m1fn_x2 or shape:
        meta = check(any_tensor(dtype, shape))
        assert meta.compressed_bytes == sum(meta.segments)
        assert meta.raw_bytes == any_tensor(dtype, shape).nbytes


@given(st.sampled_from(CODED).flatmap(lambda fmt: st.tuples(st.just(fmt), schedules(fmt), elements(fmt))))
def test_any_elements_and_schedule(case: tuple[ElementFormat, Schedule, Bytes]) -> None:
    fmt, schedule, data = case
    tensor = torch_view(torch.from_numpy(data.copy()), fmt.name, (data.size // fmt.element_bytes,))
    meta = check(tensor, schedule=schedule)
    assert meta.schedule == schedule
    assert meta.codebook == calibrate_codebook(tensor)[0]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::3, 1::2],
        lambda t: t[5:6].expand(7, 96),
        lambda t: t.requires_grad_(),
        torch.nn.Parameter,
        lambda t: t[:, :0],
        lambda t: t[0, 0],
    ],
    ids=["transposed", "strided", "expanded", "requires grad", "parameter", "empty", "scalar"],
)
def test_any_view(view: Any) -> None:
    check(view(trained(64, 96)))


@pytest.mark.parametrize(
    "count", [1, SEGMENT_ELEMENTS - 1, SEGMENT_ELEMENTS, SEGMENT_ELEMENTS + 1, 2 * SEGMENT_ELEMENTS + 9]
)
def test_large_tensors_have_several_segments(count: int) -> None:
    meta = check(trained(count))
    assert len(meta.segments) == -(-count // SEGMENT_ELEMENTS)


def test_large_tensors_of_bytes_have_several_segments() -> None:
    assert len(check(any_tensor(torch.int64, (300_000,))).segments) == 2


@pytest.mark.parametrize("schedule", CANDIDATES, ids=str)
def test_weights_of_every_schedule(schedule: Schedule) -> None:
    tensor = trained(3, TILE_ELEMENTS + 1)
    meta = check(tensor, schedule=str(schedule))
    assert meta.schedule == schedule
    assert encode_torch(tensor)[1].compressed_bytes <= meta.compressed_bytes


def test_a_schedule_can_be_given_as_widths() -> None:
    assert check(trained(100), schedule=(2, 3)).schedule == Schedule.parse("2,3")


def test_weights_take_two_thirds() -> None:
    meta = check(trained(1024, 1024))
    assert str(meta.schedule) == "2,2,3"
    assert meta.ratio < 0.68
    assert meta.codebook is not None
    assert meta.codebook.coverage > 0.99


@pytest.mark.parametrize("schedule", [each for each in CANDIDATES if each != STORED], ids=str)
def test_a_codebook_that_misses_exponents_is_exact(schedule: Schedule) -> None:
    tensor = trained(2, TILE_ELEMENTS)
    meta = check(tensor, codebook=FOREIGN, schedule=schedule)
    assert meta.codebook == FOREIGN
    assert meta.ratio > 1


def test_a_foreign_codebook_is_not_used_where_it_costs_more_than_storing() -> None:
    assert check(trained(5000), codebook=FOREIGN).schedule == STORED


@given(elements(BF16), elements(BF16), schedules(BF16))
def test_any_codebook_is_exact(one: Bytes, other: Bytes, schedule: Schedule) -> None:
    tensors = [torch.from_numpy(data.copy()).view(torch.bfloat16) for data in (one, other)]
    check(tensors[0], codebook=calibrate_codebook(tensors[1])[0], schedule=schedule)


def test_the_own_codebook_changes_nothing() -> None:
    tensor = trained(70, 90)
    payload, meta = encode_torch(tensor)
    again, same = encode_torch(tensor, calibrate_codebook(tensor)[0])
    assert (meta, bits(payload)) == (same, bits(again))


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {"schedule": "2,2,3"}, "2,2,3 cannot code RAW"),
        (torch.zeros(3), {"schedule": "top16"}, "top16 cannot code F32"),
        (torch.zeros(3), {"schedule": "2,9"}, "expected"),
        (torch.zeros(3), {"codebook": FOREIGN}, "codebook of BF16 cannot code F32"),
        (torch.zeros(3, dtype=torch.int8), {"codebook": FOREIGN}, "codebook of BF16 cannot code I8"),
        (torch.zeros(0, dtype=torch.int8), {"schedule": "4"}, "4 cannot code RAW"),
    ],
)
def test_options_that_do_not_fit_are_refused(tensor: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        encode_torch(tensor, **options)


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_what_has_no_dense_data_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError):
        encode_torch(tensor)


@pytest.fixture(scope="module")
def encoded() -> tuple[torch.Tensor, PayloadMeta]:
    """Two segments of weights, (2, SEGMENT_ELEMENTS / 2 + 40)."""
    return encode_torch(trained(2, SEGMENT_ELEMENTS // 2 + 40), schedule="4")


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, SEGMENT_ELEMENTS // 2 + 40, dtype=torch.float16),
        torch.empty(SEGMENT_ELEMENTS + 80, dtype=torch.bfloat16),
        torch.empty(SEGMENT_ELEMENTS // 2 + 40, 2, dtype=torch.bfloat16).t(),
        torch.empty(2, SEGMENT_ELEMENTS // 2 + 40, dtype=torch.bfloat16, device="meta"),
    ],
    ids=["dtype", "shape", "strides", "device"],
)
def test_out_that_does_not_fit_is_refused(encoded: tuple[torch.Tensor, PayloadMeta], out: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match=r"out: expected a contiguous BF16 .* found \("):
        decode_torch(*encoded, out=out)


def test_out_that_is_lazily_conjugated_is_refused() -> None:
    payload, meta = encode_torch(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(InvalidArgumentError, match="out"):
        decode_torch(payload, meta, out=torch.zeros(3, dtype=torch.complex64).conj())


def test_out_may_require_grad() -> None:
    tensor = trained(5, 7)
    out = torch.nn.Parameter(torch.zeros(5, 7, dtype=torch.bfloat16))
    decode_torch(*encode_torch(tensor), out=out)
    assert bits(out.detach()) == bits(tensor)


def test_strided_and_offset_payloads_are_read() -> None:
    tensor = trained(500)
    payload, meta = encode_torch(tensor)
    wide = torch.zeros(payload.numel(), 2, dtype=torch.uint8)
    wide[:, 1] = payload
    assert bits(decode_torch(wide[:, 1], meta)) == bits(tensor)
    assert bits(decode_torch(torch.cat((payload[:3], payload))[3:], meta)) == bits(tensor)


@pytest.mark.parametrize(
    "change",
    [lambda p: p.view(torch.int8), lambda p: p[None], lambda p: p.to("meta")],
    ids=["dtype", "shape", "device"],
)
def test_a_payload_of_another_kind_is_refused(encoded: tuple[torch.Tensor, PayloadMeta], change: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="payload: expected"):
        decode_torch(change(encoded[0]), encoded[1])


def test_a_payload_of_another_length_is_refused(encoded: tuple[torch.Tensor, PayloadMeta]) -> None:
    payload, meta = encoded
    for other in (payload[:0], payload[:-1], torch.cat((payload, payload[:32]))):
        with pytest.raises(CorruptDataError, match=f"{other.numel()} bytes, its meta says {payload.numel()}"):
            decode_torch(other, meta)


def test_damage_names_the_segment(encoded: tuple[torch.Tensor, PayloadMeta]) -> None:
    payload, meta = encoded
    for number, place in enumerate((meta.segments[0] // 2, meta.segments[0] + 170)):
        damaged = payload.clone()
        damaged[place] ^= 1
        with pytest.raises(CorruptDataError, match=f"segment {number}"):
            decode_torch(damaged, meta)


def test_a_payload_of_another_tensor_is_refused(encoded: tuple[torch.Tensor, PayloadMeta]) -> None:
    payload, meta = encoded
    tensor = trained(2, SEGMENT_ELEMENTS // 2 + 40)
    swapped = torch.cat((payload[meta.segments[0] :], payload[: meta.segments[0]]))
    others = [
        (payload, dataclasses.replace(meta, schedule=TOP16)),
        (payload, dataclasses.replace(meta, schedule=STORED)),
        (payload, dataclasses.replace(meta, dtype="F16", codebook=SplitZipCodebook("F16", b"", 1.0))),
        (payload, dataclasses.replace(meta, shape=(2, SEGMENT_ELEMENTS // 2 + 41))),
        (payload, dataclasses.replace(meta, shape=(2, SEGMENT_ELEMENTS // 2 + 39))),
        (payload, dataclasses.replace(meta, shape=(3,))),
        (payload, dataclasses.replace(meta, segments=(meta.compressed_bytes,))),
        (swapped, meta),
        (swapped, dataclasses.replace(meta, shape=(4,), segments=meta.segments[::-1])),
        (encode_torch(tensor, FOREIGN, schedule="stored")[0][: meta.compressed_bytes], meta),
    ]
    for other, claimed in others:
        with pytest.raises(CorruptDataError):
            decode_torch(other, claimed)


GOOD: dict[str, Any] = {
    "format": 2,
    "dtype": "BF16",
    "shape": [5, 100],
    "schedule": "2,2,3",
    "codebook": {"dtype": "BF16", "exponents": [120], "coverage": 1.0},
    "segments": [992],
}


def test_meta_in_json() -> None:
    meta = PayloadMeta.from_json(json.dumps(GOOD))
    assert meta == PayloadMeta("BF16", (5, 100), Schedule.parse("2,2,3"), SplitZipCodebook("BF16", b"x", 1.0), (992,))
    assert json.loads(meta.to_json()) == GOOD
    assert (meta.raw_bytes, meta.compressed_bytes, meta.ratio) == (1000, 992, 0.992)
    raw = PayloadMeta("I64", (0, 3), STORED, None, ())
    assert PayloadMeta.from_json(raw.to_json()) == raw
    assert (raw.raw_bytes, raw.ratio) == (0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "format 1, expected 2"),
        ({"dtype": "F5"}, "unknown dtype"),
        ({"dtype": "F16"}, "codebook of F16"),
        ({"dtype": "I16", "schedule": "stored"}, "codebook of None"),
        ({"dtype": "I16", "codebook": None}, "cannot code"),
        ({"codebook": None}, "codebook of BF16"),
        ({"codebook": {"dtype": "BF16"}}, "codebook JSON"),
        ({"codebook": []}, "codebook JSON"),
        ({"shape": [-1]}, "dimension -1"),
        ({"shape": [2**40, 2**40]}, "shape"),
        ({"shape": [1e400]}, "JSON"),
        ({"shape": [2.5]}, "shape"),
        ({"shape": [0]}, "1 segments for 0 bytes"),
        ({"schedule": "2,2,9"}, "expected"),
        ({"schedule": 3}, "schedule"),
        ({"segments": []}, "0 segments for 1000 bytes"),
        ({"segments": [992] * 1001}, "1001 segments for 1000 bytes"),
        ({"segments": [0]}, "segment of 0 bytes"),
        ({"segments": [160]}, "segment of 160 bytes"),
        ({"segments": [993]}, "segment of 993 bytes"),
        ({"segments": [-32]}, "segment of -32 bytes"),
        ({"segments": "x"}, "segments"),
        ({"more": 1}, "more"),
    ],
)
def test_meta_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PayloadMeta.from_json(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["", "[]", "{}", "nul", b"\xff", "[" * 100_000])
def test_what_is_no_meta_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="payload JSON"):
        PayloadMeta.from_json(text)


def test_random_bits_do_not_grow_by_more_than_a_header() -> None:
    tensor = torch.from_numpy(random_bits(BF16, 40_000, np.random.default_rng(3))).view(torch.bfloat16)
    assert check(tensor).compressed_bytes < tensor.nbytes + 160 + 32
