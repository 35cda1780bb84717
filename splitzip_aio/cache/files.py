"""The file system's part: reads and writes that are complete or raise, atomic replacement, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from splitzip_aio.errors import CacheBusyError, CacheError, CacheNotFoundError, ReadError

__all__ = [
    "LOCK_NAME",
    "DirectoryLock",
    "open_beneath",
    "open_root",
    "read_at",
    "replace_file",
    "sync_directory",
    "write_at",
    "writing",
]

LOCK_NAME = ".lock"

_MOST_PER_CALL = 1 << 30  # Linux moves at most 2 GiB less a page per call
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_POLL_S = 0.02


def read_at(descriptor: int, out: memoryview, offset: int, path: Path) -> int:
    """Fill ``out`` from ``offset`` on; return the bytes read, fewer than asked only at the end of the file.

    Raises:
        ReadError: the operating system failed the read.
    """
    done = 0
    try:
        while done < len(out):
            count = os.preadv(descriptor, [out[done : done + _MOST_PER_CALL]], offset + done)
            if count == 0:
                break
            done += count
    except OSError as error:
        problem = f"cannot read {len(out)} bytes at {offset}: {error.strerror}"
        raise ReadError(error.errno, problem, str(path)) from error
    return done


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``, bytes, from ``offset`` on. Raises OSError; see ``writing``."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _MOST_PER_CALL], offset + done)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``path``, into a CacheError that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = "free some space" if error.errno in _FULL else "check the directory and its permissions"
        raise CacheError(f"{path}: cannot be written: {error.strerror}; {remedy} and build again") from error


def sync_directory(path: Path) -> None:
    """Make names created, renamed or removed in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, scratch: Path) -> None:
    """Give ``path`` the content ``data`` at one instant, durably, by way of ``scratch`` in the same directory.

    Raises OSError, and removes ``scratch`` then.
    """
    scratch.unlink(missing_ok=True)
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_at(descriptor, memoryview(data), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def open_root(root: Path) -> Iterator[int]:
    """A descriptor of a cache's directory, for ``open_beneath``. Raises CacheNotFoundError."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CacheNotFoundError(f"{root}: no cache can be opened here: {error.strerror}; build it first") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_beneath(root: int, name: str) -> int:
    """Open the regular file ``name``, of at most one directory level, beneath the directory descriptor ``root``.

    No symbolic link is followed, and nothing is waited for (a FIFO, a device). The caller has checked that ``name`` has
    no ``..`` and is relative.

    Raises OSError; ELOOP or ENOTDIR for a link, EINVAL for what is not a regular file.
    """
    parent, _, base = name.rpartition("/")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    directory = os.open(parent, flags | os.O_DIRECTORY, dir_fd=root) if parent else root
    try:
        descriptor = os.open(base, flags | os.O_NONBLOCK, dir_fd=directory)
    finally:
        if parent:
            os.close(directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return descriptor


class DirectoryLock:
    """One holder per directory, across processes; given up by the kernel when the holder dies.

    The lock file is removed on release, so that a finished cache holds nothing but itself. A process that waited on
    a removed file notices, because its name no longer leads to the inode it locked, and starts over.
    """

    def __init__(self, directory: Path, *, wait_s: float = 0.0) -> None:
        """Take the lock, waiting ``wait_s`` seconds for it at most.

        Raises:
            CacheBusyError: another process, or another part of this one, holds it.
            CacheError: the directory cannot be written.
        """
        self._path = directory / LOCK_NAME
        self._descriptor: int | None = None
        deadline = time.monotonic() + wait_s
        with writing(self._path):
            while self._descriptor is None:
                self._descriptor = self._attempt()
                if self._descriptor is None and time.monotonic() >= deadline:
                    raise CacheBusyError(
                        f"{directory}: another builder holds this cache ({LOCK_NAME}); wait for it, or build elsewhere"
                    )
                if self._descriptor is None:
                    time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock up. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                self._path.unlink(missing_ok=True)  # while it is held, so that it is ours
            finally:
                os.close(descriptor)

    def _attempt(self) -> int | None:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_named(descriptor):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _is_named(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False
