"""An engine around another one: what it does not do itself, the other does."""

from __future__ import annotations

from collections.abc import Sequence

from splitzip_aio.drivers.engine import Engine
from splitzip_aio.drivers.files import OpenFile
from splitzip_aio.drivers.operation import Extent

__all__ = ["SurroundingEngine"]


class SurroundingEngine(Engine):
    """Hands everything on but ``collect`` and ``close``, which each that surrounds another has to say for itself.

    Args:
        inner: the other engine.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.name = inner.name
        self.binding = inner.binding
        self.binding_reason = inner.binding_reason
        self.fixed_buffers = inner.fixed_buffers
        self.may_be_bypassed = inner.may_be_bypassed

    @property
    def in_flight(self) -> int:
        """Extents begun and not yet collected."""
        return self._inner.in_flight

    @property
    def copies(self) -> int:
        """Whatever the other engine says."""
        return self._inner.copies

    @property
    def copy_threads(self) -> int:
        """Whatever the other engine says."""
        return self._inner.copy_threads

    @property
    def copy_bytes(self) -> int:
        """Whatever the other engine says."""
        return self._inner.copy_bytes

    @property
    def signal(self) -> int:
        """The other engine's."""
        return self._inner.signal

    def fileno(self) -> int:
        """The other engine's."""
        return self._inner.fileno()

    def begin(self, extents: Sequence[Extent]) -> None:
        """Have the other engine read them."""
        self._inner.begin(extents)

    def flush(self) -> bool:
        """Whatever the other engine does."""
        return self._inner.flush()

    def adopt(self, file: OpenFile) -> None:
        """Whatever the other engine does."""
        self._inner.adopt(file)

    def disown(self, file: OpenFile) -> None:
        """Whatever the other engine does."""
        self._inner.disown(file)
