"""What the GPU codec reaches, as fractions of the device's own copy bandwidth.

    python bench/codec.py [--megabytes 512] [--json PATH]

Every row decodes weights made from a seed, in poisoned memory, and is checked byte for byte and by checksum before it
is timed. The roofline is the measured bandwidth of a device copy, bytes read and written, times 2 / (2 + 2 * ratio):
what a decoder would reach that moved nothing but its payload and its result. Times are medians of many launches, with
the spread from the 10th to the 90th percentile. Encoding, as ``bench/gpu_encode.py`` measures it, is in the same run,
and the last table holds what was found against the goals.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_encode
import numpy as np
import torch

from splitzip_aio.cli.synthetic import trained_weights
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16
from splitzip_aio.codec.gpu import GpuSplitZipDecoder
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.layout import SEGMENT_ELEMENTS
from splitzip_aio.codec.schedule import CANDIDATES, Schedule
from splitzip_aio.codec.slot_table import SlotTable, table_capacity

SLOT_BYTES = 16 << 20
CITED = """\
Cited, not measured here: the published two-kernel SplitZip codec, whose layout top16 is, decodes 2309 GB/s of raw bytes
on an H200, 0.94 of its roofline, without a checksum."""


@dataclass(frozen=True)
class Row:
    """One measurement: ``gbps`` of raw bytes, with its 10th and 90th percentile."""

    name: str
    ratio: float
    gbps: float
    low: float
    high: float
    roofline: float | None

    def __str__(self) -> str:
        share = f"{self.gbps / self.roofline:6.3f}" if self.roofline else "      "
        return f"{self.name:34} {self.ratio:7.4f} {self.gbps:7.0f} ({self.low:.0f}-{self.high:.0f}) GB/s {share}"


@dataclass(frozen=True)
class Goal:
    """What is asked of one number of this run."""

    name: str
    found: float
    wanted: float
    at_most: bool = False

    def __str__(self) -> str:
        met = self.found <= self.wanted if self.at_most else self.found >= self.wanted
        found, wanted = (f"{value:.0f}" if self.wanted >= 10 else f"{value:.3f}" for value in (self.found, self.wanted))
        return f"{self.name:48} {found:>8} {'<=' if self.at_most else '>='} {wanted:>6}  {'met' if met else 'NOT MET'}"


class Slot:
    """Segments of equal raw sizes on the device with their table, and the range that they decode into."""

    def __init__(self, segments: Sequence[np.ndarray], out: torch.Tensor) -> None:
        payload = np.concatenate(segments)
        self.payload_bytes = payload.size
        sizes = np.array([segment.size for segment in segments])
        sources = np.cumsum(sizes) - sizes
        headers = SegmentHeaders.parse(payload.data, sources, sizes, where="segment {}".format)
        decoded = headers.fields["decoded_bytes"].astype(np.int64)
        view = bytearray(160 * len(segments) + table_capacity(self.payload_bytes))
        destinations = out.data_ptr() + np.cumsum(decoded) - decoded
        self.table = SlotTable.build(headers, sources, destinations, memoryview(view))
        host = np.concatenate([payload, np.frombuffer(view, np.uint8)[: self.table.nbytes]])
        self.buffer = torch.from_numpy(host).to(out.device)

    def decode(self, decoder: GpuSplitZipDecoder) -> torch.Tensor:
        return decoder.decode_slot(self.buffer, self.payload_bytes, self.table)


def encode(raw: torch.Tensor, schedule: Schedule, segment_elements: int = SEGMENT_ELEMENTS) -> list[np.ndarray]:
    """Segments of a BF16 tensor, with one codebook for all."""
    data = raw.cpu().view(torch.uint8).numpy()
    pieces = [data[i : i + 2 * segment_elements] for i in range(0, data.size, 2 * segment_elements)]
    with ThreadPoolExecutor() as pool:
        counts = np.sum(list(pool.map(lambda piece: cpu.histogram(piece, BF16), pieces)), axis=0)
        books = schedule.codebooks(counts, BF16)
        return list(pool.map(lambda piece: cpu.encode_segment(piece, BF16, schedule, books), pieces))


def timed(run: Callable[[], object], nbytes: int, repeats: int = 100) -> tuple[float, float, float]:
    """GB/s as median, 10th and 90th percentile."""
    for _ in range(10):
        run()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    stops = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for start, stop in zip(starts, stops, strict=True):
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    seconds = np.array([start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]) / 1e3
    return tuple(float(nbytes / s / 1e9) for s in (np.median(seconds), *np.percentile(seconds, (90, 10))))


def copy_speed(raw: torch.Tensor) -> tuple[float, float, float]:
    """GB/s, read and written, of a device copy of ``raw``."""
    target = torch.empty_like(raw)
    return timed(lambda: target.copy_(raw), 2 * raw.nbytes)


def verified(slots: Sequence[Slot], out: torch.Tensor, raw: torch.Tensor) -> None:
    """Decode everything once, and refuse to go on unless every byte and every checksum is right."""
    out.fill_(float("nan"))
    for slot in slots:
        results = slot.decode(GpuSplitZipDecoder())
        wrong = slot.table.failures(results.cpu().numpy().view(np.uint64))
        if wrong:
            raise SystemExit(f"segments {wrong[:5]} fail their checksum: no speed is reported")
    if not torch.equal(out.view(torch.int16), raw.view(torch.int16)):
        raise SystemExit("decoded bytes are wrong: no speed is reported")


def bench_schedules(raw: torch.Tensor, copy_gbps: float) -> list[Row]:
    out = torch.empty_like(raw)
    rows = []
    cases: list[tuple[str, list[Schedule]]] = [(str(s), [s]) for s in CANDIDATES]
    cases.append(("all of them in one launch", list(CANDIDATES)))
    for name, schedules in cases:
        encoded = [encode(raw, schedule) for schedule in schedules]
        slot = Slot([encoded[i % len(encoded)][i] for i in range(len(encoded[0]))], out)
        del encoded
        verified([slot], out, raw)
        ratio = slot.payload_bytes / raw.nbytes
        roofline = copy_gbps * 2 / (2 + 2 * ratio)
        for label, decoder in (("", GpuSplitZipDecoder()), (", no checksum", GpuSplitZipDecoder(checksum=False))):
            speed = timed(lambda slot=slot, decoder=decoder: slot.decode(decoder), raw.nbytes)
            rows.append(Row(f"decode {name}{label}", ratio, *speed, roofline))
            print(rows[-1], flush=True)
    return rows


def bench_small_tensors(count: int = 10_000, nbytes: int = 64 << 10) -> Row:
    """Many small tensors in slots of 16 MiB, one launch a slot."""
    raw = trained_weights(count, nbytes // 2, seed=2, device="cuda").view(-1)
    out = torch.empty_like(raw)
    segments = encode(raw, Schedule.parse((2, 2, 3)), nbytes // 2)
    slots, first = [], 0
    while first < count:
        last, size = first, 0
        while last < count and size + segments[last].size <= SLOT_BYTES:
            size += segments[last].size
            last += 1
        slots.append(Slot(segments[first:last], out[first * nbytes // 2 :]))
        first = last
    verified(slots, out, raw)
    if any(len(slot.table.launches) != 1 for slot in slots):
        raise SystemExit("a slot needed more than one launch")
    decoder = GpuSplitZipDecoder()
    speed = timed(lambda: [slot.decode(decoder) for slot in slots], raw.nbytes, repeats=20)
    ratio = sum(slot.payload_bytes for slot in slots) / raw.nbytes
    row = Row(f"decode {count} of 64 KiB, {len(slots)} launches", ratio, *speed, None)
    print(row, flush=True)
    return row


def goals(rows: Sequence[Row], small: Row, encoded: Sequence[gpu_encode.Row]) -> list[Goal]:
    """The numbers that matter, and what they are to be."""
    by_name = {row.name: row for row in rows}

    def share(schedule: str) -> float:
        row = by_name[f"decode {schedule}"]
        return row.gbps / (row.roofline or 1)

    def checksum_cost(schedule: str) -> float:
        return 1 - by_name[f"decode {schedule}"].gbps / by_name[f"decode {schedule}, no checksum"].gbps

    return [
        Goal("1. decode top16, of roofline", share("top16"), 0.93),
        Goal("1. decode 4, of roofline", share("4"), 0.85),
        Goal("2. decode 2,3, GB/s", by_name["decode 2,3"].gbps, 1800),
        Goal("2. decode 2,2,3, GB/s", by_name["decode 2,2,3"].gbps, 1400),
        Goal("2. cost of the checksum, 2,3", checksum_cost("2,3"), 0.05, at_most=True),
        Goal("2. cost of the checksum, 2,2,3", checksum_cost("2,2,3"), 0.05, at_most=True),
        Goal("3. decode 10,000 tensors of 64 KiB, GB/s", small.gbps, 300),
        Goal(f"4. {encoded[0].name}, GB/s", encoded[0].gbps, 300),
        Goal(f"4. {encoded[1].name}, GB/s", encoded[1].gbps, 300),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="raw MiB to decode")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    elements = options.megabytes << 19
    raw = trained_weights(elements // 4096, 4096, seed=0, device="cuda").view(-1)
    copy = copy_speed(raw)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.megabytes} MiB raw")
    print(f"{'device copy, read + write':42} {copy[0]:7.0f} ({copy[1]:.0f}-{copy[2]:.0f}) GB/s")
    print(f"{'':34} {'ratio':>7} {'raw bytes':>7} {'':20} of roofline")
    rows, small, encoded = bench_schedules(raw, copy[0]), bench_small_tensors(), gpu_encode.bench(raw)
    print(f"\n{'goal':48} {'found':>8}    wanted")
    for goal in goals(rows, small, encoded):
        print(goal)
    print(f"\n{CITED}")
    if options.json:
        found = [asdict(row) for row in (*rows, small, *encoded)]
        options.json.write_text(json.dumps({"copy_gbps": copy[0], "rows": found}, indent=1))


if __name__ == "__main__":
    main()
