"""Slots made of segments, as the pipeline makes them, for the GPU decoder's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.codec.formats import ElementFormat
from splitzip_aio.codec.gpu import GpuSplitZipDecoder
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.codec.slot_table import SlotTable, table_capacity
from tests.codec.hostile import encode

Bytes = NDArray[np.uint8]
POISON = 0xA5
GUARD = 64


@dataclass(frozen=True)
class Source:
    """Bytes of elements, and how to code them."""

    data: Bytes
    fmt: ElementFormat
    schedule: Schedule


@dataclass
class DecodedSlot:
    """What a slot decoded to: each segment's bytes, the guard behind it, and the indices of segments found wrong."""

    table: SlotTable
    outputs: list[Bytes]
    guards: list[Bytes]
    failures: list[int]


def decode_slot(segments: Sequence[Bytes], *, device: str, damage: dict[int, int] | None = None) -> DecodedSlot:
    """Decode segments as one slot into poisoned memory.

    ``damage`` maps a byte of the slot to what is XORed into it after the headers were read.
    """
    starts = np.cumsum([0] + [segment.size for segment in segments])
    payload_bytes = int(starts[-1])
    payload = np.concatenate(segments)
    headers = SegmentHeaders.parse(
        payload.data, starts[:-1], [segment.size for segment in segments], where=lambda i: f"segment {i}"
    )
    sizes = headers.fields["decoded_bytes"].tolist()
    outputs = [torch.full((size + GUARD + 16,), POISON, dtype=torch.uint8, device=device) for size in sizes]
    skips = [-output.data_ptr() % 16 for output in outputs]
    slot = torch.zeros(payload_bytes + table_capacity(payload_bytes), dtype=torch.uint8)
    slot[:payload_bytes] = torch.from_numpy(payload)
    for place, mask in (damage or {}).items():
        slot[place] ^= mask
    destinations = [output.data_ptr() + skip for output, skip in zip(outputs, skips, strict=True)]
    table = SlotTable.build(headers, starts[:-1], destinations, slot.numpy().data[payload_bytes:])
    results = GpuSplitZipDecoder().decode_slot(slot.to(device), payload_bytes, table)
    found = results.cpu().numpy().view(np.uint64)
    whole = [output.cpu().numpy()[skip:] for output, skip in zip(outputs, skips, strict=True)]
    return DecodedSlot(
        table,
        [output[:size] for output, size in zip(whole, sizes, strict=True)],
        [output[size:][:GUARD] for output, size in zip(whole, sizes, strict=True)],
        table.failures(found),
    )


def check(sources: Sequence[Source], *, device: str) -> SlotTable:
    """Encode, decode as one slot, and compare every byte and the guards."""
    decoded = decode_slot([encode(s.data, s.fmt, s.schedule) for s in sources], device=device)
    for source, output, guard in zip(sources, decoded.outputs, decoded.guards, strict=True):
        name = f"{source.fmt.name} by {source.schedule}, {source.data.size} bytes"
        np.testing.assert_array_equal(output, source.data, err_msg=name)
        assert (guard == POISON).all(), f"{name}: wrote past its end"
    assert decoded.failures == []
    return decoded.table
