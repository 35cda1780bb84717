"""Packs being written: segments one after another, a new file when one is full.

A pack is named after its content (``packs/00000-<16 digits of its BLAKE3>.szp``). A rebuild therefore never puts other
bytes under a name that an older manifest uses: whoever reads by the old manifest finds the bytes it means or no file,
never wrong ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from splitzip_aio.cache.checks import PACK_ALIGN
from splitzip_aio.cache.files import read_at, sync_directory, write_at, writing
from splitzip_aio.cache.manifest import Blob, Pack
from splitzip_aio.codec.layout import align
from splitzip_aio.errors import CorruptDataError

__all__ = ["FINISHED_PACK", "PACK_DIRECTORY", "UNFINISHED_PACK", "PackWriter"]

PACK_DIRECTORY = "packs"
FINISHED_PACK = re.compile(r"[0-9]{5,}-[0-9a-f]{16}\.szp")
UNFINISHED_PACK = re.compile(r"\.building-[0-9]{5,}\.szp")

_CREATE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_ADOPT = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class _PackFile:
    """A pack before it has its final name: the path, what was appended so far, and the hash of that."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self.size = 0
        self._hash = blake3()
        self._descriptor: int | None = os.open(path, flags, 0o666)

    @property
    def descriptor(self) -> int:
        assert self._descriptor is not None
        return self._descriptor

    def append(self, data: NDArray[np.uint8]) -> None:
        write_at(self.descriptor, data.data, self.size)
        self._hash.update(data.data)
        self.size += data.size

    def adopt(self, sizes: Iterable[int], check: Callable[[bytearray], None]) -> None:
        """Count what is in the file already as appended, piece by piece, unless ``check`` raises for one."""
        end, digest = self.size, self._hash.copy()
        for size in sizes:
            data = bytearray(size)
            if read_at(self.descriptor, memoryview(data), end, self.path) != size:
                raise CorruptDataError(f"{self.path}: expected {end + size} bytes, found fewer")
            check(data)
            digest.update(data)
            end += size
        self.size, self._hash = end, digest

    def seal(self) -> None:
        """Drop what follows the appended bytes, pad with zeros, make the content durable."""
        os.ftruncate(self.descriptor, self.size)
        os.ftruncate(self.descriptor, align(self.size, PACK_ALIGN))
        os.fsync(self.descriptor)
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def final(self, number: int) -> Pack:
        padded = self._hash.copy()
        padded.update(bytes(align(self.size, PACK_ALIGN) - self.size))
        return Pack(f"{PACK_DIRECTORY}/{number:05d}-{padded.hexdigest()[:16]}.szp", align(self.size, PACK_ALIGN))


class PackWriter:
    """Appends blobs to packs beneath ``root``. What the file system refuses is a CacheError.

    A blob lies in one pack; a pack takes blobs until the next would bring it over ``pack_bytes``.
    """

    def __init__(self, root: Path, *, pack_bytes: int) -> None:
        self._root = root
        self._pack_bytes = pack_bytes
        self._packs: list[_PackFile] = []
        self._current: _PackFile | None = None

    def begin(self, nbytes: int) -> tuple[int, int]:
        """Pack number and offset where a blob of ``nbytes`` goes, which must be appended next."""
        current = self._current
        if current is None or (current.size and current.size + nbytes > self._pack_bytes):
            current = self._next(_CREATE)
        return len(self._packs) - 1, current.size

    def append(self, segment: NDArray[np.uint8]) -> None:
        """Append one segment, (segment_bytes,) uint8, of the blob begun last."""
        current = self._packs[-1]
        with writing(current.path):
            current.append(segment)

    def adopt(self, blob: Blob, check: Callable[[bytearray], None]) -> None:
        """Take over a blob that a killed builder appended next; ``check`` raises for a segment that is damaged.

        Raises:
            CorruptDataError: the blob is not there; the writer is as before.
        """
        if self._current is None or blob.pack == len(self._packs):
            try:
                self._next(_ADOPT)
            except FileNotFoundError as error:
                raise CorruptDataError(f"{self._path(blob.pack)}: was not left by the interrupted build") from error
        current = self._packs[-1]
        if (blob.pack, blob.offset) != (len(self._packs) - 1, current.size):
            raise CorruptDataError(f"{current.path}: expected a blob at {current.size}, found it at {blob.offset}")
        current.adopt(blob.segments, check)

    def seal(self) -> None:
        """Make all that was appended durable; nothing may be appended afterwards."""
        if self._current is not None:
            with writing(self._current.path):
                self._current.seal()
            self._current = None

    def publish(self) -> tuple[Pack, ...]:
        """Give the sealed packs their final names, durably."""
        packs = tuple(pack.final(number) for number, pack in enumerate(self._packs))
        for pack, named in zip(self._packs, packs, strict=True):
            with writing(pack.path):
                pack.path.rename(self._root / named.file)
        if packs:
            with writing(self._root / PACK_DIRECTORY):
                sync_directory(self._root / PACK_DIRECTORY)
        return packs

    def close(self) -> None:
        """Close the file that is open, if any, and leave everything as it is. Idempotent."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def _next(self, flags: int) -> _PackFile:
        self.seal()
        path = self._path(len(self._packs))
        if flags == _ADOPT:
            self._current = _PackFile(path, flags)
        else:
            with writing(path):
                path.parent.mkdir(exist_ok=True)
                self._current = _PackFile(path, flags)
        self._packs.append(self._current)
        return self._current

    def _path(self, number: int) -> Path:
        return self._root / PACK_DIRECTORY / f".building-{number:05d}.szp"
