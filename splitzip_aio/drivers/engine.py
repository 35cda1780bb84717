"""What a driver's back end has to do: hand extents over, and collect what became of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from splitzip_aio.drivers.files import OpenFile
from splitzip_aio.drivers.operation import Extent

__all__ = ["Engine"]

_COPY_BYTES = 8 << 20


class Engine(ABC):
    """The synchronous half: hands extents to the kernel and collects what became of them.

    Used from the event loop's thread only. It keeps each extent's memory alive until its completion.

    Attributes:
        name: of the back end.
        binding, binding_reason: how io_uring is called, and why so.
        fixed_buffers: the slots are registered with the kernel.
        may_be_bypassed: see ``ReadDriver.may_be_bypassed``.
    """

    name: str
    binding: str | None = None
    binding_reason: str | None = None
    fixed_buffers = False
    may_be_bypassed = True

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Extents begun and not yet collected."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable while there may be something to collect."""

    @property
    @abstractmethod
    def signal(self) -> int:
        """A descriptor to write eight bytes to, a 1, which makes ``fileno`` readable; any thread may."""

    @property
    def copies(self) -> int:
        """Extents that the page cache serves, to be given at once: each is a copy, and takes a core.

        Seven eighths of the cores, since more would only take time from whoever decodes, or runs the event loop.
        """
        return max(1, len(os.sched_getaffinity(0)) * 7 // 8)

    @property
    def copy_threads(self) -> int:
        """Threads that copy what the page cache serves, and do not take part in anything else."""
        return 0

    @property
    def copy_bytes(self) -> int:
        """The longest of these extents. Longer than others, since nothing waits long behind them."""
        return _COPY_BYTES

    @abstractmethod
    def begin(self, extents: Sequence[Extent]) -> None:
        """Start reading the rest of each extent. The caller keeps ``in_flight`` within the queue depth."""

    @abstractmethod
    def flush(self) -> bool:
        """Submit again what the kernel refused for the moment; True if nothing is left."""

    @abstractmethod
    def collect(self) -> list[tuple[Extent, int]]:
        """Extents completed since the last call, each with bytes read or a negated errno. Never waits."""

    def adopt(self, file: OpenFile) -> None:  # noqa: B027 - registering files is an option, not a duty
        """Prepare for reads of a newly opened file."""

    def disown(self, file: OpenFile) -> None:  # noqa: B027
        """Forget a file that is about to be closed; none of its extents are in flight."""

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing is in flight, blocking, then free everything. Idempotent; no-op in a forked child."""
