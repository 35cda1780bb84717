"""Damaged segments of every schedule through the GPU decoder, and tensors through the encoder, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python bench/memcheck.py

``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives every tensor an allocation of its own, so that the sanitizer sees a read that
goes past it; each slot here is as long as its contents. Without the sanitizer this checks the verdicts alone: it ends
with status 1 if a damaged segment decoded to wrong bytes and was not flagged, or an undamaged one was.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.cli.synthetic import trained_weights
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16, F16, F32, ElementFormat
from splitzip_aio.codec.gpu import GpuSplitZipDecoder
from splitzip_aio.codec.gpu_encode import GpuSplitZipEncoder
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.layout import HEADER_BYTES
from splitzip_aio.codec.payload import SegmentHeader, parse_header
from splitzip_aio.codec.schedule import CANDIDATES, STORED, TOP16, Schedule
from splitzip_aio.codec.slot_table import SlotTable, table_capacity
from splitzip_aio.codec.tensors import encode_torch

Bytes = NDArray[np.uint8]
SIZES = (1, 9001)
ODD_SCHEDULES = tuple(map(Schedule.parse, ("1,2,1,4", "4,4")))
FILLS = (0xFF, None)  # None: random


@dataclass
class Tally:
    """What came of all slots."""

    slots: int = 0
    flagged: int = 0
    unnoticed: int = 0
    wrongly_flagged: int = 0

    def add(self, flagged: bool, right: bool, damaged: bool) -> None:
        self.slots += 1
        self.flagged += flagged
        self.unnoticed += not flagged and not right
        self.wrongly_flagged += flagged and not damaged


def elements(fmt: ElementFormat, count: int, rng: np.random.Generator) -> Bytes:
    """Weights, and every seventh stretch of 300 elements random bits, which are escapes by any schedule."""
    dtype = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}[fmt]
    data = trained_weights(1, count, seed=count).to(dtype).view(torch.uint8).numpy().reshape(-1).copy()
    noise = np.arange(data.size) // (300 * fmt.element_bytes) % 7 == 3
    data[noise] = rng.integers(0, 256, int(noise.sum()), np.uint8)
    return data


def encode(data: Bytes, fmt: ElementFormat, schedule: Schedule) -> Bytes:
    return cpu.encode_segment(data, fmt, schedule, schedule.codebooks(cpu.histogram(data, fmt), fmt))


def damages(segment: Bytes, rng: np.random.Generator) -> Iterator[Bytes]:
    """Copies with each part filled with ones and noise, all of it noise, and single bytes changed."""
    header = parse_header(segment.data, where="segment")
    places = header.layout
    starts = sorted({places.low, places.high, places.codes, places.index, places.tail, segment.size})
    for start, stop in (*itertools.pairwise(starts), (HEADER_BYTES, segment.size)):
        for fill in FILLS:
            damaged = segment.copy()
            damaged[start:stop] = rng.integers(0, 256, stop - start) if fill is None else fill
            yield damaged
    for place in rng.integers(HEADER_BYTES, segment.size, 4).tolist():
        damaged = segment.copy()
        damaged[place] ^= rng.integers(1, 256, dtype=np.uint8)
        yield damaged


def forgeries(segment: Bytes, rng: np.random.Generator) -> Iterator[Bytes]:
    """Headers that agree with themselves but not with what follows: other counts, a random checksum."""
    header = parse_header(segment.data, where="segment")
    most = header.elements if header.codebooks else 0
    for escapes in {0, most, int(rng.integers(0, most + 1))}:
        for tail_bits in set(header.schedule.tail_bounds(header.elements, escapes)):
            counts = (header.elements, escapes, tail_bits, int(rng.integers(0, 1 << 62)), 0)
            forged = SegmentHeader(header.fmt, header.schedule, *counts, header.codebooks)
            contents = np.resize(segment, forged.segment_bytes)
            contents[:HEADER_BYTES] = np.frombuffer(forged.pack(), np.uint8)
            yield contents


def decode(segment: Bytes, device: str, decoder: GpuSplitZipDecoder) -> tuple[Bytes, bool]:
    """What a segment decodes to in a slot of its own, and whether it is flagged."""
    headers = SegmentHeaders.parse(segment.data, [0], [segment.size], where="segment {}".format)
    out = torch.empty(int(headers.fields["decoded_bytes"][0]), dtype=torch.uint8, device=device)
    view = bytearray(table_capacity(segment.size))
    table = SlotTable.build(headers, [0], [out.data_ptr()], memoryview(view))
    slot = np.concatenate([segment, np.frombuffer(view, np.uint8, count=table.nbytes)])
    on_device = torch.empty(slot.size, dtype=torch.uint8, device=device).copy_(torch.from_numpy(slot))
    results = decoder.decode_slot(on_device, segment.size, table)
    return out.cpu().numpy(), bool(table.failures(results.cpu().numpy().view(np.uint64)))


def check_decoder(device: str, sizes: tuple[int, ...], tally: Tally) -> None:
    rng, decoder = np.random.default_rng(0), GpuSplitZipDecoder()
    cases = [(BF16, schedule) for schedule in (*CANDIDATES, *ODD_SCHEDULES)]
    cases += [(fmt, Schedule.parse("2,2,3")) for fmt in (F16, F32)]
    for fmt, schedule in cases:
        for size in sizes:
            data = elements(fmt, size, rng)
            segment = encode(data, fmt, schedule)
            for kind, variants in (("whole", [segment]), ("damaged", damages(segment, rng))):
                for variant in variants:
                    found, flagged = decode(variant, device, decoder)
                    tally.add(flagged, np.array_equal(found, data), kind == "damaged")
            for forged in forgeries(segment, rng):
                tally.add(decode(forged, device, decoder)[1], False, True)


def check_encoder(device: str, sizes: tuple[int, ...]) -> int:
    """Encode tensors on the device; returns how many payloads are not the CPU's."""
    rng, encoder, differ = np.random.default_rng(1), GpuSplitZipEncoder(device), 0
    for schedule in (None, STORED, TOP16, *CANDIDATES[-2:], *ODD_SCHEDULES):
        tensors = [torch.from_numpy(elements(BF16, size, rng)).view(torch.bfloat16) for size in sizes]
        payloads = encoder.encode_batch([tensor.to(device) for tensor in tensors], schedule=schedule)
        for tensor, (payload, _) in zip(tensors, payloads, strict=True):
            differ += not torch.equal(payload, encode_torch(tensor, schedule=schedule)[0])
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="'cpu' for Triton's interpreter (TRITON_INTERPRET=1)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="elements of a segment")
    options = parser.parse_args()
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1" and options.device != "cpu":
        print("PYTORCH_NO_CUDA_MEMORY_CACHING is not 1: reads past a tensor can go unseen")
    tally, sizes = Tally(), tuple(options.sizes)
    check_decoder(options.device, sizes, tally)
    differ = check_encoder(options.device, sizes)
    print(f"{tally.slots} slots decoded, {tally.flagged} flagged; {tally.unnoticed} wrong and not flagged, ", end="")
    print(f"{tally.wrongly_flagged} flagged without damage; {differ} payloads differ from the CPU's")
    if tally.unnoticed or tally.wrongly_flagged or differ or not tally.flagged:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
