"""The CPU codec beside ZipNN 0.5.4, on the same bytes, with the same number of threads, in one run.

    pip install zipnn==0.5.4
    python bench/cpu_codec.py [--megabytes 32] [--repeats 21] [--threads 1 2] [--schedule 2,2,3]

Repetitions alternate between the two, so what else the machine does falls on both; a ratio is the median of the ratios
of neighbours. Ours counts everything that ``build`` and a checked read do: histogram, choice of the schedule, encoding
and digest; header check, decoding and checksum. It encodes and decodes in memory that is given, as ``build`` and the
pipeline do; ZipNN has no such call and allocates. Page faults are therefore a large part of its time, so there are two
tables: glibc as it is, and glibc told to keep what is freed, after which nothing here causes page faults. ZipNN's
``compress`` changes the buffer it is given, so each call gets its own copy, made outside the measured time.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.cli.synthetic import trained_weights
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.codec.segments import plan_segments, segment_spans

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
Bytes = NDArray[np.uint8]


class Ours:
    """Segments coded by the threads of a pool, each by one of them."""

    def __init__(self, data: Bytes, schedule: Schedule | None, threads: int) -> None:
        self.data, self.schedule = data, schedule
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self.out = np.empty_like(data)
        self.spans = list(segment_spans(data.size, BF16))
        self.rooms: dict[Schedule, list[Bytes]] = {}

    def map(self, work: Callable[..., Any], *parts: Iterable[Any]) -> list[Any]:
        return list(self.pool.map(work, *parts) if self.pool else map(work, *parts))

    def encode(self) -> list[Bytes]:
        parts = [self.data[start:stop] for start, stop in self.spans]
        histograms = self.map(lambda part: cpu.histogram(part, BF16), parts)
        plan = plan_segments(BF16, histograms, schedule=self.schedule)
        rooms = self.rooms_for(plan.schedule)
        encode = partial(cpu.encode_segment, fmt=BF16, schedule=plan.schedule, codebooks=plan.codebooks)
        return self.map(lambda part, room: encode(part, out=room), parts, rooms)

    def rooms_for(self, schedule: Schedule) -> list[Bytes]:
        """Memory for each segment, allocated when first asked for."""
        if schedule not in self.rooms:
            sizes = [cpu.encoding_room(stop - start, BF16, schedule) for start, stop in self.spans]
            self.rooms[schedule] = [cpu.coding_memory(size) for size in sizes]
        return self.rooms[schedule]

    def decode(self, segments: list[Bytes]) -> Bytes:
        outs = [self.out[start:stop] for start, stop in self.spans]
        self.map(lambda segment, out: cpu.decode_segment(segment, out, where="benchmark"), segments, outs)
        return self.out


@dataclass
class Pairs:
    """Seconds of ours and theirs, measured one after the other."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def measure(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
        self.ours.append(seconds(ours))
        self.theirs.append(seconds(theirs))

    def row(self, name: str, threads: int, size: int) -> str:
        ours, theirs = (size / float(np.median(times)) / 1e9 for times in (self.ours, self.theirs))
        low, ratio, high = np.quantile(np.array(self.theirs) / np.array(self.ours), [0.1, 0.5, 0.9])
        return f"{name:7} {threads:7} {ours:10.2f} {theirs:10.2f} {ratio:8.2f} ({low:.2f}-{high:.2f})"


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(data: Bytes, schedule: Schedule | None, threads: int, repeats: int) -> Iterable[str]:
    """Encode and decode both ways; bytes are compared before anything is timed."""
    from zipnn import ZipNN

    ours, zipnn = Ours(data, schedule, threads), ZipNN(bytearray_dtype="bfloat16", threads=threads)
    segments, packed = ours.encode(), zipnn.compress(bytearray(data))
    if not np.array_equal(ours.decode(segments), data) or bytes(zipnn.decompress(packed)) != data.tobytes():
        raise SystemExit("decoded bytes differ: no speed is worth printing")
    encode, decode = Pairs(), Pairs()
    for _ in range(repeats):
        encode.measure(ours.encode, partial(zipnn.compress, bytearray(data)))
        decode.measure(partial(ours.decode, segments), partial(zipnn.decompress, packed))
    yield encode.row("encode", threads, data.size)
    yield decode.row("decode", threads, data.size)
    sizes = sum(segment.size for segment in segments) / data.size, len(packed) / data.size
    yield f"{'ratio':15} {sizes[0]:10.4f} {sizes[1]:10.4f}"


def keep_freed_memory() -> None:
    """Have glibc keep what is freed instead of returning it to the system."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def print_table(title: str, data: Bytes, options: argparse.Namespace) -> None:
    print(f"\n{title}\n{'':7} {'threads':>7} {'ours':>10} {'ZipNN':>10} {'faster':>8}")
    for threads in options.threads:
        for row in compare(data, options.schedule, threads, options.repeats):
            print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description="The CPU codec beside ZipNN.")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--schedule", type=Schedule.parse, help="instead of the one with the fewest bytes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = trained_weights(options.megabytes << 9, 1024, seed=0).view(torch.uint8).numpy().reshape(-1)
    data = cpu.coding_memory(weights.size)  # where builds read to
    data[:] = weights
    print(f"{cpu.implementation()}; {data.size >> 20} MiB of BF16; GB/s of raw bytes, medians of {options.repeats};")
    print("faster: median of neighbours, and from the 10th to the 90th percentile")
    print_table("glibc as it is", data, options)
    keep_freed_memory()
    print_table("freed memory kept", data, options)


if __name__ == "__main__":
    main()
