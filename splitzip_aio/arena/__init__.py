"""Arenas: the memory that layers are decoded into, on the host or on a GPU."""

from __future__ import annotations

from splitzip_aio.arena.cuda import CudaArena
from splitzip_aio.arena.host import HostArena

__all__ = ["CudaArena", "HostArena"]
