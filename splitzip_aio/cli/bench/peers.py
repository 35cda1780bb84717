"""Other loaders of safetensors: each brings all tensors of a checkpoint to a device."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.codec.dtypes import torch_view

__all__ = ["PEERS", "Load", "Peer"]

Load = Callable[[Sequence[Path], torch.device], Mapping[str, torch.Tensor]]
"""From the files of a checkpoint and a device to its tensors there."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A loader, the distributions of which one provides it, and how it is called.

    ``gpu_only`` ones have nothing to say on the CPU.
    """

    name: str
    distributions: tuple[str, ...]
    load: Load
    gpu_only: bool

    @property
    def version(self) -> str | None:
        """What is installed; None if nothing is."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


def _safetensors(files: Sequence[Path], device: torch.device) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors = {name: tensor for file in files for name, tensor in load_file(file, device=str(device)).items()}
    # On the CPU it maps the file, and nothing is loaded before someone looks.
    return {name: tensor.clone() for name, tensor in tensors.items()} if device.type == "cpu" else tensors


def _fastsafetensors(files: Sequence[Path], device: torch.device) -> Mapping[str, torch.Tensor]:
    fastsafetensors = importlib.import_module("fastsafetensors")
    with fastsafetensors.fastsafe_open(
        filenames=[str(file) for file in files], nogds=True, device=str(device)
    ) as opened:
        # Its tensors are views of memory that goes with it, so whoever keeps them must copy.
        return {name: opened.get_tensor(name).clone() for name in list(opened.keys())}


def _runai(files: Sequence[Path], device: torch.device) -> Mapping[str, torch.Tensor]:
    runai = importlib.import_module("runai_model_streamer")
    tensors: dict[str, torch.Tensor] = {}
    with runai.SafetensorsStreamer() as streamer:
        for file in files:
            streamer.stream_file(str(file))
            # What it yields is in a buffer that it fills again, so on the CPU it must be copied too.
            tensors |= {name: tensor.to(device, copy=True) for name, tensor in streamer.get_tensors()}
    return tensors


def _kvikio(files: Sequence[Path], device: torch.device) -> Mapping[str, torch.Tensor]:
    kvikio = importlib.import_module("kvikio")
    tensors: dict[str, torch.Tensor] = {}
    for file in open_checkpoint(list(files)).files:
        first = min(tensor.offset for tensor in file.tensors)
        last = max(tensor.offset + tensor.nbytes for tensor in file.tensors)
        data = torch.empty(last - first, dtype=torch.uint8, device=device)
        with kvikio.CuFile(str(file.path), "r") as opened:
            opened.read(data, file_offset=first)
        for tensor in file.tensors:
            start = tensor.offset - first
            tensors[tensor.name] = torch_view(data[start : start + tensor.nbytes], tensor.dtype, tensor.shape)
    return tensors


PEERS = (
    Peer("safetensors", ("safetensors",), _safetensors, gpu_only=False),
    Peer("fastsafetensors", ("fastsafetensors",), _fastsafetensors, gpu_only=True),
    Peer("Run:ai streamer", ("runai-model-streamer",), _runai, gpu_only=False),
    Peer("kvikio", ("kvikio-cu13", "kvikio-cu12", "kvikio-cu11", "kvikio"), _kvikio, gpu_only=True),
)
