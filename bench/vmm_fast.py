"""The vmm_fast route of diffusers-dynamic-offloader on a FLUX transformer: its native transport, and ours in its place.

    python bench/vmm_fast.py --dir /fast/disk [--json PATH] [--small] [--only floor,speed,order,budgets,leak]

Needs a CUDA GPU, diffusers, diffusers-dynamic-offloader and ddo-vmm-allocator (``pip install '.[ddo]'``). Cold means
that the page cache was dropped, which needs root. Every pass's output is compared, bit for bit, with that of the same
model held on the GPU. Ends with a line for each thing that is promised, and exit status 1 if one is not kept.

``--small`` makes a model of 90 MB, for running under ``compute-sanitizer``; its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flux_model import Flux, make, run

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.vmm_fast import SplitZipNativeShardTransport, enable_splitzip_fast_transport

GIB = 1 << 30
LEAK_PASSES = 200


@dataclass
class Report:
    """Numbers, and whether what was promised is kept."""

    numbers: dict[str, Any] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)

    def promise(self, text: str, kept: bool) -> None:
        self.promises[text] = bool(kept)
        print(f"{'kept  ' if kept else 'BROKEN'} {text}", flush=True)


class Bench:
    """The model, its caches, and how a pass is timed and checked."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report()
        self.scale = 1 / 64 if options.small else 1.0
        self.flux: Flux = make(options.dir / "flux", small=options.small, double=4, single=options.single)
        self.report.numbers |= {"model_bytes": self.flux.nbytes, "resident_ms": self.flux.resident_ms}
        print(f"{self.flux.nbytes / 1e9:.2f} GB, {self.flux.resident_ms:.1f} ms a pass when resident", flush=True)
        self.caches = {share: self._cache(share) for share in ("all", "half", "none")}

    def _cache(self, share: str) -> SplitZipShardCache:
        """All tensors, every other one, or none of them; those of a part are taught where the shards hold them."""
        root = self.options.dir / f"cache-{share}"
        if share == "all":
            report = build_cache(self.flux.directory, root, force=True)
            self.report.numbers["cache"] = {"ratio": report.ratio, "seconds": report.seconds}
            print(f"cache: ratio {report.ratio:.4f}, built in {report.seconds:.1f} s", flush=True)
            return SplitZipShardCache(root)
        from safetensors.torch import load_file, save_file

        tensors = sorted(open_checkpoint(self.flux.directory).tensors, key=lambda each: each.name)
        kept = {each.name: each for each in tensors[::2]} if share == "half" else {}
        parts: dict[str, torch.Tensor] = {} if kept else {"other": torch.zeros(8)}
        for shard in {each.file for each in kept.values()}:
            held = load_file(self.flux.directory / shard)
            parts |= {name: held[name].clone() for name, each in kept.items() if each.file == shard}
        part = self.options.dir / f"part-{share}.safetensors"
        save_file(parts, part)
        build_cache(part, root, force=True)
        part.unlink()
        cache = SplitZipShardCache(root)
        cache.alias_slices(
            (cache.tensors[each.name].key, each.file, each.offset, each.nbytes) for each in kept.values()
        )
        return cache

    @contextmanager
    def loaded(self, budget_gb: float) -> Iterator[Any]:
        """The model on the vmm_fast route, with its native transport."""
        from diffusers import FluxTransformer2DModel
        from diffusers_dynamic_offloader import DynamicOffloadConfig, from_pretrained_with_dynamic_offload

        config = DynamicOffloadConfig(
            execution_mode="vmm_fast_runtime",
            vmm_resident_weight_budget_gb=budget_gb * self.scale,
            vmm_staging_buffer_gb=0.5 * min(1.0, 8 * self.scale),
            vmm_native_transport=True,
        )
        loaded = from_pretrained_with_dynamic_offload(
            self.flux.directory,
            model_loader=FluxTransformer2DModel,
            torch_dtype=torch.bfloat16,
            dynamic_offload_config=config,
            apply_dynamic=True,
        )
        try:
            yield loaded
        finally:
            loaded.hook._close_vmm_store(loaded.module)
            del loaded
            gc.collect()
            torch.cuda.empty_cache()

    def enable(self, loaded: Any, share: str = "all", **options: Any) -> SplitZipNativeShardTransport:
        given = {"ring_bytes": self.options.ring_bytes, "group_bytes": self.options.group_bytes}
        if self.options.arena_bytes:
            given["arena_bytes"] = self.options.arena_bytes
        return enable_splitzip_fast_transport(loaded.hook, self.caches[share], **(given | options))

    def passes(
        self, name: str, loaded: Any, count: int, *, cold: bool = False, order: Callable[[int], str] | None = None
    ) -> list[float]:
        """Run passes; returns milliseconds. Each must return what the resident model does."""
        times = []
        for index in range(count):
            chosen = order(index) if order else "usual"
            if cold and index == 0:
                forget(loaded)
                drop_page_cache()
            torch.cuda.synchronize()
            start = time.perf_counter()
            output = run(loaded.module, self.flux.inputs, chosen)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            if not torch.equal(output, self.flux.expected[chosen]):
                self.report.promises[f"{name}: pass {index} equals the resident model's"] = False
                raise SystemExit(
                    f"{name}: pass {index} ({chosen}) differs from the resident model: no speed is reported"
                )
        shown = " ".join(f"{each:.0f}" for each in (times if len(times) <= 12 else [*times[:6], *times[-6:]]))
        print(f"{name:34} {shown} ms, equal", flush=True)
        self.report.numbers.setdefault("passes_ms", {})[name] = times
        return times

    def note(self, name: str, transport: SplitZipNativeShardTransport) -> None:
        """Keep a transport's statistics, and show where its time went."""
        stats = transport.statistics()
        self.report.numbers.setdefault("statistics", {})[name] = asdict(stats) | {"found_share": stats.found_share}
        spent = {key: round(value, 3) for key, value in asdict(stats.transport.time).items()}
        print(
            f"  uploads {stats.uploads}, groups {stats.demands}, foreseen {stats.foreseen}, "
            f"in the host tier {stats.host_share:.2f}, found {stats.found_share:.3f}; "
            f"waited {stats.waits} times, {stats.wait_s:.3f} s; {spent}",
            flush=True,
        )


