"""What the consumer hands over: the parts of its objects that are used here, as types.

``ddo-vmm-allocator`` is not imported: whatever looks like its objects will do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

__all__ = ["Binding", "FileSlice", "NativeTransport", "Unit"]


class FileSlice(Protocol):
    """Where a tensor lies in a source file."""

    @property
    def path(self) -> str | os.PathLike[str]:
        """The file."""

    @property
    def offset_bytes(self) -> int:
        """From the start of the file, header included."""

    @property
    def size_bytes(self) -> int:
        """Size of the tensor."""


class Binding(Protocol):
    """A weight: where it comes from, and its ``nbytes`` bytes at ``offset`` of an arena."""

    @property
    def file_slice(self) -> FileSlice | None:
        """Where it lies on disk; None if it comes from memory."""

    @property
    def offset(self) -> int:
        """From the start of the arena."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def signature(self) -> int | None:
        """The generation of the arena's range that it was last uploaded to."""


class Unit(Protocol):
    """Weights that are used together."""

    @property
    def module_name(self) -> str:
        """The module they belong to."""

    @property
    def tensors(self) -> Sequence[Any]:
        """Their bindings."""


NativeTransport: TypeAlias = Any
"""The consumer's own transport, ``_NativeShardTransport``."""
