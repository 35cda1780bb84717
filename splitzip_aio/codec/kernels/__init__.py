"""Triton kernels, and nothing else: importing them needs Triton, so only the GPU codec does, when it is first used."""

from __future__ import annotations

__all__: list[str] = []
