"""Single flipped bits in every part of a cache: each is noticed before a lease is handed out.

A flipped bit of the manifest must keep the cache from opening. One in a part of a segment must fail the layers that the
segment is in, by an error that names the pack. Padding, which nothing depends on, is left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.errors import CorruptDataError, ManifestError
from splitzip_aio.transport import Transport, open_transport
from tests.codec.hostile import parts
from tests.transport.samples import LAYER_BYTES, Sample

CODEBOOKS = (72, 136)
"""Where in a segment's header codebooks are; see docs/format.md."""


@dataclass(frozen=True)
class Place:
    """So many bits from byte ``start`` of a file on, which part of a cache they are, and the layers that need them."""

    part: str
    path: Path
    start: int
    bits: int
    layers: tuple[str, ...] = ()


@dataclass
class Flips:
    """How many were noticed, by part, and those that were not."""

    noticed: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The counts as text."""
        rows = [f"{count:8d}  noticed in {part}" for part, count in sorted(self.noticed.items())]
        return [*rows, f"{sum(self.noticed.values()):8d}  noticed in all, {len(self.missed)} missed", *self.missed]


def flip_many(sample: Sample, count: int, seed: int, found: Flips) -> None:
    """Flip so many bits, one after another, the parts taking turns."""
    chance = random.Random(seed)
    by_part: dict[str, list[Place]] = {}
    for place in places(sample.root):
        by_part.setdefault(place.part, []).append(place)
    names = sorted(by_part)

    async def main() -> None:
        async with open_transport(
            sample.root, device="cpu", ring_bytes="1MiB", arena_bytes=LAYER_BYTES, driver="threads", io="buffered"
        ) as transport:
            for number in range(count):
                place = chance.choice(by_part[names[number % len(names)]])
                number_of_byte, bit = divmod(chance.randrange(place.bits), 8)
                at = place.start + number_of_byte
                flip(place.path, at, bit)
                noticed = await notices(sample, transport, place, chance)
                flip(place.path, at, bit)
                if noticed:
                    found.noticed[place.part] += 1
                else:
                    found.missed.append(f"{place.part}: byte {at} of {place.path.name}, bit {bit}")
            for layer in transport.layers:
                await sample.check_prefetch(transport, layer)

    anyio.run(main)


async def notices(sample: Sample, transport: Transport, place: Place, chance: random.Random) -> bool:
    """Whether the damage is an error, before anything is handed out."""
    if not place.layers:
        try:
            SplitZipShardCache(place.path.parent).close()
        except ManifestError:
            return True
        return False
    layer = chance.choice(place.layers)
    other = chance.choice([each for each in transport.layers if each not in place.layers])
    await sample.check_prefetch(transport, other)  # which also leaves the arena without the layer
    try:
        (await transport.prefetch(layer)).release()
    except CorruptDataError as error:
        return str(place.path) in str(error)
    return False


def places(root: Path) -> Iterator[Place]:
    """Every part of a cache that is not padding."""
    manifest = root / "manifest.json"
    yield Place("manifest", manifest, 0, 8 * manifest.stat().st_size)
    with SplitZipShardCache(root) as cache:
        users: dict[str, list[str]] = {}
        for entry in cache.tensors.values():
            users.setdefault(entry.key, []).append(entry.layer)
        for entry in {entry.key: entry for entry in cache.tensors.values()}.values():
            path = cache.pack_path(entry.pack) if entry.segments else manifest
            for extent in entry.extents():
                with path.open("rb") as file:
                    file.seek(extent.offset)
                    data = file.read(extent.nbytes)
                for part, start, bits in _named(data):
                    yield Place(part, path, extent.offset + start, bits, tuple(dict.fromkeys(users[entry.key])))


def _named(segment: bytes) -> Iterator[tuple[str, int, int]]:
    """Each part of a segment: its name, its first byte, and how many bits it has; the last byte may have more."""
    header = parse_header(segment, where="sample")
    for part, (start, stop) in parts(header).items():
        if part == "header":
            yield "header", start, 8 * CODEBOOKS[0]
            yield "codebook", CODEBOOKS[0], 8 * (CODEBOOKS[1] - CODEBOOKS[0])
            yield "header", CODEBOOKS[1], 8 * (stop - CODEBOOKS[1])
        elif part == "tail":
            yield "escapes", start, header.tail_bits
        elif not part.startswith("padding"):
            yield part, start, 8 * (stop - start)


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
