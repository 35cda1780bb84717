"""Changes that know the structure of what they change, so that checks behind the first one are reached too."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from blake3 import blake3

from splitzip_aio.codec.layout import HEADER_BYTES
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.errors import CorruptDataError
from tests.codec.hostile import parts, seal

MOST_REPEATED_NODES = 1000
NUMBERS = (-(1 << 63), -4096, -1, 0, 1, 7, 8, 31, 32, 159, 160, 4095, 4096, 1 << 22, (1 << 22) + 1, 1 << 24)
NUMBERS += ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 64, 10**400)
TEXTS = ("", ".", "..", "../x", "/etc/passwd", "packs/../../x.szp", "packs/a.szp", "a\0b", "a\nb", "é" * 300, "\ud800")
TEXTS += (
    "BF16",
    "F4",
    "I64",
    "BOOL",
    "stored",
    "top16",
    "2,2,3",
    "4,4,4,4",
    "1",
    "0",
    "model.safetensors",
    "__metadata__",
)
JUNK: tuple[Any, ...] = (None, True, False, 0.5, -0.0, 1e308, [], {}, [[[[]]]], "x" * 5000, [0] * 2000)

FIELDS = (
    *((4, "H"), (6, "B"), (7, "B"), (8, "4B")),
    *((offset, "I") for offset in range(12, 48, 4)),
    *((48, "Q"), (56, "Q"), (64, "Q"), (72, "64B"), (136, "B"), (137, "15B")),
)
"""Offset and type of each field of a segment's header behind the magic; see docs/format.md."""


