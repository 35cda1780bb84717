"""Manifests that are damaged, foreign or hostile: a ManifestError each, that names the field."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.cache.manifest import MAX_MANIFEST_BYTES, decode_manifest, encode_manifest
from splitzip_aio.errors import ManifestError, SplitZipError
from tests.cache.samples import edit_manifest, fuzz


def at(path: str, value: Any) -> Callable[[Any], None]:
    """An edit that sets the field at ``path``, such as ``packs.0.file``; a function gets the old value."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def edit(content: Any) -> None:
        for part in parents:
            content = content[part]
        content[last] = value(content[last]) if callable(value) else value

    return edit


def grow_shape(content: Any) -> None:
    """A tensor that claims 2**40 times as many bytes as its segments can hold."""
    tensor = next(tensor for tensor in content["tensors"] if tensor["shape"] == [48, 64])
    tensor["shape"] = [48, 64 << 40]


def vast_segment(content: Any) -> None:
    blob = max(content["blobs"], key=lambda blob: (blob["pack"], blob["offset"]))
    blob["segments"] = [1 << 60]
    blob["bytes"] = 1 << 60
    content["packs"][blob["pack"]]["bytes"] = 1 << 62


def tiny_segments(content: Any) -> None:
    """Segments of one element each would be more than memory holds."""
    content["segment_elements"] = 1
    vast_segment(content)


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "format 1": (at("format", 1), "format: expected 2, found 1"),
    "format 3": (at("format", 3), "format: expected 2, found 3"),
    "format text": (at("format", "2"), "format"),
    "format absent": (lambda content: content.pop("format"), "format"),
    "packs absent": (lambda content: content.pop("packs"), "packs"),
    "unknown field": (lambda content: content.update(extra=1), "extra"),
    "segment_elements 0": (at("segment_elements", 0), "segment_elements: expected 1 to 4194304, found 0"),
    "segment_elements vast": (at("segment_elements", 1 << 40), "segment_elements"),
    "segment_elements other": (at("segment_elements", 500), r"blobs\[\d+\]\.segments"),
    "source name": (at("sources.0.name", "../x"), r"sources\[0\]\.name"),
    "source size": (at("sources.0.size", -1), r"sources\[0\]\.size"),
    "source shorter than slices": (at("sources.0.size", 100), r"slices\[0\]"),
    "source hash": (at("sources.0.header_hash", "abc"), r"sources\[0\]\.header_hash"),
    "source twice": (lambda content: content["sources"].append(content["sources"][0]), r"sources\[1\]\.name"),
    "metadata": (at("sources.0.metadata", {"a": 1}), r"sources\[0\]\.metadata"),
    "pack ..": (at("packs.0.file", "packs/../../x.szp"), r"packs\[0\]\.file"),
    "pack dots": (at("packs.0.file", "packs/a..szp"), r"packs\[0\]\.file"),
    "pack absolute": (at("packs.0.file", "/etc/passwd"), r"packs\[0\]\.file: expected .*'/etc/passwd'"),
    "pack outside packs": (at("packs.0.file", "00000.szp"), r"packs\[0\]\.file"),
    "pack hidden": (at("packs.0.file", "packs/.building-00000.szp"), r"packs\[0\]\.file"),
    "pack NUL": (at("packs.0.file", "packs/a\0.szp"), r"packs\[0\]\.file"),
    "pack newline": (at("packs.0.file", "packs/a.szp\n"), r"packs\[0\]\.file"),
    "pack deeper": (at("packs.0.file", "packs/a/b.szp"), r"packs\[0\]\.file"),
    "pack twice": (at("packs.1", lambda _: _), r""),
    "pack bytes negative": (at("packs.0.bytes", -4096), r"packs\[0\]\.bytes"),
    "pack bytes odd": (at("packs.0.bytes", 4097), r"packs\[0\]\.bytes"),
    "pack bytes too few": (at("packs.0.bytes", 4096), r"blobs\[\d+\]\.offset"),
    "pack bytes 2**64": (at("packs.0.bytes", 1 << 64), r"packs\[0\]\.bytes"),
    "pack bytes float": (at("packs.0.bytes", 4096.0), r"packs\[0\]\.bytes"),
    "key": (at("blobs.0.key", "F" * 64), r"blobs\[0\]\.key"),
    "key twice": (lambda content: at("blobs.1.key", content["blobs"][0]["key"])(content), r"blobs\[1\]\.key"),
    "blob pack": (at("blobs.0.pack", 99), r"blobs\[0\]\.pack: expected 0 to \d+, found 99"),
    "blob pack negative": (at("blobs.0.pack", -1), r"blobs\[0\]\.pack"),
    "blob offset": (at("blobs.0.offset", 1 << 40), r"blobs\[0\]\.offset"),
    "blob offset negative": (at("blobs.0.offset", -32), r"blobs\[0\]\.offset"),
    "blob offset odd": (at("blobs.0.offset", 1), r"blobs\[0\]\.offset"),
    "blob overlap": (at("blobs.1.offset", 0), r"blobs\[1\]\.offset"),
    "blob bytes": (at("blobs.0.bytes", lambda size: size + 32), r"blobs\[0\]\.bytes: expected the sum"),
    "segment 0": (at("blobs.0.segments", [0]), r"blobs\[0\]\.segments\[0\]"),
    "segment odd": (at("blobs.0.segments", lambda sizes: [sizes[0] + 1]), r"blobs\[0\]\.segments\[0\]"),
    "segment negative": (at("blobs.0.segments", lambda sizes: [sizes[0] + 320, -320]), r"segments\[1\]"),
    "segments too many": (
        at("blobs.0.segments", lambda sizes: [sizes[0] - 160, 160] if sizes[0] >= 320 else [160, sizes[0] - 160]),
        r"blobs\[0\]\.segments",
    ),
    "schedule": (at("blobs.0.schedule", "9,9"), r"blobs\[0\]\.schedule"),
    "schedule spelled otherwise": (at("blobs.0.schedule", " STORED"), r"blobs\[0\]\.schedule"),
    "coverage": (at("blobs.0.coverage", 1.5), r"blobs\[0\]\.coverage"),
    "slice source": (at("blobs.0.slices.0.0", 7), r"blobs\[0\]\.slices\[0\]"),
    "slice offset": (at("blobs.0.slices.0.1", 1 << 50), r"blobs\[0\]\.slices\[0\]"),
    "slice negative": (at("blobs.0.slices.0.1", -8), r"blobs\[0\]\.slices\[0\]"),
    "slice size": (at("blobs.0.slices.0.2", 1), r"blobs\[0\]\.slices\[0\]"),
    "slice of three": (at("blobs.0.slices.0", [0, 1]), r"blobs\[0\]\.slices"),
    "slice twice": (
        lambda content: content["blobs"][0]["slices"].append(content["blobs"][0]["slices"][0]),
        "slices and aliases, number 1",
    ),
    "alias": (lambda content: content.update(aliases=[["../f", 0, 96, 0]]), r"aliases\[0\]"),
    "alias blob": (lambda content: content.update(aliases=[["f", 0, 96, 999]]), r"aliases\[0\]"),
    "name twice": (
        lambda content: at("tensors.1.name", content["tensors"][0]["name"])(content),
        r"tensors\[1\]\.name",
    ),
    "dtype": (at("tensors.0.dtype", "F7"), r"tensors\[0\]\.dtype"),
    "dtype of another schedule": (
        at("tensors.1.dtype", "I16"),
        r"tensors\[1\]\.dtype: expected one that schedule .* can code, found 'I16'",
    ),
    "shape negative": (at("tensors.0.shape", [-48]), r"tensors\[0\]\.shape"),
    "shape text": (at("tensors.0.shape", ["48"]), r"tensors\[0\]\.shape"),
    "shape overflows": (at("tensors.0.shape", [1 << 40, 1 << 40]), r"tensors\[0\]\.shape"),
    "shape beyond segments": (grow_shape, r"blobs\[\d+\]\.segments: expected \d+ sizes"),
    "tensor blob": (at("tensors.0.blob", 999), r"tensors\[0\]\.blob"),
    "tensor blob negative": (at("tensors.0.blob", -1), r"tensors\[0\]\.blob"),
    "blob nobody uses": (lambda content: content["tensors"].pop(), r"blobs\[\d+\]: expected a tensor"),
    "vast segment": (vast_segment, r"segments\[0\]"),
    "tiny segments": (tiny_segments, r"blobs\[\d+\]\.segments: expected \d+ sizes"),
}
del EDITS["pack twice"]


