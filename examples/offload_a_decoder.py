"""Generate with a decoder that has a quarter of its weights' bytes to live in.

    python examples/offload_a_decoder.py [--device cuda] [--width 2048] [--blocks 24]

Makes a decoder in plain torch with random weights, compresses it, and compares what the offloaded one says with what
the whole one does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn

import splitzip_aio

VOCABULARY = 1000


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        query, key, value = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Embedding, blocks, and the embedding again as head."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after the last."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, -1]) @ self.embed.weight.T


def generate(model: nn.Module, device: str, count: int = 12) -> list[int]:
    """The likeliest tokens after 1, 2, 3."""
    tokens = torch.tensor([[1, 2, 3]], device=device)
    with torch.inference_mode():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens).argmax(-1, keepdim=True)], 1)
    return tokens[0].tolist()


def main() -> None:
    """Make, compress, offload, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Decoder(options.width, options.blocks).bfloat16().eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as scratch:
        save_model(model, str(Path(scratch) / "model.safetensors"))
        report = splitzip_aio.build_cache(Path(scratch) / "model.safetensors", Path(scratch) / "cache")
        print(f"{nbytes / 1e6:.1f} MB of weights, {report.ratio:.3f} of that compressed")
        expected = generate(model.to(options.device), options.device)
        model = splitzip_aio.offload(model, Path(scratch) / "cache", device=options.device, resident_bytes=nbytes // 4)
        began = time.perf_counter()
        tokens = generate(model, options.device)
        seconds = time.perf_counter() - began
        found = splitzip_aio.offload_statistics(model)
        print(
            f"{len(found.resident)} units stay, {len(found.rotating)} take turns in {found.window_bytes / 1e6:.1f} MB"
        )
        print(f"{len(tokens) - 3} tokens in {seconds:.2f} s, of which {found.wait_s:.2f} s waiting for weights")
        print("same tokens as the whole model:", tokens == expected)
        splitzip_aio.detach(model)


if __name__ == "__main__":
    main()
