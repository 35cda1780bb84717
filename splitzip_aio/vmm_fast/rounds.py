"""Where the first round over a model ends, and what the next one will begin with.

The consumer keeps some weights resident, and never asks for them again. Which ones, only its arena knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from splitzip_aio.vmm_fast.consumer import Binding

__all__ = ["FirstRound"]


class FirstRound:
    """Watches the first use of each group.

    Args:
        groups: all groups.
    """

    def __init__(self, groups: Collection[str]) -> None:
        self._missing = set(groups)
        self._used: dict[str, Sequence[tuple[Any, Binding]]] = {}

    @property
    def complete(self) -> bool:
        """Whether each group was used; never, where there is none."""
        return bool(self._used) and not self._missing

    def note(self, group: str, uploads: Sequence[tuple[Any, Binding]]) -> None:
        """A group was used: these bindings of it were uploaded, each to an arena."""
        if group in self._missing:
            self._missing.discard(group)
            self._used[group] = uploads

    def lost(self) -> Iterator[str]:
        """The groups of which the arena no longer has all that was uploaded, in the order of use."""
        for group, uploads in self._used.items():
            if not all(_resident(native, binding) for native, binding in uploads):
                yield group


def _resident(native: Any, binding: Binding) -> bool:
    """Whether a range still holds what the consumer put there, judged as the consumer does."""
    if binding.signature is None:  # went to a buffer that is used again, or was given up since
        return False
    return bool(native.peek_range_signature(binding.offset, binding.nbytes) == binding.signature)
