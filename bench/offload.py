"""Models that do not fit, and checkpoints that are loaded: ours beside what one would take otherwise, on a GPU.

    python bench/offload.py --part flux --dir /mnt/nvme --picture docs/img/offload.png
    python bench/offload.py --part llama
    python bench/offload.py --part load

``flux`` and ``llama`` are ``splitzip-aio bench offload`` with these models (and need diffusers, or transformers, and
accelerate); ``load`` is ``load_file`` beside other loaders of safetensors, with every tensor compared before anything
is timed. All other options are those of ``splitzip-aio bench offload``; ``load`` knows ``--dir``, ``--gigabytes``,
``--device``, ``--repeats`` and ``--json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitzip_aio import load_file
from splitzip_aio.cli.bench.commands import bench
from splitzip_aio.cli.bench.measure import Times
from splitzip_aio.cli.bench.peers import PEERS
from splitzip_aio.cli.bench.workload import Workload, drop_from_page_cache, load_into_page_cache, prepare
from splitzip_aio.cli.output import Output
from splitzip_aio.cli.streaming import best_device

Load = Callable[[], Mapping[str, torch.Tensor]]


def loaders(workload: Workload, device: torch.device) -> dict[str, Load]:
    """Ours, and those of the others that are installed."""
    found: dict[str, Load] = {"splitzip_aio.load_file": lambda: load_file(workload.cache, device)}
    for peer in PEERS:
        if peer.version is not None and (device.type == "cuda" or not peer.gpu_only):
            found[f"{peer.name} {peer.version}"] = lambda peer=peer: peer.load(workload.files, device)
    return found


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [name for name, tensor in expected.items() if not torch.equal(bits(found[name]), bits(tensor))]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def timed(load: Load, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    tensors = load()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    del tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


def compare_loaders(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="load_file beside other loaders")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--gigabytes", type=float, default=5.9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    device, output = best_device(options.device), Output(as_json=options.json)
    with tempfile.TemporaryDirectory(prefix="splitzip-bench-") as scratch:
        directory = options.dir or Path(scratch)
        workload = prepare(directory, int(options.gigabytes * 1e9), checkpoint=None, device=device, output=output)
        rows = measure(workload, device, options.repeats, output)
    if options.json:
        print(json.dumps({"raw_bytes": workload.raw_bytes, "ratio": workload.ratio, "rows": rows}, indent=2))
        return
    output.table(
        ("loader", "from", "seconds", "least", "most", "model GB/s"),
        [
            (row["loader"], row["from"], *(f"{row[key]:.3f}" for key in ("median_s", "least_s", "most_s", "gbps")))
            for row in rows
        ],
    )


def measure(workload: Workload, device: torch.device, repeats: int, output: Output) -> list[dict[str, object]]:
    """Compare what each brings with what safetensors does, then time them in turns."""
    contenders = loaders(workload, device)
    expected = next(load for name, load in contenders.items() if name.startswith("safetensors"))()
    for name, load in list(contenders.items()):
        output.note(f"verify every byte of {name}")
        try:
            wrong = differences(load(), expected)
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is a result, not a failure of the comparison
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong and name.startswith("splitzip"):
            raise SystemExit(f"{name}: wrong, so no speed is reported: {wrong[:3]}")
        if wrong:
            output.note(f"{name}: left out: {wrong[:3]}")
            del contenders[name]
    del expected
    seconds: dict[tuple[str, str], list[float]] = {}
    files = [*workload.files, *workload.packs]
    for where in ("disk", "page cache"):
        load_into_page_cache(files)
        for _ in range(repeats):
            for name, load in contenders.items():
                if where == "disk":
                    drop_from_page_cache(files)
                seconds.setdefault((name, where), []).append(timed(load, device))
    rows: list[dict[str, object]] = []
    for (name, where), each in seconds.items():
        times = Times.of(each)
        row = {"loader": name, "from": where, "median_s": times.median_s, "least_s": times.least_s}
        rows.append(row | {"most_s": times.most_s, "gbps": times.rate(workload.raw_bytes)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["flux", "llama", "plain", "load"], required=True)
    options, rest = parser.parse_known_args()
    if options.part == "load":
        compare_loaders(rest)
    else:
        bench(["offload", "--model", options.part, *rest], prog_name="bench")


if __name__ == "__main__":
    main()
