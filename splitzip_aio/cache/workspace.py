"""The directory a cache is built in: who may, what is already there, and what is left behind, namely nothing.

Until the manifest is replaced, a build touches no file that a finished cache consists of. So at any instant the
directory holds the old cache or the new one, or none if there was none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from splitzip_aio.cache.files import LOCK_NAME, DirectoryLock, open_root, writing
from splitzip_aio.cache.journal import JOURNAL_NAME
from splitzip_aio.cache.manifest import (
    MANIFEST_NAME,
    SCRATCH_NAME,
    Manifest,
    load_manifest,
    save_manifest,
)
from splitzip_aio.cache.packs import FINISHED_PACK, PACK_DIRECTORY, UNFINISHED_PACK
from splitzip_aio.errors import CacheError, CacheExistsError, CacheNotFoundError, ManifestError

__all__ = ["Workspace"]

_OWN_NAMES = frozenset({MANIFEST_NAME, PACK_DIRECTORY, LOCK_NAME, SCRATCH_NAME, JOURNAL_NAME})


class Workspace:
    """Exclusive use of ``root`` until ``commit`` or ``rollback``, one of which must be called.

    Raises:
        CacheExistsError: there is something that is not a cache, or a cache and not ``force``.
        CacheBusyError: another builder is at work here.
        CacheError: the directory cannot be made or written.
    """

    def __init__(self, root: Path, *, force: bool) -> None:
        self.root = root
        _refuse_foreign(root)
        if not force and _has_manifest(root):
            _tidy(root)
            raise CacheExistsError(f"{root}: already holds a cache; build with force=True (--force) to replace it")
        self._made: list[Path] = []
        self._lock = self._enter()
        try:
            _refuse_foreign(root)
            if not force and _has_manifest(root):
                raise CacheExistsError(f"{root}: another builder has just finished a cache here")
            _remove_strays(root)
            self._kept = _finished_packs(root)
        except BaseException:
            self._leave()
            raise

    def drop_unfinished(self) -> None:
        """Remove what a killed builder left, as when nothing of it is of use. Raises CacheError."""
        with writing(self.root):
            _remove(self.root, [JOURNAL_NAME, *_unfinished(self.root)])

    def commit(self, manifest: Manifest) -> int:
        """Replace the manifest, remove what only the old one used, and leave; return the manifest's size in bytes.

        Raises CacheError, and then the old manifest is still in place.
        """
        with writing(self.root / MANIFEST_NAME):
            size = save_manifest(self.root, manifest)
        # The new cache is complete: what cannot be removed now is removed by the next build.
        with contextlib.suppress(OSError):
            _remove_strays(self.root)
            _remove(self.root, _unfinished(self.root))
        self._lock.release()
        return size

    def rollback(self) -> None:
        """Remove all that this build made, and leave."""
        with contextlib.suppress(OSError):
            # The manifest may be the new one already, if what failed is to make that durable.
            new = _finished_packs(self.root) - self._kept - _named_packs(self.root)
            _remove(self.root, [JOURNAL_NAME, SCRATCH_NAME, *_unfinished(self.root), *new])
        self._leave()

    def _enter(self) -> DirectoryLock:
        while True:
            with writing(self.root):
                missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
                self.root.mkdir(parents=True, exist_ok=True)
                self._made += missing
            try:
                return DirectoryLock(self.root)
            except CacheError as error:
                # A builder that failed here removes the directory it made, maybe between our two calls.
                if not isinstance(error.__cause__, FileNotFoundError):
                    self._remove_made()
                    raise

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            if not _has_manifest(self.root):
                (self.root / PACK_DIRECTORY).rmdir()
        self._lock.release()
        self._remove_made()

    def _remove_made(self) -> None:
        with contextlib.suppress(OSError):
            for directory in self._made:
                directory.rmdir()


def _refuse_foreign(root: Path) -> None:
    """Refuse a directory with files that are not ours, unless there is a good manifest among them."""
    try:
        names = set(os.listdir(root))
        packs = set(os.listdir(root / PACK_DIRECTORY)) if PACK_DIRECTORY in names else set()
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise CacheExistsError(f"{error.filename}: is a file, expected a directory; choose another output") from error
    except OSError as error:
        raise CacheError(f"{root}: cannot be read: {error.strerror}; check its permissions") from error
    foreign = (names - _OWN_NAMES) | {name for name in packs if not _is_pack(name)}
    if (root / PACK_DIRECTORY).is_symlink():
        foreign.add(PACK_DIRECTORY)  # leads out of the root, where readers do not follow
    if foreign and _manifest(root) is None:
        raise CacheExistsError(
            f"{root}: is not a cache: it holds {min(foreign)!r}; choose an empty or new directory, or remove this one"
        )


def _tidy(root: Path) -> None:
    """Remove what a dead builder left beside a complete cache, if this process may."""
    with contextlib.suppress(CacheError, OSError), DirectoryLock(root):
        _remove_strays(root)
        _remove(root, [JOURNAL_NAME, *_unfinished(root)])


def _remove_strays(root: Path) -> None:
    """Remove a manifest that was not yet in place, and finished packs that the manifest does not name."""
    _remove(root, [SCRATCH_NAME])
    if _has_manifest(root) and _manifest(root) is None:
        return  # of another release, or damaged: what it names is not for us to guess
    _remove(root, _finished_packs(root) - _named_packs(root))


def _has_manifest(root: Path) -> bool:
    return os.path.lexists(root / MANIFEST_NAME)


def _manifest(root: Path) -> Manifest | None:
    try:
        with open_root(root) as directory:
            return load_manifest(root, directory)
    except (CacheNotFoundError, ManifestError):
        return None


def _named_packs(root: Path) -> set[str]:
    manifest = _manifest(root)
    return {pack.file for pack in manifest.packs} if manifest else set()


def _finished_packs(root: Path) -> set[str]:
    return {f"{PACK_DIRECTORY}/{name}" for name in _pack_names(root) if FINISHED_PACK.fullmatch(name)}


def _unfinished(root: Path) -> list[str]:
    return [f"{PACK_DIRECTORY}/{name}" for name in _pack_names(root) if UNFINISHED_PACK.fullmatch(name)]


def _pack_names(root: Path) -> list[str]:
    try:
        return os.listdir(root / PACK_DIRECTORY)
    except FileNotFoundError:
        return []


def _is_pack(name: str) -> bool:
    return bool(FINISHED_PACK.fullmatch(name) or UNFINISHED_PACK.fullmatch(name))


def _remove(root: Path, names: Iterable[str]) -> None:
    for name in names:
        (root / name).unlink(missing_ok=True)
