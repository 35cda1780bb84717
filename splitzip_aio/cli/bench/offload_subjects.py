"""Models to offload in a benchmark: real architectures, weights made up as training leaves them, inputs from a seed."""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from splitzip_aio.cli.bench.passes import Tier
from splitzip_aio.cli.synthetic import trained_weights

__all__ = ["SUBJECTS", "FluxTransformer", "LlamaDecoder", "PlainDecoder", "Subject"]


class Subject(ABC):
    """A model that can be made, loaded and run.

    Attributes:
        name: how it is asked for.
        package: what it is made with, beside torch; None if nothing.
        unit: what one run is called.
        gigabytes: its size in BF16 if none is given, on a GPU and on the CPU.
        resident_share: what part of it is to stay on the device.
        slow_share: what part of a run is asked of peers, where a whole one would take minutes.
        tiers: where weights are kept, if nothing else is asked for.
    """

    name: ClassVar[str]
    package: ClassVar[str | None] = None
    unit: ClassVar[str] = "pass"
    gigabytes: ClassVar[tuple[float, float]]
    resident_share: ClassVar[float] = 0.25
    slow_share: ClassVar[float] = 1.0
    tiers: ClassVar[tuple[Tier, ...]] = (Tier.HOST, Tier.PAGE_CACHE, Tier.DISK)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def missing(self) -> str | None:
        """What has to be installed first."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed"

    def save(self, directory: Path, device: torch.device) -> None:
        """Write the checkpoint."""
        with _default_dtype(torch.bfloat16), device:
            model = self.make()
        fill(model)
        self.write(model, directory)

    @abstractmethod
    def make(self) -> Any:
        """The model on the default device, with any weights."""

    @abstractmethod
    def write(self, model: Any, directory: Path) -> None:
        """Write the checkpoint of a model to an empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> nn.Module:
        """The model on the CPU, for inference."""

    @abstractmethod
    def run(self, model: Any, device: torch.device, share: float = 1.0) -> torch.Tensor:
        """One run; a share of less than 1 gives the first part of its output."""


@dataclass(frozen=True, slots=True)
class _Shape:
    width: int
    blocks: int


class PlainDecoder(Subject):
    """Residual blocks of two linear layers in plain torch: for machines with nothing else."""

    name = "plain"
    gigabytes = (5.9, 0.03)

    def make(self) -> nn.Module:
        """Blocks of at most 4096 wide, 12 of them at least."""
        shape = _plain_shape(self.nbytes)
        return _Plain(shape.width, shape.blocks)

    def write(self, model: nn.Module, directory: Path) -> None:
        """One file."""
        from safetensors.torch import save_model

        save_model(model, str(directory / "model.safetensors"))

    def load(self, directory: Path) -> nn.Module:
        """Into an empty one."""
        from safetensors.torch import load_file

        with torch.device("meta"):
            model = self.make()
        model.load_state_dict(load_file(directory / "model.safetensors"), assign=True)
        return model.eval()

    def run(self, model: Any, device: torch.device, share: float = 1.0) -> torch.Tensor:
        """Forward 8 vectors."""
        width = _plain_shape(self.nbytes).width
        output: torch.Tensor = model(_noise(8, width, device=device))
        return output


class FluxTransformer(Subject):
    """The transformer of FLUX as diffusers has it, with fewer blocks."""

    name = "flux"
    package = "diffusers"
    gigabytes = (5.66, 0.02)

    def make(self) -> Any:
        """4 double and 10 single blocks of full width, or tiny ones."""
        diffusers = importlib.import_module("diffusers")
        small: dict[str, Any] = {}
        if self.nbytes < 1 << 30:
            small = {"attention_head_dim": 64, "num_attention_heads": 4, "joint_attention_dim": 128}
            small |= {"pooled_projection_dim": 64, "axes_dims_rope": (16, 24, 24)}
        return diffusers.FluxTransformer2DModel(num_layers=4, num_single_layers=10, guidance_embeds=False, **small)

    def write(self, model: Any, directory: Path) -> None:
        """As pipelines have it, in shards."""
        model.save_pretrained(directory, max_shard_size="2GB")

    def load(self, directory: Path) -> nn.Module:
        """As pipelines do."""
        diffusers = importlib.import_module("diffusers")
        model: nn.Module = diffusers.FluxTransformer2DModel.from_pretrained(directory, torch_dtype=torch.bfloat16)
        return model.eval()

    def run(self, model: Any, device: torch.device, share: float = 1.0) -> torch.Tensor:
        """One step of denoising: 256 image tokens, 128 of text."""
        config = model.config
        output: torch.Tensor = model(
            hidden_states=_noise(1, 256, config.in_channels, device=device),
            encoder_hidden_states=_noise(1, 128, config.joint_attention_dim, device=device),
            pooled_projections=_noise(1, config.pooled_projection_dim, device=device),
            timestep=torch.tensor([0.5], device=device, dtype=torch.bfloat16),
            img_ids=torch.zeros(256, 3, device=device),
            txt_ids=torch.zeros(128, 3, device=device),
            return_dict=False,
        )[0]
        return output


class LlamaDecoder(Subject):
    """A Llama-style decoder as transformers has it."""

    name = "llama"
    package = "transformers"
    unit = "32 tokens"
    gigabytes = (8.4, 0.02)
    slow_share = 0.125
    tiers = (Tier.HOST,)

    def make(self) -> Any:
        """Layers of Llama 3 8B, as many as the size allows, or of a tiny one."""
        transformers = importlib.import_module("transformers")
        width, inner, words, heads = (4096, 14336, 32000, 32) if self.nbytes >= 1 << 30 else (256, 896, 1000, 4)
        layer_bytes = 2 * width * (3 * inner + 2 * width + width // 2)
        layers = max(2, math.ceil((self.nbytes - 4 * words * width) / layer_bytes))
        config = transformers.LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            max_position_embeddings=512,
        )
        return transformers.LlamaForCausalLM(config)

    def write(self, model: Any, directory: Path) -> None:
        """As on the Hub, in shards."""
        model.save_pretrained(directory, max_shard_size="2GB")

    def load(self, directory: Path) -> nn.Module:
        """As usual."""
        transformers = importlib.import_module("transformers")
        model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        return model.eval()

    def run(self, model: Any, device: torch.device, share: float = 1.0) -> torch.Tensor:
        """32 tokens after a prompt of 64, the likeliest each time."""
        prompt = (torch.arange(64) * 7 % 997 + 3)[None].to(device)
        count = max(1, round(32 * share))
        tokens: torch.Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )[:, 64:]
        return tokens


SUBJECTS: Mapping[str, type[Subject]] = {each.name: each for each in (FluxTransformer, LlamaDecoder, PlainDecoder)}
"""Every subject by name."""


def fill(model: nn.Module) -> None:
    """Give matrices weights as training leaves them; what else there is stays as its module made it."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.dim() == 2:
                parameter.copy_(trained_weights(*parameter.shape, seed=seed, device=parameter.device))


class _Plain(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_PlainBlock(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _PlainBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def _plain_shape(nbytes: int) -> _Shape:
    width = 4096
    while width > 64 and 12 * 16 * width * width > nbytes:
        width //= 2
    return _Shape(width, max(2, round(nbytes / (16 * width * width))))


def _noise(*shape: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(1)
    return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