def drop_page_cache() -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        print(f"the page cache cannot be dropped: {error}; cold passes are warm", flush=True)


def forget(loaded: Any) -> None:
    """Let the next pass upload everything, as the first one after attaching does."""
    for unit in loaded.hook._vmm_fast_adapter._execution_units:
        for binding in unit.tensors:
            binding.signature = None


def budgets(bench: Bench) -> None:
    """Equal at every budget, with all, half and none of the tensors in the cache; the native transport afterwards."""
    for budget in (0.5, 1.0, 3.0):
        with bench.loaded(budget) as loaded:
            for share in ("all", "half", "none"):
                with bench.enable(loaded, share) as transport:
                    forget(loaded)
                    bench.passes(f"{budget} GiB, {share} cached", loaded, 3)
                    bench.note(f"{budget} GiB, {share} cached", transport)
            inner = loaded.hook._vmm_fast_store._native_shard_transport
            bench.report.promise(
                f"at {budget} GiB every pass equals the resident model's, with all, half and none of it cached",
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
    with bench.loaded(1.0) as loaded:
        bench.passes("native, warming up", loaded, 2)
        store = loaded.hook._vmm_fast_store
        inner, store._native_shard_transport = store._native_shard_transport, Nothing(store._native_shard_transport)
        times = []
        for _ in range(bench.options.passes):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(loaded.module, bench.flux.inputs, "usual")
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        store._native_shard_transport = inner
        forget(loaded)
    bench.report.numbers["floor_ms"] = times
    print(f"nothing uploaded: {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})", flush=True)


def speed(bench: Bench) -> None:
    """Native and ours at 1 GiB, cold and warm, and with the host tier."""
    count = bench.options.passes
    with bench.loaded(1.0) as loaded:
        bench.passes("native, warming up", loaded, 1)
        native = bench.passes("native, cold, then warm", loaded, 1 + count, cold=True)
    with bench.loaded(1.0) as loaded:
        with bench.enable(loaded):
            bench.passes("ours, warming up", loaded, 2)  # kernels are compiled
        with bench.enable(loaded, io="direct") as transport:
            direct = bench.passes("ours, cold, past the page cache", loaded, 1, cold=True)
            bench.note("ours, cold, past the page cache", transport)
        with bench.enable(loaded) as transport:
            ours = bench.passes("ours, cold", loaded, 1, cold=True)
            bench.note("ours, cold", transport)
            transport.reset_stats()
            ours += bench.passes("ours, warm", loaded, count)
            bench.note("ours, warm", transport)
            found = transport.statistics().found_share
        with bench.enable(loaded, host_cache_bytes=bench.flux.nbytes) as transport:
            forget(loaded)
            bench.passes("ours, filling the host tier", loaded, 2)
            transport.reset_stats()
            host = bench.passes("ours, host tier", loaded, count)
            bench.note("ours, host tier", transport)
            host_found = transport.statistics().found_share
    warm, native_warm, host_warm = (statistics.median(each) for each in (ours[1:], native[1:], host))
    bench.report.numbers["speed"] = {
        "native_cold_ms": native[0],
        "native_warm_ms": native_warm,
        "cold_ms": ours[0],
        "cold_direct_ms": direct[0],
        "warm_ms": warm,
        "host_ms": host_warm,
        "warm_gbps": bench.flux.nbytes / warm / 1e6,
        "host_gbps": bench.flux.nbytes / host_warm / 1e6,
    }
    promise = bench.report.promise
    promise(f"cold {ours[0]:.0f} ms is 1.8 times faster than native {native[0]:.0f} ms", ours[0] * 1.8 <= native[0])
    promise(f"warm {warm:.0f} ms is 4 times faster than native {native_warm:.0f} ms", warm * 4 <= native_warm)
    promise(f"warm {warm:.0f} ms is at most 130 ms", warm <= 130)
    promise(f"with the host tier {host_warm:.0f} ms is at most 90 ms", host_warm <= 90)
    promise(f"from the second pass {found:.1%} were found, of at least 95%", found >= 0.95)
    promise(f"with the host tier {host_found:.1%} were found, of at least 95%", host_found >= 0.95)


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


def resources() -> dict[str, float]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    free, total = torch.cuda.mem_get_info()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(threading.enumerate()),
        "locked_kib": sum(int(fields[name].split()[0]) for name in ("VmLck", "VmPin")),
        "rss_mib": int(fields["VmRSS"].split()[0]) // 1024,
        "gpu_used_mib": (total - free) / (1 << 20),
    }


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "floor": floor,
    "speed": speed,
    "order": order,
    "budgets": budgets,
    "leak": leak,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a directory for some 15 GB, on the disk to measure")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--only", default=",".join(SECTIONS), help="which parts to run, of: %(default)s")
    parser.add_argument("--passes", type=int, default=8, help="warm passes (default: %(default)s)")
    parser.add_argument("--single", type=int, default=10, help="single blocks of the model (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="a model of 90 MB")
    parser.add_argument("--ring-bytes", default="256MiB")
    parser.add_argument("--group-bytes", default="96MiB")
    parser.add_argument("--arena-bytes", help="default: what enable_splitzip_fast_transport chooses")
    parser.add_argument(
        "--switch-interval", type=float, help="seconds a thread keeps Python to itself (default: 0.005)"
    )
    options = parser.parse_args()
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
