"""Triton kernels, and nothing else: importing them needs Triton, so only the GPU codec does, when it is first used.

They also run in Triton's interpreter, from release 3.7 on. Before 3.9 it could not invert unsigned integers (``~``), so
kernels write ``^ 0xFFFFFFFF``; nor subtract a tensor from a product of constants.
"""

from __future__ import annotations

__all__: list[str] = []
