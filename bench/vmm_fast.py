"""The vmm_fast route of diffusers-dynamic-offloader on a FLUX transformer: its native transport, and ours in its place.

    python bench/vmm_fast.py --dir /fast/disk [--json PATH] [--small] [--only floor,speed,order,budgets,leak]
        [--page-mb 64] [--pages 0,64]

Needs a CUDA GPU, diffusers, diffusers-dynamic-offloader and ddo-vmm-allocator (``pip install '.[ddo]'``). Cold means
that the page cache was dropped, which needs root. Every pass's output is compared, bit for bit, with that of the same
model held on the GPU. Ends with a line for each thing that is promised, and exit status 1 if one is not kept.

``--page-mb`` is the consumer's ``vmm_page_mb``: the size of the pages in which its allocator maps weights, for both
transports. With any but the allocator's own (0), native is timed with that as well, and promises are judged by it.

``--small`` makes a model of 90 MB, for running under ``compute-sanitizer``; its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flux_model import run
from vmm_bench import SMALLEST_BUDGET_GB, Bench, Report, forget, page_name, resources

from splitzip_aio.vmm_fast import SplitZipNativeShardTransport

LEAK_PASSES = 200


def budgets(bench: Bench) -> None:
    """Equal at every budget, with all, half and none of the tensors in the cache; the native transport afterwards."""
    for budget in (SMALLEST_BUDGET_GB, 1.0, 3.0):
        with bench.loaded(budget) as loaded:
            for share in ("all", "half", "none"):
                with bench.enable(loaded, share) as transport:
                    forget(loaded)
                    bench.passes(f"{budget} GiB, {share} cached", loaded, 3)
                    bench.note(f"{budget} GiB, {share} cached", transport)
            inner = loaded.hook._vmm_fast_store._native_shard_transport
            bench.report.promise(
                f"at {budget} GiB, {page_name(bench.options.page_mb)}, every pass equals the resident model's, "
                "with all, half and none of it cached",
                not isinstance(inner, SplitZipNativeShardTransport),
            )
            bench.passes(f"{budget} GiB, native again", loaded, 2)


class Nothing:
    """Stands in for a transport, and uploads nothing: what remains of a pass is the consumer's own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def upload_batch(self, bindings: Any, native: Any, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def floor(bench: Bench) -> None:
    """What a pass at 1 GiB takes if weights need no time at all; its output is wrong, and not looked at."""
    for page_mb in bench.options.pages:
        page = page_name(page_mb)
        with bench.loaded(1.0, page_mb) as loaded:
            bench.passes(f"{page}: native, warming up", loaded, 2)
            store, times = loaded.hook._vmm_fast_store, []
            inner, store._native_shard_transport = store._native_shard_transport, Nothing(store._native_shard_transport)
            before = store.native.residency_counters["materialized_pages"]
            for _ in range(bench.options.passes):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run(loaded.module, bench.flux.inputs, "usual")
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) * 1e3)
            mapped = (store.native.residency_counters["materialized_pages"] - before) // bench.options.passes
            store._native_shard_transport = inner
            forget(loaded)
        bench.report.numbers.setdefault("floor", {})[page] = {"ms": times, "pages_mapped_a_pass": mapped}
        spread = f"{statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})"
        print(f"{page}: nothing uploaded: {spread}, {mapped} pages mapped a pass", flush=True)


def speed(bench: Bench) -> None:
    """Native and ours at 1 GiB, cold and warm, and with the host tier; for each page size."""
    for page_mb in bench.options.pages:
        page, found = page_name(page_mb), {}
        native, default = native_passes(bench, page_mb), native_passes(bench, 0)
        for name, times in (("native", native), ("default_page_native", default)):
            found |= {f"{name}_cold_ms": times[0], f"{name}_warm_ms": statistics.median(times[1:])}
        found |= our_passes(bench, page_mb)
        found |= {f"{tier}_gbps": bench.flux.nbytes / found[f"{tier}_ms"] / 1e6 for tier in ("warm", "host")}
        bench.report.numbers.setdefault("speed", {})[page] = found
        judge(bench.report, page, found)
        for name, of in (("native", "of the same page"), ("default_page_native", "of the default page")):
            cold, warm = (found[f"{name}_{state}_ms"] for state in ("cold", "warm"))
            gained = f"{cold / found['cold_ms']:.2f} and {warm / found['warm_ms']:.2f} times as fast"
            print(f"{page}: native {of} took {cold:.0f} ms cold, {warm:.0f} warm; ours is {gained}", flush=True)


