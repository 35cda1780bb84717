"""Triton kernels, and nothing else: importing them needs Triton, so only the GPU codec does, when it is first used.

They also run in Triton's interpreter, of each release from 3.4 on. Those before 3.9 cannot invert unsigned integers
(``~``), so kernels write ``^ 0xFFFFFFFF``; nor subtract a tensor from a product of constants.
"""

from __future__ import annotations

__all__: list[str] = []
