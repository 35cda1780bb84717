"""The journal of an unfinished build, from which the next one continues if this one is killed.

JSON lines: first the plan, which must be the same for the journal to be of use, then a line per tensor in place. A
line follows the bytes it speaks of, and whoever continues checks those bytes: lost or torn lines cost work, no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from splitzip_aio.cache.files import read_at, write_at, writing
from splitzip_aio.cache.manifest import Blob, Tensor

__all__ = ["JOURNAL_NAME", "Journal", "Record"]

JOURNAL_NAME = ".building.jsonl"


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor in place; ``origin`` is its (source index, offset), ``blob`` its blob unless that is an earlier one."""

    tensor: Tensor
    origin: tuple[int, int] | None = None
    blob: Blob | None = None


class _Plan(msgspec.Struct, frozen=True):
    plan: str


class Journal:
    """Appends records beneath ``root``, after those that ``records`` accepted. Close it."""

    def __init__(self, root: Path, plan: str) -> None:
        self._path = root / JOURNAL_NAME
        self._plan = plan
        self._end = 0
        with writing(self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor: int | None = os.open(self._path, flags, 0o666)

    def records(self) -> Iterator[Record]:
        """The records of a killed builder with the same plan; each is kept once the next is asked for."""
        assert self._descriptor is not None
        data = bytearray(os.fstat(self._descriptor).st_size)
        read_at(self._descriptor, memoryview(data), 0, self._path)
        end = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            try:
                if not line.endswith(b"\n"):
                    return
                record = msgspec.json.decode(line, type=Record if number else _Plan)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return
            if isinstance(record, _Plan) and record.plan != self._plan:
                return
            end += len(line)
            if isinstance(record, Record):
                yield record
            self._end = end

    def start(self) -> None:
        """Drop what was not accepted, so that the next record follows what was."""
        assert self._descriptor is not None
        with writing(self._path):
            os.ftruncate(self._descriptor, self._end)
        if self._end == 0:
            self._append(_Plan(self._plan))

    def append(self, record: Record) -> None:
        """Note that a tensor is in place."""
        self._append(record)

    def close(self, *, remove: bool = False) -> None:
        """Close the file, and remove it if asked. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
            if remove:
                self._path.unlink(missing_ok=True)

    def _append(self, record: Record | _Plan) -> None:
        assert self._descriptor is not None
        line = msgspec.json.encode(record) + b"\n"
        with writing(self._path):
            write_at(self._descriptor, memoryview(line), self._end)
        self._end += len(line)
