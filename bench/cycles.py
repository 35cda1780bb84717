"""Open, stream, close, again and again: does the process hold more at the end than at the start?

    python bench/cycles.py [--count 1000] [--device cuda]

Each cycle opens a transport with a host tier of its own, brings every layer, compares one with the source, and
closes. Counted after the first tenth, and at the end: descriptors, threads, page-locked bytes by the kernel's count,
resident memory, and GPU memory. In each cycle that count is compared with the bytes of the ring, if the statistics say
that the kernel has it registered: what is read into, or up to the whole ring, since the kernel counts whole folios and
the tables behind what is read into lie in the same ones. Exit status 1 if anything grew, or if those differ.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
from pathlib import Path

import anyio
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitzip_aio import open_transport
from splitzip_aio.cli.streaming import best_device
from tests.faults.seeded import make_sample
from tests.transport.samples import Sample

RSS_GROWTH = 16 << 20


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def held(device: torch.device) -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    gpu = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        gpu = torch.cuda.memory_reserved()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "page-locked": status("VmLck") + status("VmPin"),
        "resident": status("VmRSS"),
        "GPU": gpu,
    }


async def cycle(sample: Sample, device: torch.device, number: int) -> tuple[int, int, int]:
    """Bytes page-locked by the kernel's count beyond what was before, those of the ring that are read into, and all."""
    before = status("VmPin")
    async with open_transport(
        sample.root, device=device, ring_bytes="4MiB", arena_bytes="2MiB", host_cache_bytes="4MiB"
    ) as transport:
        for place, layer in enumerate(transport.layers):
            async with await transport.prefetch(layer) as lease:
                if place == number % len(transport.layers):
                    sample.check(layer, lease.tensors)
        statistics = transport.statistics()
        pinned = status("VmPin") - before
        payload_bytes = transport._parts.ring.payload_bytes  # tables, behind the payload, are not read into
    slots = statistics.ring.slots if statistics.io.fixed_buffers else 0
    return pinned, slots * payload_bytes, slots * statistics.ring.slot_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = best_device(options.device)
    with tempfile.TemporaryDirectory(prefix="splitzip-cycles-") as directory:
        sample = make_sample(Path(directory))
        start: dict[str, int] = {}
        for number in range(options.count):
            pinned, read_into, ring = anyio.run(cycle, sample, device, number)
            if ring and not read_into <= pinned <= ring:
                print(
                    f"cycle {number}: {pinned} bytes are page-locked, and the ring has {ring}, {read_into} to read into"
                )
                return 1
            if number == options.count // 10:
                start = held(device)
                print(
                    "start", start, f"in a cycle {pinned} page-locked, the ring has {read_into} to {ring}", flush=True
                )
        end = held(device)
    print("end  ", end)
    slack = {"resident": RSS_GROWTH}
    grown = [name for name in end if end[name] > start[name] + slack.get(name, 0)]
    print(f"{options.count} cycles on {device}: {'grew: ' + ', '.join(grown) if grown else 'nothing grew'}")
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
