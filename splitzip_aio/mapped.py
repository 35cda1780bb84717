"""Packs decoded from where the page cache has them: the pipeline's way to mappings, and what it says of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import anyio.to_thread

from splitzip_aio.abc import PlannedRead
from splitzip_aio.drivers.mapped_file import MappedExtent, MappedFile
from splitzip_aio.packs import PackSource

__all__ = ["MappedPacks"]

logger = logging.getLogger(__name__)


class MappedPacks:
    """Finds extents that need not be read, since an arena on the host can decode them where they are.

    None, until some packs are added.

    Attributes:
        mapped_bytes: bytes that were held so.
    """

    def __init__(self) -> None:
        self.mapped_bytes = 0
        self._packs: dict[int, tuple[PackSource, MappedFile]] = {}
        self._reasons: dict[str, None] = {}
        self._limiter = anyio.CapacityLimiter(1)  # more at a time would wait for each other in the kernel

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Why extents were read that the page cache had; empty if none was."""
        return tuple(self._reasons)

    def add(self, packs: Sequence[PackSource | None]) -> None:
        """Serve packs, by index, that stay open while anything is asked of them."""
        for number, pack in enumerate(packs):
            file = None if pack is None else pack.map()
            if pack is not None and file is not None:
                self._packs[number] = (pack, file)

    def find(self, read: PlannedRead) -> MappedExtent | None:
        """A hold on an extent that the page cache has, to be given to ``lock`` if it is not; None if it has none."""
        pack, file = self._packs.get(read.pack, (None, None))
        if pack is None or file is None:
            return None
        extent = file.hold(read.offset, read.nbytes)
        if extent is None:
            self._note(file)
            return None
        if extent.lock_mapped():  # which costs less than to ask for the page cache, and needs no answer then
            self.mapped_bytes += read.nbytes
        elif not pack.cached(read.offset, read.nbytes):
            extent.release()
            return None
        return extent

    async def lock(self, extent: MappedExtent, read: PlannedRead) -> bool:
        """Whether the extent can be decoded from, until it is released; if not, it is released already."""
        locked = False
        try:
            locked = await anyio.to_thread.run_sync(extent.lock, limiter=self._limiter)
        finally:
            if not locked:
                extent.release()
        if locked:
            self.mapped_bytes += read.nbytes
        else:
            self._note(self._packs[read.pack][1])
        return locked

    def close(self) -> None:
        """Let go of every mapping and of what is held; for when nothing is decoded any more."""
        for _, file in self._packs.values():
            file.close()

    def _note(self, file: MappedFile) -> None:
        reason = None if file.refusal is None else f"mapping: {file.refusal}"
        if reason is not None and reason not in self._reasons:
            self._reasons[reason] = None
            logger.warning("packs are copied from the page cache, not mapped: %s: %s", file.path, file.refusal)
