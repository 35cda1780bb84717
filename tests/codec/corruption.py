"""One changed byte in each of many copies of a segment, decoded together on a GPU or in the interpreter."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from splitzip_aio.codec.formats import BF16, F8_E4M3, F16, F32, RAW, ElementFormat
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.layout import TILE_ELEMENTS
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.errors import CorruptDataError
from tests.codec.data import Bytes, Contents, bursts, random_bits, rare_exponents, weights
from tests.codec.hostile import encode, flip, parts
from tests.codec.slots import POISON, decode_slot


@dataclass(frozen=True)
class Sample:
    """A segment to damage."""

    name: str
    fmt: ElementFormat
    schedule: str
    contents: Contents
    count: int

    def data(self) -> Bytes:
        return self.contents(self.fmt, self.count, np.random.default_rng(1))

    def segment(self) -> Bytes:
        return encode(self.data(), self.fmt, Schedule.parse(self.schedule))


SAMPLES = (
    Sample("weights", BF16, "2,2,3", weights, TILE_ELEMENTS + 1337),
    Sample("escapes", BF16, "2,2,3", bursts, TILE_ELEMENTS + 1337),
    Sample("two tiers", BF16, "2,3", weights, TILE_ELEMENTS + 1),
    Sample("three bits", BF16, "3", rare_exponents, 2 * TILE_ELEMENTS),
    Sample("four bits", BF16, "4", bursts, 701),
    Sample("four tiers", BF16, "1,2,1,3", bursts, 3001),
    Sample("top16 weights", BF16, "top16", weights, TILE_ELEMENTS + 3),
    Sample("top16 escapes", BF16, "top16", bursts, TILE_ELEMENTS + 1077),
    Sample("stored", BF16, "stored", random_bits, 999),
    Sample("raw", RAW, "stored", random_bits, 4001),
    Sample("half", F16, "2,2,3", weights, 3001),
    Sample("single", F32, "2,2,3", weights, 1501),
    Sample("quarter", F8_E4M3, "2,3", weights, TILE_ELEMENTS + 5),
)


def check_changed_bytes(sample: Sample, count: int, *, device: str, seed: int) -> set[str]:
    """Change one byte in each of ``count`` copies, in all parts in turn; each must be noticed, or change nothing.

    Headers are changed before the host reads them, everything else afterwards, as on the way to the device. Padding
    is left alone, since nobody reads it. Returns the parts that were changed.
    """
    rng = np.random.default_rng(seed)
    segment, right = sample.segment(), sample.data()
    places = decisive(parse_header(segment.data, where="segment"))
    names = [name for name, _ in zip(itertools.cycle(places), range(count), strict=False)]
    in_headers = names.count("header")
    for _ in range(in_headers):
        check_header_is_refused(flip(segment, int(rng.choice(places["header"])), rng))
    others = [name for name in names if name != "header"]
    damage = {
        number * segment.size + int(rng.choice(places[name])): int(rng.integers(1, 256))
        for number, name in enumerate(others)
    }
    decoded = decode_slot([segment] * (len(others) + 1), device=device, damage=damage)
    missed = sorted(set(range(len(others))) - set(decoded.failures))
    for number in missed:  # the code of an escaped element, or bits of an escape beyond its exponent's
        np.testing.assert_array_equal(decoded.outputs[number], right, err_msg=others[number])
    assert len(missed) <= count // 8, [others[number] for number in missed]
    assert len(others) not in decoded.failures, "the last copy is as it was"
    np.testing.assert_array_equal(decoded.outputs[-1], right)
    assert all((guard == POISON).all() for guard in decoded.guards)
    return set(names)


def check_header_is_refused(segment: Bytes) -> None:
    with pytest.raises(CorruptDataError, match="copy 0"):
        SegmentHeaders.parse(segment.data, [0], [segment.size], where="copy {}".format)


def decisive(header: SegmentHeader) -> dict[str, Bytes]:
    """The bytes of each part of which every bit decides what is decoded: no padding, no byte that is partly unused."""
    fmt, count = header.fmt, header.elements
    bits = {
        "high": count * fmt.high_bits,
        "low": count * fmt.low_bits,
        "codes": count * (header.schedule.widths or (4,))[0],
        "tail": header.tail_bits,
    }
    found = {}
    for name, (start, stop) in parts(header).items():
        whole = stop - bool(header.codebooks and bits.get(name, 0) % 8)
        if not name.startswith("padding") and start < whole:
            found[name] = np.arange(start, whole)
    return found