@pytest.mark.parametrize(("edit", "field"), EDITS.values(), ids=EDITS.keys())
def test_every_field_is_checked(cache: Path, edit: Callable[[Any], None], field: str) -> None:
    """Even with a checksum that is right for the forged content."""
    edit_manifest(cache, edit)
    with pytest.raises(ManifestError, match=field) as caught:
        SplitZipShardCache(cache)
    assert str(cache / "manifest.json") in str(caught.value)
    assert len(str(caught.value)) < 700


def test_tied_tensors_must_agree(cache: Path) -> None:
    def edit(content: Any) -> None:
        head = next(tensor for tensor in content["tensors"] if tensor["name"] == "head.weight")
        head["shape"] = [25, 128]

    edit_manifest(cache, edit)
    with pytest.raises(ManifestError, match=r"tensors\[\d+\]\.shape: expected BF16 \[50, 64\] as of its blob"):
        SplitZipShardCache(cache)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b'{"format":2}',
        b'{"format":' + b"9" * 9999,
    ],
    ids=range(10),
)
def test_not_a_manifest(cache: Path, content: bytes) -> None:
    (cache / "manifest.json").write_bytes(content)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        SplitZipShardCache(cache)


def test_vast_file_is_not_read(cache: Path) -> None:
    os.truncate(cache / "manifest.json", MAX_MANIFEST_BYTES + 1)
    with pytest.raises(ManifestError, match="at most"):
        SplitZipShardCache(cache)