def places_of(content: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys or indices."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in list(items) for place in [(content, key), *places_of(value)]]


def mutate_json(content: Any, chance: random.Random) -> Any:
    """A copy with one to four changes."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = places_of(content)
        if not places:
            return copy.deepcopy(chance.choice(JUNK))
        container, key = chance.choice(places)
        _change(container, key, chance, lambda places=places: copy.deepcopy(_value(*chance.choice(places))))
    return content


def _value(container: Any, key: Any) -> Any:
    return container[key] if isinstance(container, dict) or key < len(container) else None


def _change(container: Any, key: Any, chance: random.Random, another: Callable[[], Any]) -> None:
    value = container[key]
    move = chance.randrange(8)
    if move == 0:
        container[key] = copy.deepcopy(chance.choice(JUNK))
    elif move == 1:
        container[key] = another()
    elif move == 2:
        del container[key]
    elif move == 3 and isinstance(container, list):
        container.insert(chance.randrange(len(container) + 1), another())
    elif move == 3:
        container[chance.choice(TEXTS)] = another()
    elif isinstance(value, bool) or not isinstance(value, int):
        container[key] = chance.choice(TEXTS) if isinstance(value, str) else _changed(value, chance)
    elif move < 6:
        container[key] = chance.choice(NUMBERS)
    else:
        container[key] = value + chance.choice((-4096, -160, -32, -1, 1, 32, 160, 4096, value))


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, list) and value:
        changed = list(value)
        chance.shuffle(changed)
        many = 300 if _nodes(value) < MOST_REPEATED_NODES else 2  # repeats of repeats would fill all memory
        return chance.choice((changed, changed[1:], [*value, *value], value * many))
    return copy.deepcopy(chance.choice(JUNK))


def _nodes(content: Any) -> int:
    """How many values there are in it."""
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return 1 + sum(map(_nodes, parts))


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes changed, cut out, or repeated."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed) + 1)
        stop = min(len(changed), at + chance.choice((1, 1, 4, 32, 1000)))
        move = chance.randrange(5)
        if move == 0:
            del changed[at:stop]
        elif move == 1:
            changed[at:at] = changed[at:stop]
        elif move == 2:
            changed[at:stop] = chance.randbytes(stop - at)
        elif move == 3:
            changed[at:stop] = chance.choice((b"\0", b"\xff", b"[", b"9", b"\\u")) * (stop - at)
        elif changed:
            changed[min(at, len(changed) - 1)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def parsed(data: bytes) -> Any:
    """The JSON, or None."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def dumped(content: Any) -> bytes:
    """JSON as compact as the writer's."""
    return json.dumps(content, separators=(",", ":")).encode("utf-8", "surrogatepass")


def mutate_manifest(data: bytes, chance: random.Random) -> bytes:
    """Another manifest, four times out of five with a checksum that agrees, as a forger would have it."""
    content = parsed(data)
    if not isinstance(content, dict) or chance.random() < 0.2:
        return mutate_bytes(data, chance)
    content.pop("checksum", None)
    content = mutate_json(content, chance)
    body = dumped(content)[:-1]
    return b'%s,"checksum":"%s"}\n' % (body, blake3(body).hexdigest().encode())


def mutate_checkpoint(data: bytes, chance: random.Random) -> bytes:
    """Another safetensors file, mostly with a length that fits its header."""
    length = int.from_bytes(data[:8], "little")
    content = parsed(data[8 : 8 + length])
    if content is None or chance.random() < 0.2:
        return mutate_bytes(data, chance)
    header = dumped(mutate_json(content, chance))
    stated = len(header) if chance.random() < 0.9 else chance.choice(NUMBERS) % (1 << 64)
    return stated.to_bytes(8, "little") + header + data[8 + length :]


def mutate_lines(data: bytes, chance: random.Random) -> bytes:
    """Other lines of JSON: changed, swapped, repeated or lost."""
    lines = data.splitlines(keepends=True)
    if not lines or chance.random() < 0.2:
        return mutate_bytes(data, chance)
    at = chance.randrange(len(lines))
    move = chance.randrange(4)
    if move == 0:
        chance.shuffle(lines)
    elif move == 1:
        lines.insert(chance.randrange(len(lines)), lines[at])
    elif move == 2:
        del lines[at]
    else:
        content = parsed(lines[at])
        lines[at] = mutate_bytes(lines[at], chance) if content is None else dumped(mutate_json(content, chance)) + b"\n"
    return b"".join(lines)


def mutate_segment(data: bytes, chance: random.Random) -> bytes:
    """Another segment: fields and planes changed, nine times out of ten with checksums of the bytes that agree."""
    if len(data) < HEADER_BYTES or chance.random() < 0.1:
        return mutate_bytes(data, chance)
    changed = np.frombuffer(bytearray(data), np.uint8)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if chance.random() < 0.5:
            _change_field(changed, chance)
        else:
            _change_plane(changed, chance)
    return seal(changed).tobytes() if chance.random() < 0.9 else changed.tobytes()


def _change_field(segment: np.ndarray, chance: random.Random) -> None:
    offset, kind = chance.choice(FIELDS)
    if len(kind) > 1:  # several bytes: one of them
        segment[offset + chance.randrange(int(kind[:-1]))] = chance.choice((0, 1, 2, 3, 4, 5, 127, 255))
        return
    memory = memoryview(segment)
    (value,) = struct.unpack_from("<" + kind, memory, offset)
    nearby = value + chance.choice((-32, -1, 1, 32, 160))
    limit = 1 << 8 * struct.calcsize(kind)
    struct.pack_into("<" + kind, memory, offset, (nearby if chance.random() < 0.5 else chance.choice(NUMBERS)) % limit)


def _change_plane(segment: np.ndarray, chance: random.Random) -> None:
    start, stop = HEADER_BYTES, segment.size
    with contextlib.suppress(CorruptDataError, IndexError):
        start, stop = chance.choice(list(parts(parse_header(segment.data, where="seed")).values())[1:])
    if start >= stop:
        return
    at = chance.randrange(start, stop)
    count = min(stop - at, chance.choice((1, 4, 64, 1 << 20)))
    fill = chance.choice((0, 0xFF, None))
    segment[at : at + count] = np.frombuffer(chance.randbytes(count), np.uint8) if fill is None else fill
