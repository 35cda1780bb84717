"""Kernel launches without Triton's look-up of what it compiled, which takes longer than a small kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["KernelLauncher"]


class KernelLauncher:
    """Launches Triton kernels of one warp a program, and keeps what was compiled.

    A kernel is compiled once for each device and set of constants; its integer arguments are not to be specialised.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[torch.Tensor | int, ...],
        constants: Mapping[str, bool | int],
        **options: Any,
    ) -> Any:
        """Launch ``kernel`` on the current stream with ``arguments``, and ``constants`` in the order of its signature.

        The device of the first argument must be the current one.

        Returns:
            What was compiled; None in the interpreter. ``compiled[(programs, 1, 1)](*arguments, *constants.values(),
            stream=...)`` launches it again, and takes addresses, as aligned as these, for tensors.
        """
        device, aligned = _facts(arguments)
        key = (kernel, device, aligned, *constants.items())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(programs, 1, 1)](*arguments, *constants.values())
            return compiled
        compiled = kernel[(programs,)](*arguments, **constants, num_warps=1, **options)
        if device.type != "cuda":
            return None
        self._compiled[key] = compiled
        return compiled


def _facts(arguments: tuple[torch.Tensor | int, ...]) -> tuple[torch.device, tuple[bool, ...]]:
    """What compiled code relies on: the device, and which addresses are multiples of 16."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return tensors[0].device, tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