def native_passes(bench: Bench, page_mb: int) -> list[float]:
    """A cold pass, then warm ones; measured once for each page size."""
    if page_mb not in bench.native_ms:
        with bench.loaded(1.0, page_mb) as loaded:
            page, count = page_name(page_mb), 1 + bench.options.passes
            bench.passes(f"{page}: native, warming up", loaded, 1)
            bench.native_ms[page_mb] = bench.passes(f"{page}: native, cold, then warm", loaded, count, cold=True)
    return bench.native_ms[page_mb]


def our_passes(bench: Bench, page_mb: int) -> dict[str, float]:
    page, count, found = page_name(page_mb), bench.options.passes, {}
    with bench.loaded(1.0, page_mb) as loaded:
        with bench.enable(loaded):
            bench.passes(f"{page}: ours, warming up", loaded, 2)  # kernels are compiled
        with bench.enable(loaded, io="direct") as transport:
            name = f"{page}: ours, cold, past the page cache"
            found["cold_direct_ms"] = bench.passes(name, loaded, 1, cold=True)[0]
            bench.note(name, transport)
        with bench.enable(loaded) as transport:
            found["cold_ms"] = bench.passes(f"{page}: ours, cold", loaded, 1, cold=True)[0]
            bench.note(f"{page}: ours, cold", transport)
            transport.reset_stats()
            found["warm_ms"] = statistics.median(bench.passes(f"{page}: ours, warm", loaded, count))
            bench.note(f"{page}: ours, warm", transport)
            found["warm_found"] = transport.statistics().found_share
        with bench.enable(loaded, host_cache_bytes=bench.flux.nbytes) as transport:
            forget(loaded)
            bench.passes(f"{page}: ours, filling the host tier", loaded, 2)
            transport.reset_stats()
            found["host_ms"] = statistics.median(bench.passes(f"{page}: ours, host tier", loaded, count))
            bench.note(f"{page}: ours, host tier", transport)
            found["host_found"] = transport.statistics().found_share
    return found


def judge(report: Report, page: str, found: dict[str, float]) -> None:
    """What is promised beside native as it comes, with the allocator's own page.

    With a page of 64 MiB native is so much faster that the compressed bytes alone would take a link of 55 GB/s longer
    than a quarter of its time.
    """
    cold, warm, host = (found[f"{name}_ms"] for name in ("cold", "warm", "host"))
    native, native_warm = found["default_page_native_cold_ms"], found["default_page_native_warm_ms"]
    for text, kept in (
        (f"cold {cold:.0f} ms is 1.8 times faster than native {native:.0f} ms", cold * 1.8 <= native),
        (f"warm {warm:.0f} ms is 4 times faster than native {native_warm:.0f} ms", warm * 4 <= native_warm),
        (f"warm {warm:.0f} ms is at most 130 ms", warm <= 130),
        (f"with the host tier {host:.0f} ms is at most 90 ms", host <= 90),
        (f"from the second pass {found['warm_found']:.1%} were found, of at least 95%", found["warm_found"] >= 0.95),
        (f"with the host tier {found['host_found']:.1%} were found, of at least 95%", found["host_found"] >= 0.95),
    ):
        report.promise(f"{page}: {text}", kept)


def order(bench: Bench) -> None:
    """A block left out on alternate passes, and the order reversed."""
    with bench.loaded(1.0) as loaded, bench.enable(loaded) as transport:
        usual = statistics.median(bench.passes("in order", loaded, 8)[2:])
        skipping = bench.passes(
            "a block left out, every other time", loaded, 8, order=lambda n: ("usual", "skip")[n % 2]
        )
        back = bench.passes("reversed", loaded, 6, order=lambda _: "reversed")
        turning = bench.passes("forth and back", loaded, 8, order=lambda n: ("usual", "reversed")[n % 2])
        bench.note("out of order", transport)
    bench.report.numbers["order_ms"] = {"usual": usual, "skip": skipping, "reversed": back, "turning": turning}
    for name, times in (("leaving a block out", skipping[2:]), ("reversed", back[1:]), ("forth and back", turning[2:])):
        took = statistics.median(times)
        bench.report.promise(f"{name}: {took:.0f} ms is within twice the {usual:.0f} ms in order", took <= 2 * usual)