def test_edited_by_hand(cache: Path) -> None:
    """Consistent, but not what was written: only the checksum can tell."""
    path = cache / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"name":"ids"', '"name":"sdi"'))
    with pytest.raises(ManifestError, match="checksum"):
        SplitZipShardCache(cache)
    path.write_text(json.dumps(json.loads(text)))
    with pytest.raises(ManifestError, match="checksum"):
        SplitZipShardCache(cache)
    path.write_text(text.rstrip("\n"))
    SplitZipShardCache(cache).close()


def test_every_bit_of_the_manifest_counts(cache: Path) -> None:
    data = (cache / "manifest.json").read_bytes()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(ManifestError):
            decode_manifest(bytes(damaged), "manifest")


def test_encoding_is_stable(cache: Path) -> None:
    data = (cache / "manifest.json").read_bytes()
    assert encode_manifest(decode_manifest(data, "manifest")) == data


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
numbers = st.sampled_from([-1, 0, 1, 31, 32, 159, 160, 4095, 4096, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64])


def paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON object is."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(inner for key, value in items for inner in paths(value, (*path, key)))]


@fuzz(400)
@given(data=st.data())
def test_a_forged_manifest_is_an_error_or_harmless(cache: Path, data: st.DataObject) -> None:
    """Any field replaced by anything, with a good checksum: a clear error, or a cache that reads within its packs."""
    original = (cache / "manifest.json").read_bytes()

    def edit(content: Any) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            *parents, last = data.draw(st.sampled_from(paths(content)[1:]))
            for part in parents:
                content = content[part]
            if data.draw(st.booleans()) or not isinstance(content[last], int):
                content[last] = data.draw(json_values | numbers)
            else:
                content[last] += data.draw(st.sampled_from([-4096, -32, -1, 1, 32, 4096]))
            break

    try:
        edit_manifest(cache, edit)
        with SplitZipShardCache(cache) as opened:
            for name in opened.tensors:
                opened.load_bytes(name)
    except SplitZipError:
        pass
    finally:
        (cache / "manifest.json").write_bytes(original)
