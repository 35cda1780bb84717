"""The packs of a cache, open for reading: beneath the root, no links followed, and never past what is there."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

from splitzip_aio.cache.files import open_beneath, read_at
from splitzip_aio.cache.manifest import Pack
from splitzip_aio.errors import ClosedError, CorruptDataError, ManifestError, ReadError

__all__ = ["PackFiles"]

_CHUNK_BYTES = 1 << 20
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EINVAL})


class PackFiles:
    """Holds every pack open, so that a rebuild, which removes old packs, takes nothing away from who reads them.

    A missing or short pack is no error until it is read, so that the tensors in it can be named.

    Raises:
        ManifestError: a pack is a symbolic link or no regular file.
        ReadError: a pack cannot be opened.
    """

    def __init__(self, root: Path, directory: int, packs: tuple[Pack, ...]) -> None:
        self._closed = False
        self._root = root
        self._packs = packs
        self._descriptors: list[int | None] = []
        try:
            for pack in packs:
                self._descriptors.append(self._open(directory, pack))
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"unclosed cache {self._root}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    @property
    def missing(self) -> bool:
        """Whether a pack does not exist."""
        return None in self._descriptors

    def path(self, pack: int) -> Path:
        """Where a pack is, for messages; it may have been removed since."""
        return self._root / self._packs[pack].file

    def excess_bytes(self, pack: int) -> int:
        """How many bytes longer than it should be a pack is; negative if it is shorter or does not exist."""
        descriptor = self._descriptors[pack]
        size = 0 if descriptor is None else os.fstat(descriptor).st_size
        return size - self._packs[pack].bytes

    def read_into(self, pack: int, offset: int, out: memoryview, *, where: str) -> None:
        """Fill ``out`` from ``offset`` on; ``where`` names what is read.

        Raises:
            CorruptDataError: the pack is missing, or ends before.
            ReadError: the operating system failed the read.
        """
        count = read_at(self._descriptor(pack, where), out, offset, self.path(pack))
        if count != len(out):
            raise CorruptDataError(
                f"{where}: {self.path(pack)}: expected {len(out)} bytes at {offset}, found {count}; the pack is "
                "truncated: rebuild the cache"
            )

    def is_zero(self, pack: int, start: int) -> bool:
        """Whether a pack holds nothing but zeros from ``start`` to its size by the manifest."""
        chunk = bytearray(_CHUNK_BYTES)
        for offset in range(start, self._packs[pack].bytes, _CHUNK_BYTES):
            piece = memoryview(chunk)[: self._packs[pack].bytes - offset]
            self.read_into(pack, offset, piece, where="padding")
            if any(piece):
                return False
        return True

    def check(self, pack: int, end: int, *, where: str) -> None:
        """Raise CorruptDataError unless a pack exists and has ``end`` bytes or more."""
        size = os.fstat(self._descriptor(pack, where)).st_size
        if size < end:
            raise CorruptDataError(
                f"{where}: {self.path(pack)}: expected {end} bytes or more, found {size}; the pack is truncated: "
                "rebuild the cache"
            )

    def reopen(self, pack: int, flags: int) -> int:
        """A new descriptor of the same file, even if it was removed since; the caller closes it.

        Raises:
            CorruptDataError: the pack is missing.
            ReadError: it cannot be opened with these flags.
        """
        descriptor = self._descriptor(pack, "pack")
        try:
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            raise ReadError(error.errno, _problem(error), str(self.path(pack))) from error

    def close(self) -> None:
        """Close all packs. Idempotent."""
        self._closed = True
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self, directory: int, pack: Pack) -> int | None:
        try:
            return open_beneath(directory, pack.file)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise ManifestError(
                    f"{self._root}: {pack.file}: expected a regular file, found a symbolic link or something else; "
                    "only files beneath the root are read: copy the cache with its links resolved"
                ) from error
            raise ReadError(error.errno, _problem(error), str(self._root / pack.file)) from error

    def _descriptor(self, pack: int, where: str) -> int:
        if self._closed:
            raise ClosedError(f"{self._root}: the cache is closed")
        descriptor = self._descriptors[pack]
        if descriptor is None:
            raise CorruptDataError(f"{where}: {self.path(pack)}: expected a pack, found none; rebuild the cache")
        return descriptor


def _problem(error: OSError) -> str:
    remedy = "; raise the limit on open files (ulimit -n)" if error.errno == errno.EMFILE else ""
    return f"cannot open: {error.strerror}{remedy}"