def leak(bench: Bench) -> None:
    """Memory and descriptors over 200 passes, and after closing."""
    with bench.loaded(1.0) as loaded:
        bench.passes("native before", loaded, 2)
        before = resources()
        transport = bench.enable(loaded, host_cache_bytes=bench.flux.nbytes // 2)
        bench.passes("until everything is in place", loaded, 20)
        start = resources()
        bench.passes(f"{LEAK_PASSES} passes", loaded, LEAK_PASSES)
        end = resources()
        transport.close()
        del transport
        after = resources()
        bench.passes("native after", loaded, 2)
    bench.report.numbers["resources"] = {"before": before, "start": start, "end": end, "after": after}
    print(f"  before {before}\n  start  {start}\n  end    {end}\n  after  {after}", flush=True)
    promise = bench.report.promise
    promise("descriptors stay", start["fds"] == end["fds"])
    promise("page-locked memory stays", start["locked_kib"] == end["locked_kib"])
    promise("GPU memory stays, within 4 MiB", abs(start["gpu_used_mib"] - end["gpu_used_mib"]) <= 4)
    promise("memory stays, within 64 MiB", end["rss_mib"] - start["rss_mib"] <= 64)
    promise(
        "closing gives descriptors and threads back",
        (before["fds"], before["threads"]) == (after["fds"], after["threads"]),
    )
    promise("closing gives GPU memory back, within 64 MiB", after["gpu_used_mib"] - before["gpu_used_mib"] <= 64)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "floor": floor,
    "speed": speed,
    "order": order,
    "budgets": budgets,
    "leak": leak,
}


def page_option(text: str) -> int:
    value = int(text)
    if value < 0 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"expected 0 or a power of two, which addresses are aligned to; found {value}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a directory for some 15 GB, on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--only", default=",".join(SECTIONS), help="which parts to run, of: %(default)s")
    parser.add_argument("--passes", type=int, default=8, help="warm passes (default: %(default)s)")
    parser.add_argument("--single", type=int, default=10, help="single blocks of the model (default: %(default)s)")
    parser.add_argument("--page-mb", type=page_option, default=0, help="0 is the allocator's own choice (default)")
    parser.add_argument(
        "--pages",
        type=lambda text: [page_option(each) for each in text.split(",")],
        help="run floor and speed with each of these in place of --page-mb",
    )
    parser.add_argument("--small", action="store_true", help="a model of 90 MB")
    parser.add_argument("--ring-bytes", default="256MiB")
    parser.add_argument("--group-bytes", default="176MiB")
    parser.add_argument("--arena-bytes", help="default: what enable_splitzip_fast_transport chooses")
    parser.add_argument(
        "--switch-interval", type=float, help="seconds a thread keeps Python to itself (default: 0.005)"
    )
    options = parser.parse_args()
    options.pages = options.pages or [options.page_mb]
    most = int(SMALLEST_BUDGET_GB * 1024 * (1 / 64 if options.small else 1))
    if max(options.page_mb, *options.pages) > most:
        parser.error(f"a page must fit the smallest budget, {most} MiB")
    if options.switch_interval:
        sys.setswitchinterval(options.switch_interval)
    package = Path(importlib.util.find_spec("ddo_vmm_allocator").origin).parent
    os.environ.setdefault("DDO_VMM_LIBRARY_PATH", str(package / "native" / "linux" / "libddo_vmm.so"))
    options.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    try:
        for name in options.only.split(","):
            print(f"== {name}", flush=True)
            SECTIONS[name](bench)
    finally:
        if options.json:
            options.json.write_text(json.dumps(asdict(bench.report), indent=1, default=str))
    print("\n== promises")
    for text, kept in bench.report.promises.items():
        print(f"{'kept  ' if kept else 'BROKEN'} {text}")
    return 0 if all(bench.report.promises.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
