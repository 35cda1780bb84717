"""Which releases of Triton can interpret kernels on the CPU."""

from __future__ import annotations

__all__ = ["INTERPRETER_SINCE"]

INTERPRETER_SINCE = "3.7"
"""Interpreters before it convert arrays of one element to scalars, which NumPy refuses since 2.4."""
