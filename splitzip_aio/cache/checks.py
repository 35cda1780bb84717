"""What must hold between the fields of a manifest, so that following it reads nothing that is not there.

The checks bound what a reader allocates by what the packs can hold: no schedule codes an element in fewer than half
of its bits, or in more than four times as many.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from splitzip_aio.cache.segments import segment_count, segment_range
from splitzip_aio.codec.dtypes import DTYPE_BITS, tensor_bytes
from splitzip_aio.codec.formats import element_format
from splitzip_aio.codec.layout import HEADER_BYTES, MAX_SEGMENT_ELEMENTS, SEGMENT_ALIGN
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.errors import InvalidArgumentError, ManifestError

if TYPE_CHECKING:
    from splitzip_aio.cache.manifest import Blob, Manifest, Pack, Source, Tensor

__all__ = ["PACK_ALIGN", "check_manifest", "is_file_name"]

PACK_ALIGN = 4096
_MAX_FILE_BYTES = 1 << 63
_MOST_GAIN = 2  # F8_E5M2 in tiers of one bit: 3 + 1 of 8
_MOST_LOSS = 4  # F8_E4M3 in four tiers of four bits, all missed: 4 + 16 + 8 of 8
_HASH = re.compile(r"[0-9a-f]{64}")
_PACK_NAME = re.compile(r"packs/[0-9A-Za-z][0-9A-Za-z._-]{0,200}\.szp")


def check_manifest(manifest: Manifest, where: str) -> None:
    """Refuse a manifest that contradicts itself; ``where`` names it.

    Raises:
        ManifestError: names the field, what was expected and what was found.
    """
    _Checks(manifest, where).run()


def is_file_name(name: str) -> bool:
    """Whether a name is one of a file, without directories."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


