"""How fast a GPU encodes BF16 weights: counting, planning on the host and encoding, without copies to the host.

    python bench/gpu_encode.py [--megabytes 512] [--json PATH]

The payload of every row is compared with the CPU's, byte for byte, before it is timed. A time is from before the call
until the device is done, so it has the host's part in it: the choice of schedule, the table and its upload.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from splitzip_aio.cli.synthetic import trained_weights
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import BF16
from splitzip_aio.codec.gpu_encode import GpuSplitZipEncoder
from splitzip_aio.codec.schedule import CANDIDATES
from splitzip_aio.codec.segments import segment_spans

REPEATS = 30
IN_A_ROW = 8


@dataclass(frozen=True)
class Row:
    """One measurement: ``gbps`` of raw bytes, with its 10th and 90th percentile."""

    name: str
    ratio: float
    gbps: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name:34} {self.ratio:7.4f} {self.gbps:7.0f} ({self.low:.0f}-{self.high:.0f}) GB/s"


def verified(encoder: GpuSplitZipEncoder, raw: torch.Tensor, schedule: str | None) -> tuple[str, float]:
    """Encode once; refuse to go on unless every byte is the CPU's. Returns the schedule and the ratio."""
    payload, meta = encoder.encode(raw, schedule=schedule)
    data = raw.cpu().view(torch.uint8).numpy()
    codebooks = meta.codebook.for_schedule(meta.schedule) if meta.codebook else ()
    ends = np.cumsum(meta.segments)

    def same(place: int, span: tuple[int, int]) -> bool:
        expected = cpu.encode_segment(data[slice(*span)], BF16, meta.schedule, codebooks)
        return np.array_equal(payload.numpy()[ends[place] - meta.segments[place] : ends[place]], expected)

    with ThreadPoolExecutor() as pool:
        if not all(pool.map(same, range(len(ends)), segment_spans(data.size, BF16))):
            raise SystemExit(f"{meta.schedule}: the payload is not the CPU's: no speed is reported")
    return str(meta.schedule), meta.ratio


def spread(nbytes: int, seconds: list[float]) -> tuple[float, float, float]:
    """GB/s as median, 10th and 90th percentile, of all but the first five times."""
    gbps = nbytes / np.array(seconds[5:]) / 1e9
    return float(np.median(gbps)), float(np.percentile(gbps, 10)), float(np.percentile(gbps, 90))


def timed(encoder: GpuSplitZipEncoder, raw: torch.Tensor, schedule: str | None) -> tuple[float, float, float]:
    """Speed of one call after another, the device idle in between."""
    seconds = []
    for _ in range(REPEATS + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        encoder.encode_on_device([raw], schedule=schedule)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return spread(raw.nbytes, seconds)


def timed_in_a_row(encoder: GpuSplitZipEncoder, raw: torch.Tensor) -> tuple[float, float, float]:
    """Speed in the middle of a build: batches follow each other, and each is planned while the next one is counted."""
    seconds = []
    for _ in range(REPEATS + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for payloads in encoder.encode_on_device_each([raw] for _ in range(IN_A_ROW)):
            del payloads
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / IN_A_ROW)
    return spread(raw.nbytes, seconds)


def bench(raw: torch.Tensor) -> list[Row]:
    encoder = GpuSplitZipEncoder(raw.device)
    rows = []
    for schedule in (None, *map(str, CANDIDATES)):
        found, ratio = verified(encoder, raw, schedule)
        name = f"encode, choice of {found}" if schedule is None else f"encode {found}"
        rows.append(Row(name, ratio, *timed(encoder, raw, schedule)))
        print(rows[-1], flush=True)
        if schedule is None:
            rows.append(Row(f"{name}, batch after batch", ratio, *timed_in_a_row(encoder, raw)))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="raw MiB to encode")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    options = parser.parse_args()
    elements = options.megabytes << 19
    raw = trained_weights(elements // 4096, 4096, seed=0, device="cuda").view(-1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.megabytes} MiB raw", flush=True)
    rows = bench(raw)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
