"""What decoding out of the page cache can reach on a CPU, without any pipeline: the limit for a stream there.

    python bench/page_cache.py --dir DIR [--gigabytes 0.6] [--repeats 9]

As many threads as there are cores take segment after segment, and

- ``decode``: decode them from memory where they lie already, which is what the others are compared with;
- ``read, decode``: read each into a place of its own first, as a stream reads into slots, and decode it there;
- ``read, decode, same place``: read each to where the thread read the one before, which stays in the core's caches;
- ``mapped``: decode them from a mapping of the file, as a stream does where the kernel lets it lease the file and lock
  its pages; without these, as here, a file that is cut short kills the process.

The ways take turns. Prints medians with the least and the most, and the share of decoding alone.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.cli.bench.measure import Times
from splitzip_aio.cli.bench.workload import Workload, load_into_page_cache, prepare
from splitzip_aio.cli.output import Output
from splitzip_aio.codec.cpu import decode_segment

Bytes = NDArray[np.uint8]


class Segment(NamedTuple):
    """Where it is in its pack and in memory, and where it goes."""

    pack: int
    offset: int
    nbytes: int
    place: int
    out: slice


class Ways:
    """The segments of a cache, and each way to decode one."""

    def __init__(self, workload: Workload) -> None:
        self.segments: list[Segment] = []
        place = end = 0
        with SplitZipShardCache(workload.cache) as cache:
            for entry in cache.tensors.values():
                for extent in entry.extents():
                    out = slice(end, end + (extent.stop - extent.start))
                    self.segments.append(Segment(entry.pack, extent.offset, extent.nbytes, place, out))
                    place += -(-extent.nbytes // 64) * 64
                    end += -(-(extent.stop - extent.start) // 256) * 256
            packs = [cache.pack_path(number) for number in range(len(cache.manifest.packs))]
        self.files = [os.open(path, os.O_RDONLY) for path in packs]
        self.maps = [np.frombuffer(mmap.mmap(file, 0, prot=mmap.PROT_READ), np.uint8) for file in self.files]
        self.out: Bytes = np.zeros(end, np.uint8)
        self.memory: Bytes = np.zeros(place, np.uint8)
        self.own = threading.local()
        for segment in self.segments:
            self._read(segment, self.memory[segment.place :])

    def decode(self, segment: Segment) -> None:
        self._decode(segment, self.memory[segment.place : segment.place + segment.nbytes])

    def read_and_decode(self, segment: Segment) -> None:
        self._decode(segment, self._read(segment, self.memory[segment.place :]))

    def read_to_the_same_place(self, segment: Segment) -> None:
        if not hasattr(self.own, "memory"):
            self.own.memory = np.zeros(max(each.nbytes for each in self.segments), np.uint8)
        self._decode(segment, self._read(segment, self.own.memory))

    def mapped(self, segment: Segment) -> None:
        self._decode(segment, self.maps[segment.pack][segment.offset : segment.offset + segment.nbytes])

    def _read(self, segment: Segment, memory: Bytes) -> Bytes:
        target = memory[: segment.nbytes]
        if os.preadv(self.files[segment.pack], [target.data], segment.offset) != segment.nbytes:
            raise SystemExit("a pack ended early")
        return target

    def _decode(self, segment: Segment, payload: Bytes) -> None:
        decode_segment(payload, self.out[segment.out], where="benchmark")


def timed(way: Callable[[Segment], None], segments: list[Segment]) -> float:
    """Seconds in which all segments are done by as many threads as there are cores."""
    waiting = iter(segments)

    def work() -> None:
        for segment in waiting:
            way(segment)

    threads = [threading.Thread(target=work) for _ in os.sched_getaffinity(0)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where to keep checkpoint and cache")
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    workload = prepare(
        options.dir,
        int(options.gigabytes * 1e9),
        checkpoint=None,
        device=torch.device("cpu"),
        output=Output(as_json=False),
    )
    load_into_page_cache(workload.packs)
    ways = Ways(workload)
    names: dict[str, Callable[[Segment], None]] = {
        "decode": ways.decode,
        "read, decode": ways.read_and_decode,
        "read, decode, same place": ways.read_to_the_same_place,
        "mapped": ways.mapped,
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.repeats + 1):
        for name, way in names.items():
            took = timed(way, ways.segments)
            if turn:  # the first compiles, and maps pages
                seconds[name].append(took)
    for name, each in seconds.items():
        times = Times.of(each)
        share = statistics.median([alone / took for alone, took in zip(seconds["decode"], each, strict=True)])
        print(f"{name:26} {times.median_s:.4f} s ({times.least_s:.4f}-{times.most_s:.4f}), {share:.2f} of decode alone")


if __name__ == "__main__":
    main()