class _Checks:
    def __init__(self, manifest: Manifest, where: str) -> None:
        self.manifest = manifest
        self.where = where
        self.schedules: dict[str, Schedule] = {}  # those that blobs name

    def fail(self, field: str, expected: str, found: Any) -> NoReturn:
        shown = repr(found)
        shown = shown if len(shown) <= 100 else f"{shown[:97]}..."
        raise ManifestError(
            f"{self.where}: {field}: expected {expected}, found {shown}; rebuild the cache, or fetch it again"
        )

    def require(self, holds: bool, field: str, expected: str, found: Any) -> None:
        if not holds:
            self.fail(field, expected, found)

    def in_range(self, value: int, least: int, most: int, field: str) -> None:
        self.require(least <= value <= most, field, f"{least} to {most}", value)

    def distinct(self, values: Iterable[Hashable], field: Callable[[int], str]) -> None:
        seen: set[Hashable] = set()
        for place, value in enumerate(values):
            self.require(value not in seen, field(place), "no duplicate", value)
            seen.add(value)

    def run(self) -> None:
        manifest = self.manifest
        self.in_range(manifest.segment_elements, 1, MAX_SEGMENT_ELEMENTS, "segment_elements")
        for place, source in enumerate(manifest.sources):
            self.source(source, f"sources[{place}]")
        self.distinct((source.name for source in manifest.sources), lambda place: f"sources[{place}].name")
        for place, pack in enumerate(manifest.packs):
            self.pack(pack, f"packs[{place}]")
        self.distinct((pack.file for pack in manifest.packs), lambda place: f"packs[{place}].file")
        for place, blob in enumerate(manifest.blobs):
            self.blob(blob, f"blobs[{place}]")
        self.distinct((blob.key for blob in manifest.blobs), lambda place: f"blobs[{place}].key")
        self.no_overlap()
        self.distinct((tensor.name for tensor in manifest.tensors), lambda place: f"tensors[{place}].name")
        owners = self.tensors()
        self.slices(owners)

    def source(self, source: Source, field: str) -> None:
        self.file_name(source.name, f"{field}.name")
        self.in_range(source.size, 8, _MAX_FILE_BYTES, f"{field}.size")
        self.hash(source.header_hash, f"{field}.header_hash")

    def file_name(self, name: str, field: str) -> None:
        self.require(is_file_name(name), field, "a file name without directories", name)

    def hash(self, text: str, field: str) -> None:
        self.require(_HASH.fullmatch(text) is not None, field, "64 hexadecimal digits", text)

    def pack(self, pack: Pack, field: str) -> None:
        named = _PACK_NAME.fullmatch(pack.file) is not None and ".." not in pack.file
        self.require(named, f"{field}.file", "packs/NAME.szp", pack.file)
        self.in_range(pack.bytes, PACK_ALIGN, _MAX_FILE_BYTES, f"{field}.bytes")
        self.require(pack.bytes % PACK_ALIGN == 0, f"{field}.bytes", f"a multiple of {PACK_ALIGN}", pack.bytes)

    def blob(self, blob: Blob, field: str) -> None:
        self.hash(blob.key, f"{field}.key")
        for place, size in enumerate(blob.segments):
            whole = size >= HEADER_BYTES and size % SEGMENT_ALIGN == 0
            self.require(
                whole, f"{field}.segments[{place}]", f"a multiple of {SEGMENT_ALIGN} from {HEADER_BYTES} on", size
            )
        total = sum(blob.segments)
        self.require(blob.bytes == total, f"{field}.bytes", f"the sum of its segments, {total}", blob.bytes)
        if blob.segments:
            self.in_range(blob.pack, 0, len(self.manifest.packs) - 1, f"{field}.pack")
            end = self.manifest.packs[blob.pack].bytes
            self.in_range(blob.offset, 0, end - blob.bytes, f"{field}.offset")
            aligned = blob.offset % SEGMENT_ALIGN == 0
            self.require(aligned, f"{field}.offset", f"a multiple of {SEGMENT_ALIGN}", blob.offset)
        else:
            self.require(blob.pack == blob.offset == 0, field, "pack and offset 0 without segments", blob.offset)
        self.schedule(blob.schedule, f"{field}.schedule")
        if blob.coverage is not None:
            self.require(0.0 <= blob.coverage <= 1.0, f"{field}.coverage", "0 to 1", blob.coverage)

    def schedule(self, text: str, field: str) -> None:
        if text in self.schedules:
            return
        try:
            schedule = Schedule.parse(text)
        except InvalidArgumentError:
            schedule = None
        if schedule is None or str(schedule) != text:
            self.fail(field, "a schedule such as '2,2,3' or 'stored'", text)
        self.schedules[text] = schedule

    def no_overlap(self) -> None:
        placed = sorted(
            (blob.pack, blob.offset, blob.bytes, place)
            for place, blob in enumerate(self.manifest.blobs)
            if blob.segments
        )
        for (pack, offset, size, _), (next_pack, next_offset, _, place) in itertools.pairwise(placed):
            apart = pack != next_pack or offset + size <= next_offset
            self.require(
                apart, f"blobs[{place}].offset", f"{offset + size} or more, after the blob before it", next_offset
            )

    def tensors(self) -> list[Tensor]:
        """Check every tensor against its blob; return a tensor of each blob."""
        owners: list[Tensor | None] = [None] * len(self.manifest.blobs)
        for place, tensor in enumerate(self.manifest.tensors):
            field = f"tensors[{place}]"
            self.require(tensor.dtype in DTYPE_BITS, f"{field}.dtype", f"one of {', '.join(DTYPE_BITS)}", tensor.dtype)
            self.in_range(tensor.blob, 0, len(owners) - 1, f"{field}.blob")
            owner = owners[tensor.blob]
            if owner is None:
                self.segments(tensor, field)
                owners[tensor.blob] = tensor
            else:
                same = (owner.dtype, owner.shape) == (tensor.dtype, tensor.shape)
                self.require(same, f"{field}.shape", f"{owner.dtype} {list(owner.shape)} as of its blob", tensor.shape)
        unused = next((place for place, owner in enumerate(owners) if owner is None), None)
        self.require(unused is None, f"blobs[{unused}]", "a tensor that uses it", None)
        return [owner for owner in owners if owner is not None]

    def segments(self, tensor: Tensor, field: str) -> None:
        """The tensor's segments are as many as its size asks for, and each is large enough for what it decodes to."""
        try:
            nbytes = tensor_bytes(tensor.dtype, tensor.shape)
        except ValueError as error:
            self.fail(f"{field}.shape", "a possible shape", str(error))
        blob = self.manifest.blobs[tensor.blob]
        applies = self.schedules[blob.schedule].applies_to(element_format(tensor.dtype))
        self.require(applies, f"{field}.dtype", f"one that schedule {blob.schedule} can code", tensor.dtype)
        stored = blob.segments
        count = segment_count(nbytes, tensor.dtype, self.manifest.segment_elements)
        self.require(len(stored) == count, f"blobs[{tensor.blob}].segments", f"{count} sizes", len(stored))
        for place, size in enumerate(stored):
            out = segment_range(place, nbytes, tensor.dtype, self.manifest.segment_elements)
            self.in_range(
                size,
                len(out) // _MOST_GAIN,
                len(out) * _MOST_LOSS + PACK_ALIGN,
                f"blobs[{tensor.blob}].segments[{place}]",
            )

    def slices(self, owners: Sequence[Tensor]) -> None:
        manifest = self.manifest
        for place, (blob, owner) in enumerate(zip(manifest.blobs, owners, strict=True)):
            nbytes = tensor_bytes(owner.dtype, owner.shape)
            for number, (source, offset, size) in enumerate(blob.slices):
                field = f"blobs[{place}].slices[{number}]"
                self.in_range(source, 0, len(manifest.sources) - 1, field)
                self.require(size == nbytes > 0, field, f"the {nbytes} bytes of its tensor", size)
                self.in_range(offset, 8, manifest.sources[source].size - size, field)
        for place, alias in enumerate(manifest.aliases):
            field = f"aliases[{place}]"
            self.file_name(alias.file, field)
            self.in_range(alias.blob, 0, len(owners) - 1, field)
            nbytes = tensor_bytes(owners[alias.blob].dtype, owners[alias.blob].shape)
            self.require(alias.size == nbytes > 0, field, f"the {nbytes} bytes of its tensor", alias.size)
            self.in_range(alias.offset, 0, _MAX_FILE_BYTES, field)
        self.distinct(
            [
                (manifest.sources[source].name, offset, size)
                for blob in manifest.blobs
                for source, offset, size in blob.slices
            ]
            + [(alias.file, alias.offset, alias.size) for alias in manifest.aliases],
            lambda place: f"slices and aliases, number {place}",
        )
