"""What the parts of bench/vmm_fast.py share: the model and its caches, passes that are timed and checked, resources."""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from flux_model import Flux, make, run

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.vmm_fast import SplitZipNativeShardTransport, enable_splitzip_fast_transport

SMALLEST_BUDGET_GB = 0.5


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
        self.report.numbers |= {"page_mb": options.page_mb, "page_bytes": {}}
        self.native_ms: dict[int, list[float]] = {}
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
    def loaded(self, budget_gb: float, page_mb: int | None = None) -> Iterator[Any]:
        """The model on the vmm_fast route, with its native transport; ``--page-mb`` unless another page is given."""
        from diffusers import FluxTransformer2DModel
        from diffusers_dynamic_offloader import DynamicOffloadConfig, from_pretrained_with_dynamic_offload

        page_mb = self.options.page_mb if page_mb is None else page_mb
        config = DynamicOffloadConfig(
            execution_mode="vmm_fast_runtime",
            vmm_resident_weight_budget_gb=budget_gb * self.scale,
            vmm_staging_buffer_gb=0.5 * min(1.0, 8 * self.scale),
            vmm_native_transport=True,
            vmm_page_mb=page_mb,
        )
        loaded = from_pretrained_with_dynamic_offload(
            self.flux.directory,
            model_loader=FluxTransformer2DModel,
            torch_dtype=torch.bfloat16,
            dynamic_offload_config=config,
            apply_dynamic=True,
        )
        try:
            self._note_page(loaded, page_mb)
            yield loaded
        finally:
            loaded.hook._close_vmm_store(loaded.module)
            del loaded
            gc.collect()
            torch.cuda.empty_cache()

    def _note_page(self, loaded: Any, page_mb: int) -> None:
        """That the allocator took the page that was asked for is not taken for granted."""
        found, seen = loaded.hook._vmm_fast_store.page_bytes, self.report.numbers["page_bytes"]
        if page_mb and found != page_mb << 20:
            raise SystemExit(f"asked for pages of {page_mb} MiB, found {found} bytes")
        if seen.setdefault(page_name(page_mb), None) is None:
            print(f"{page_name(page_mb)}: weights are mapped in pages of {found >> 20} MiB", flush=True)
        seen[page_name(page_mb)] = found

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
        print(f"{name:44} {shown} ms, equal", flush=True)
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


def page_name(page_mb: int) -> str:
    return f"page {page_mb} MiB" if page_mb else "default page"


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
