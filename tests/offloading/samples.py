"""Models to offload, and caches of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from splitzip_aio.cache import build_cache

WIDTH = 64
BLOCKS = 6


class Block(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """Embedding, blocks, head; the head's weight is the embedding's."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.shift = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.register_buffer("places", torch.arange(8), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def network(seed: int = 0, **options: int) -> Network:
    """A network in BF16 with weights that differ from block to block."""
    torch.manual_seed(seed)
    model = Network(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.bfloat16().eval()


def ids() -> torch.Tensor:
    """What networks are called with."""
    return torch.arange(24).reshape(3, 8) * 2 % 50


def save(model: nn.Module, root: Path, *, segment_elements: int = 4096) -> Path:
    """The cache of a model's ``state_dict``; what is tied is in it under its first name."""
    root.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_model(model, str(root / "model.safetensors"))
    build_cache(root / "model.safetensors", root / "cache", segment_elements=segment_elements)
    return root / "cache"


def block_bytes(model: nn.Module) -> int:
    """What a block takes in an arena."""
    block = model.get_submodule("blocks.0")
    return sum(-(-parameter.nbytes // 256) * 256 for parameter in block.parameters())


@dataclass(frozen=True)
class Sample:
    """A cache, the network in it, and what that computes."""

    cache: Path
    model: Network
    expected: torch.Tensor

    @property
    def block_bytes(self) -> int:
        """What a block takes in an arena."""
        return block_bytes(self.model)

    def room_for(self, blocks: int) -> int:
        """``resident_bytes`` with room for so many blocks beside what is outside of them."""
        outside = [self.model.embed.weight, self.model.shift, self.model.norm.weight, self.model.norm.bias]
        return blocks * self.block_bytes + sum(-(-each.nbytes // 256) * 256 for each in outside)

    def fresh(self) -> Network:
        """The network once more."""
        return network()


def make_sample(root: Path) -> Sample:
    model = network()
    with torch.no_grad():
        return Sample(save(model, root), model, model(ids()))
