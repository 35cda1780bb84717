"""What a stream to a GPU costs its event loop, and how long others wait for it, without a GPU.

    python bench/event_loop.py --dir DIR [--tier page-cache] [--call-us 120] [--link-gbps 54.7]

Everything is what streams to a GPU but the device: a copy takes as long as ``--link-gbps`` make it, and the calls for a
slot keep the event loop for ``--call-us``. No byte is moved to the arena, or right there. A task sleeps for 10 ms again
and again meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import anyio
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitzip_aio.abc import PlannedRead
from splitzip_aio.cli.bench.passes import Streamer, Tier
from splitzip_aio.cli.bench.workload import prepare
from splitzip_aio.cli.output import Output
from splitzip_aio.host_cache import HostCache
from splitzip_aio.transport import opening
from splitzip_aio.units import parse_bytes
from tests.simulated import SimulatedCudaArena

DECODE_S = 0.0001


def device(call_s: float, link_bytes_s: float) -> type[SimulatedCudaArena]:
    """An arena whose calls and copies take so long."""

    class Device(SimulatedCudaArena):
        moves = False

        def _stages(self, read: PlannedRead) -> tuple[float, float]:
            until = time.perf_counter() + call_s
            while time.perf_counter() < until:
                pass
            return read.nbytes / link_bytes_s, DECODE_S

    return Device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--ring", default="128MiB")
    parser.add_argument("--tier", choices=("page-cache", "host-tier"), default="host-tier")
    parser.add_argument("--call-us", type=float, default=120)
    parser.add_argument("--link-gbps", type=float, default=54.7)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    cpu, output, tier = torch.device("cpu"), Output(as_json=False), Tier(options.tier.replace("-", " "))
    opening.HostArena = device(options.call_us / 1e6, options.link_gbps * 1e9)  # type: ignore[misc,assignment]
    workload = prepare(options.dir, int(options.gigabytes * 1e9), checkpoint=None, device=cpu, output=output)
    ring_bytes = parse_bytes(options.ring, name="--ring")
    with HostCache(workload.compressed_bytes + (400 << 20)) as host:
        streamer = Streamer(workload, cpu, ring_bytes, workload.raw_bytes // 2, host)
        with streamer.open(tier) as passes:
            streamer.ready(tier)
            passes.run()
            naps: list[float] = []
            before, began = passes.run().after, time.perf_counter()

            async def nap() -> None:
                used = time.thread_time()
                try:
                    while True:
                        start = time.perf_counter()
                        await anyio.sleep(0.010)
                        naps.append(time.perf_counter() - start - 0.010)
                finally:
                    busy.append(time.thread_time() - used)

            busy: list[float] = []
            passes.run_beside(nap, options.seconds)
            took = time.perf_counter() - began
            after = passes.run().before
    slots = after.ring.acquired - before.ring.acquired
    decoded = after.decoded_bytes - before.decoded_bytes
    median, tenth, hundredth = (np.percentile(naps, (50, 90, 99)) * 1e3).tolist()
    output.line(
        f"{tier.value}: {decoded / took / 1e9:.1f} GB/s of model, {slots} slots, {busy[0] / slots * 1e6:.0f} us of the "
        f"event loop each, busy for {busy[0] / took:.2f} of the time; a task sleeping 10 ms woke {median:.2f} ms late, "
        f"{tenth:.2f} at the 90th percentile, {hundredth:.2f} at the 99th"
    )


if __name__ == "__main__":
    main()
