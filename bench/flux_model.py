"""A FLUX transformer with random weights of realistic exponents, its inputs, and what it must return."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

TOKENS, TEXT_TOKENS = 256, 128
SMALL = {"attention_head_dim": 64, "num_attention_heads": 6, "axes_dims_rope": (16, 24, 24), "joint_attention_dim": 512}
ORDERS = ("usual", "skip", "reversed")


@dataclass(frozen=True)
class Flux:
    """A model on disk: its shards' directory, its bytes, and its output in each order of blocks."""

    directory: Path
    nbytes: int
    expected: Mapping[str, torch.Tensor]
    inputs: Mapping[str, Any]
    resident_ms: float


def make(directory: Path, *, double: int = 4, single: int = 10, small: bool = False, seed: int = 0) -> Flux:
    """Make one on the GPU, save it, and run it there in each order."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    config = SMALL if small else {}
    with torch.device("cuda"):
        model = FluxTransformer2DModel(num_layers=double, num_single_layers=single, guidance_embeds=False, **config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # rows of a scale of their own, as training leaves them
                scale = 0.02 * torch.exp2(0.4 * torch.randn(parameter.shape[0], 1, device="cuda"))
                parameter.copy_(scale * torch.randn(parameter.shape, device="cuda"))
    model.save_pretrained(directory, max_shard_size="32MB" if small else "2GB")
    inputs = _inputs(model.config.joint_attention_dim)
    expected = {order: run(model, inputs, order).clone() for order in ORDERS}
    resident = _time(model, inputs)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return Flux(directory, nbytes, expected, inputs, resident)


def run(model: nn.Module, inputs: Mapping[str, Any], order: str = "usual") -> torch.Tensor:
    """One pass with the blocks in an order: as they are, without one of each kind, or from last to first."""
    lists = {name: getattr(model, name) for name in ("transformer_blocks", "single_transformer_blocks")}
    try:
        for name, blocks in lists.items():
            chosen = list(blocks)
            if order == "skip":
                del chosen[len(chosen) // 2]
            setattr(model, name, nn.ModuleList(chosen[::-1] if order == "reversed" else chosen))
        with torch.no_grad():
            return model(**inputs)[0]
    finally:
        for name, blocks in lists.items():
            setattr(model, name, blocks)


def _inputs(text_width: int) -> Mapping[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    return {
        "hidden_states": noise(1, TOKENS, 64),
        "encoder_hidden_states": noise(1, TEXT_TOKENS, text_width),
        "pooled_projections": noise(1, 768),
        "timestep": torch.tensor([0.5], device="cuda", dtype=torch.bfloat16),
        "img_ids": torch.zeros(TOKENS, 3, device="cuda"),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3, device="cuda"),
        "return_dict": False,
    }


def _time(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Milliseconds of a pass with all weights on the GPU; the best of five."""
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(model, inputs)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return best
