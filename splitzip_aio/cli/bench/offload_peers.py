"""Who offloads a model: we, and those whom a user would take otherwise."""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import splitzip_aio
from splitzip_aio.cli.bench.offload_subjects import Subject
from splitzip_aio.cli.bench.passes import Tier

__all__ = ["CONTENDERS", "Contender", "Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a contender is given: a model's checkpoint and cache, where to run, and how much of it may stay there."""

    subject: Subject
    checkpoint: Path
    cache: Path
    device: torch.device
    resident_bytes: int


Build = Callable[[Setting, Tier], AbstractContextManager[nn.Module]]
"""From a setting, and the tier that its weights are to come from, to a model that runs."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Someone who offloads.

    Attributes:
        name: who.
        distribution: what must be installed for it; None if nothing.
        build: makes the model.
        gpu_only: whether it has anything to say on the CPU.
    """

    name: str
    distribution: str | None
    build: Build
    gpu_only: bool = True

    @property
    def version(self) -> str | None:
        """What is installed; None if nothing is, or if it is we."""
        if self.distribution is None:
            return None
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def refusal(self, device: torch.device) -> str | None:
        """Why it cannot take part; None if it can."""
        if self.distribution is not None and self.version is None:
            return f"{self.distribution} is not installed"
        return "needs a GPU" if self.gpu_only and device.type != "cuda" else None


@contextmanager
def _ours(setting: Setting, tier: Tier) -> Iterator[nn.Module]:
    model = splitzip_aio.offload(
        setting.subject.load(setting.checkpoint),
        setting.cache,
        device=setting.device,
        resident_bytes=setting.resident_bytes,
        host_cache_bytes="auto" if tier is Tier.HOST else 0,
    )
    yield model  # not detached, which would bring all of it to the CPU


@contextmanager
def _group_offload(setting: Setting, tier: Tier) -> Iterator[nn.Module]:
    apply: Any = importlib.import_module("diffusers.hooks").apply_group_offloading
    model = setting.subject.load(setting.checkpoint)
    # It finds blocks only in lists of the model itself, and otherwise takes all of it for one block.
    blocks = any(isinstance(child, (nn.ModuleList, nn.Sequential)) for child in model.children())
    with tempfile.TemporaryDirectory(dir=setting.cache.parent, prefix="group-") as directory:
        apply(
            model,
            onload_device=setting.device,
            offload_device=torch.device("cpu"),
            offload_type="block_level" if blocks else "leaf_level",
            num_blocks_per_group=1 if blocks else None,
            use_stream=True,
            record_stream=True,
            offload_to_disk_path=None if tier is Tier.HOST else directory,
        )
        yield model


@contextmanager
def _accelerate(setting: Setting, tier: Tier) -> Iterator[nn.Module]:
    accelerate: Any = importlib.import_module("accelerate")
    model = setting.subject.load(setting.checkpoint)
    if tier is Tier.HOST:
        yield accelerate.cpu_offload(model, execution_device=setting.device)
        return
    with tempfile.TemporaryDirectory(dir=setting.cache.parent, prefix="accelerate-") as directory:
        yield accelerate.disk_offload(model, offload_dir=directory, execution_device=setting.device)


CONTENDERS = (
    Contender("splitzip-aio", None, _ours, gpu_only=False),
    Contender("diffusers group offload", "diffusers", _group_offload),
    Contender("accelerate", "accelerate", _accelerate),
)
"""We first."""
