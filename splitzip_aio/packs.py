"""A pack as the pipeline reads it: through the page cache what is in it, past it what is not.

What the page cache holds comes from there at memory speed, copied by several of the kernel's workers at a time. What it
does not hold would be read into it first, and push out what someone else keeps there; direct I/O brings it straight
into the slot. Which of the two is best is a matter of the moment and of the extent, so it is asked before each read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from splitzip_aio.abc import FileHandle, IOMode, ReadDriver
from splitzip_aio.drivers.mapped_file import MappedFile
from splitzip_aio.drivers.page_cache import PageCache
from splitzip_aio.errors import ReadError, UnsupportedError

__all__ = ["PackIdentity", "PackSource"]


@dataclass(frozen=True, slots=True)
class PackIdentity:
    """Which file, and which contents of it: any write or replacement makes it another."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, descriptor: int) -> PackIdentity:
        """The identity of an open file as it is now."""
        status = os.fstat(descriptor)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class PackSource:
    """An open pack.

    Args:
        reader: the driver that reads it.
        descriptor: of the pack; closed with the source.
        path: what errors are to call it.
        io: ``"direct"`` and ``"buffered"`` are orders. ``"auto"`` reads buffered what the page cache holds, and
            direct, where the file system has that, what it does not hold completely. Unless all is read direct, the
            driver is told what the page cache holds, and may copy that by other means.

    Attributes:
        path: what errors call it.
        identity: which file it is.

    Raises:
        ReadError: it cannot be opened.
        UnsupportedError: ``io="direct"``, and there is no direct I/O.
    """

    def __init__(self, reader: ReadDriver, descriptor: int, path: str, *, io: IOMode) -> None:
        self.path = path
        self._descriptor = descriptor
        self._page_cache: PageCache | None = None
        try:
            self.identity = PackIdentity.of(descriptor)
            self._main = self._cached = self._open(reader, io)
            self._may_map = io == "auto" and self._main.direct
            if io != "direct":
                self._cached = self._open(reader, "buffered")
                self._cached.cached = True
                self._page_cache = PageCache(descriptor, self.identity.size)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether what the page cache does not hold is read past it."""
        return self._main.direct

    @property
    def fallback(self) -> str | None:
        """Which better way of reading could not be taken, and why; None if none was passed over."""
        if not self._main.direct:
            return f"direct I/O: {self._main.reason}"
        reason = None if self._page_cache is None else self._page_cache.reason
        return None if reason is None else f"page cache: never read from, {reason}"

    def handle(self, offset: int, nbytes: int) -> FileHandle:
        """How ``[offset, offset + nbytes)`` is best read now."""
        return self._cached if self.cached(offset, nbytes) else self._main

    def cached(self, offset: int, nbytes: int) -> bool:
        """Whether ``[offset, offset + nbytes)`` is best taken from the page cache, which has all of it now."""
        return self._page_cache is not None and self._page_cache.holds(offset, nbytes)

    def map(self) -> MappedFile | None:
        """A mapping of it, of use until ``close``, and to be closed once nothing is decoded from it.

        None where reading was asked for, and where the page cache is all there is or tells nothing.
        """
        if self._page_cache is None or self._page_cache.method is None or not self._may_map:
            return None
        return MappedFile(self._descriptor, self.path, lambda descriptor: PackIdentity.of(descriptor) == self.identity)

    def close(self) -> None:
        """Close what the driver does not. Idempotent."""
        if self._page_cache is not None:
            self._page_cache.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, reader: ReadDriver, io: IOMode) -> FileHandle:
        name = f"/proc/self/fd/{self._descriptor}"
        try:
            file = reader.open(name, io=io)
        except ReadError as error:
            raise ReadError(error.errno, error.strerror, self.path) from error
        except UnsupportedError as error:
            raise UnsupportedError(str(error).replace(name, self.path)) from error
        file.path = self.path
        return file
