"""A FLUX transformer under a budget of GPU memory, its weights streamed from a compressed cache.

    python examples/ddo_flux.py FLUX.1-schnell/transformer cache/ [--budget-gb 4] [--steps 4]

``FLUX.1-schnell/transformer`` is the directory of the transformer's safetensors files; ``cache/`` is made of it the
first time. Prints how long each step took, with the native transport and with the cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers_dynamic_offloader import DynamicOffloadConfig, from_pretrained_with_dynamic_offload

from splitzip_aio import build_cache
from splitzip_aio.vmm_fast import enable_splitzip_fast_transport


def load(directory: Path, budget_gb: float) -> Any:
    """The transformer on the vmm_fast route: at most ``budget_gb`` of its weights on the GPU at a time."""
    config = DynamicOffloadConfig(
        execution_mode="vmm_fast_runtime",
        vmm_resident_weight_budget_gb=budget_gb,
        vmm_staging_buffer_gb=0.5,
        vmm_native_transport=True,  # what the cache takes the place of
        vmm_page_mb=64 if budget_gb >= 1 else 0,  # mapping a page takes as long whatever its size; 0 is 2 MiB
    )
    return from_pretrained_with_dynamic_offload(
        directory,
        model_loader=FluxTransformer2DModel,
        torch_dtype=torch.bfloat16,
        dynamic_offload_config=config,
        apply_dynamic=True,
    )


def inputs(transformer: Any) -> dict[str, Any]:
    """Noise in place of an image and a prompt."""
    config = transformer.config
    generator = torch.Generator(device="cuda").manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    given = {
        "hidden_states": noise(1, 1024, config.in_channels),
        "encoder_hidden_states": noise(1, 256, config.joint_attention_dim),
        "pooled_projections": noise(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5], device="cuda", dtype=torch.bfloat16),
        "img_ids": torch.zeros(1024, 3, device="cuda"),
        "txt_ids": torch.zeros(256, 3, device="cuda"),
        "return_dict": False,
    }
    if config.guidance_embeds:
        given["guidance"] = torch.tensor([3.5], device="cuda", dtype=torch.bfloat16)
    return given


def steps(name: str, transformer: Any, count: int) -> torch.Tensor:
    """Run some steps; returns the last one's output."""
    given = inputs(transformer)
    for number in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            output = transformer(**given)[0]
        torch.cuda.synchronize()
        print(f"{name}, step {number}: {(time.perf_counter() - start) * 1e3:.0f} ms")
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--budget-gb", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    package = Path(importlib.util.find_spec("ddo_vmm_allocator").origin).parent
    os.environ.setdefault("DDO_VMM_LIBRARY_PATH", str(package / "native" / "linux" / "libddo_vmm.so"))

    if not (options.cache / "manifest.json").exists():
        print(f"cache: {build_cache(options.checkpoint, options.cache).ratio:.3f} of the checkpoint's size")
    loaded = load(options.checkpoint, options.budget_gb)
    expected = steps("native", loaded.module, options.steps)
    with enable_splitzip_fast_transport(loaded.hook, options.cache) as transport:
        found = steps("cache", loaded.module, options.steps)
        print(f"{transport.statistics().found_share:.1%} of the weights were there or on their way when asked for")
    print("outputs are equal" if torch.equal(found, expected) else "outputs differ")


if __name__ == "__main__":
    main()
