"""Checking a whole cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from splitzip_aio.cache.decode import verify_entry
from splitzip_aio.cache.entry import Entry
from splitzip_aio.cache.pack_files import PackFiles
from splitzip_aio.cache.progress import Progress, ProgressCallback
from splitzip_aio.errors import CorruptDataError, ReadError

__all__ = ["Damage", "VerifyReport", "verify_cache"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Something wrong: what it is, the tensor it takes away and the pack it is in; None where there is none."""

    pack: str | None
    tensor: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``SplitZipShardCache.verify`` found.

    Attributes:
        tensors: tensors checked, damaged ones included.
        raw_bytes: bytes they decode to, shared ones once.
        damaged: what is wrong; empty if nothing is.
        seconds: how long it took.
    """

    tensors: int
    raw_bytes: int
    damaged: tuple[Damage, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every byte is right."""
        return not self.damaged


def verify_cache(
    files: PackFiles, entries: Iterable[Entry], packs: int, progress: ProgressCallback | None = None
) -> VerifyReport:
    """Check every pack and every tensor; damage is reported, not raised."""
    started = time.perf_counter()
    blobs: dict[str, list[Entry]] = {}
    for entry in entries:
        blobs.setdefault(entry.key, []).append(entry)
    total = sum(sharing[0].nbytes for sharing in blobs.values())
    damaged: list[Damage] = []
    done = 0
    for sharing in blobs.values():
        entry = sharing[0]
        try:
            reached = done
            for size in verify_entry(files, entry):
                reached += size
                if progress is not None:
                    progress(Progress(reached, total, entry.name))
        except (CorruptDataError, ReadError) as error:
            pack = files.path(entry.pack).name if entry.segments else None
            damaged += [Damage(pack, tied.name, str(error)) for tied in sharing]
        done += entry.nbytes
    damaged += _padding(files, blobs.values(), packs)
    return VerifyReport(sum(map(len, blobs.values())), total, tuple(damaged), time.perf_counter() - started)


def _padding(files: PackFiles, blobs: Iterable[list[Entry]], packs: int) -> Iterator[Damage]:
    """What is wrong after the last segment of each pack, where there should be zeros up to the pack's size."""
    ends = [0] * packs
    for entry, *_ in blobs:
        if entry.segments:
            ends[entry.pack] = max(ends[entry.pack], entry.offset + entry.encoded_bytes)
    for pack, end in enumerate(ends):
        excess = files.excess_bytes(pack)
        try:
            if excess != 0:
                yield Damage(files.path(pack).name, None, f"the pack has {excess:+d} bytes against the manifest")
            elif not files.is_zero(pack, end):
                yield Damage(files.path(pack).name, None, f"expected zeros from {end} on; no tensor is affected")
        except ReadError as error:
            yield Damage(files.path(pack).name, None, str(error))
