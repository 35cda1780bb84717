"""The journal of an unfinished build, from which the next one continues if this one is killed.

Lines of JSON: first the plan, which must be the same for the journal to be of use, then a line per tensor in place. A
line follows the bytes it speaks of, and whoever continues checks those bytes. Each begins with a hash of itself and of
all lines before it. So lines that are lost, torn, damaged or out of order cost work, no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

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
        self._link = b""
        with writing(self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor: int | None = os.open(self._path, flags, 0o666)

    def records(self) -> Iterator[Record]:
        """The records of a killed builder with the same plan; each is kept once the next is asked for."""
        assert self._descriptor is not None
        data = bytearray(os.fstat(self._descriptor).st_size)
        read_at(self._descriptor, memoryview(data), 0, self._path)
        end, link = 0, b""
        for number, line in enumerate(bytes(data).splitlines(keepends=True)):
            stated, _, body = line.removesuffix(b"\n").partition(b" ")
            link = _linked(link, body)
            if stated != link or not line.endswith(b"\n"):
                return
            try:
                record = msgspec.json.decode(body, type=Record if number else _Plan)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return
            if isinstance(record, _Plan) and record.plan != self._plan:
                return
            end += len(line)
            if isinstance(record, Record):
                yield record
            self._end, self._link = end, link

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
        body = msgspec.json.encode(record)
        self._link = _linked(self._link, body)
        line = b"%s %s\n" % (self._link, body)
        with writing(self._path):
            write_at(self._descriptor, memoryview(line), self._end)
        self._end += len(line)


def _linked(before: bytes, body: bytes) -> bytes:
    """What a line begins with, given what the line before it began with."""
    return blake3(before + body).hexdigest(length=8).encode()
