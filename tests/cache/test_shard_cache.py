"""Looking things up, aliasing, reading, verifying; and a cache whose files are not what they should be."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from splitzip_aio.cache import Progress, SplitZipShardCache, build_cache
from splitzip_aio.cache.files import DirectoryLock
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.errors import (
    CacheBusyError,
    CacheError,
    CacheNotFoundError,
    ClosedError,
    CorruptDataError,
    InvalidArgumentError,
    ManifestError,
    ReadError,
    SourceChangedError,
    UnsupportedError,
)
from tests.cache.samples import model, tree, weights, write_checkpoint


def as_tensor(name: str) -> torch.Tensor:
    dtype, shape, data = model()[name]
    target = {"BF16": torch.bfloat16, "I64": torch.int64, "F32": torch.float32}[dtype]
    return torch.frombuffer(bytearray(data), dtype=target).reshape(shape)


def test_lookup_by_content_name_and_slice(cache: Path, checkpoint: Path) -> None:
    raw = checkpoint.read_bytes()
    with SplitZipShardCache(cache) as opened:
        for name, entry in opened.tensors.items():
            assert opened.lookup_by_name(name) is entry
        for blob in opened.manifest.blobs:
            for source, offset, size in blob.slices:
                assert opened.manifest.sources[source].name == checkpoint.name
                entry = opened.lookup_by_slice(checkpoint.name, offset, size)
                assert entry is not None
                assert opened.load_bytes(entry).tobytes() == raw[offset : offset + size]
        assert opened.lookup(as_tensor("blocks.3.up.weight")) is opened.tensors["blocks.3.up.weight"]
        assert opened.lookup(as_tensor("blocks.3.up.weight").t().contiguous().t()) is not None
        assert opened.lookup(as_tensor("blocks.3.up.weight").reshape(64, 48)) is None
        assert opened.lookup(as_tensor("blocks.3.up.weight").view(torch.int16)) is None
        assert opened.lookup(torch.zeros(3)) is None
        assert opened.lookup_by_name("absent") is None
        assert opened.lookup_by_slice(checkpoint.name, 0, 10) is None
        assert opened.lookup_by_slice("absent", 0, 10) is None
        with pytest.raises(UnsupportedError):
            opened.lookup(torch.empty(2, device="meta"))


def test_tied_tensors_have_both_slices(cache: Path, checkpoint: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        (blob,) = [blob for blob in opened.manifest.blobs if len(blob.slices) == 2]
        found = {opened.lookup_by_slice(checkpoint.name, offset, size) for _, offset, size in blob.slices}
        assert len(found) == 1


def test_alias_is_persisted(cache: Path) -> None:
    tensor = as_tensor("blocks.0.up.weight")
    with SplitZipShardCache(cache) as opened, SplitZipShardCache(cache) as other:
        key = opened.tensors["embed.weight"].key
        assert opened.alias_slice(tensor, "elsewhere.bin", 7, 6144)
        assert not opened.alias_slice(tensor, "elsewhere.bin", 7, 6144)
        assert not other.alias_slice(tensor, "elsewhere.bin", 7, 6144)  # sees what others have added
        assert other.alias_slice(key, "elsewhere.bin", 6151, 6400)
        assert opened.alias_slice(key, "elsewhere.bin", 0, 6400)
        assert not opened.alias_slice(torch.zeros(5), "elsewhere.bin", 3, 20)  # not in the cache
        assert not opened.alias_slice("0" * 64, "elsewhere.bin", 3, 20)
        wanted = [(tensor, "elsewhere.bin", offset, 6144) for offset in (7, 8, 9)]
        assert opened.alias_slices(wanted) == 2
    with SplitZipShardCache(cache) as opened:
        for offset, size, name in (
            (7, 6144, "blocks.0.up.weight"),
            (6151, 6400, "embed.weight"),
            (0, 6400, "embed.weight"),
        ):
            assert opened.lookup_by_slice("elsewhere.bin", offset, size) is opened.tensors[name]
        assert len(opened.manifest.aliases) == 5
        assert opened.verify().ok
    assert not list(cache.glob(".*"))


@pytest.mark.parametrize(
    ("name", "offset", "size", "problem"),
    [
        ("elsewhere.bin", 7, 6143, "expected .*6144 bytes"),
        ("elsewhere.bin", -1, 6144, "offset"),
        ("a/b", 7, 6144, "file name"),
        ("..", 7, 6144, "file name"),
    ],
)
def test_alias_that_cannot_be(cache: Path, name: str, offset: int, size: int, problem: str) -> None:
    before = tree(cache)
    with SplitZipShardCache(cache) as opened, pytest.raises(InvalidArgumentError, match=problem):
        opened.alias_slice(as_tensor("blocks.0.up.weight"), name, offset, size)
    assert tree(cache) == before


def test_alias_that_contradicts(cache: Path, checkpoint: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        blob = opened.manifest.blobs[opened.manifest.tensors[0].blob]
        _, offset, size = blob.slices[0]
        with pytest.raises(InvalidArgumentError, match=r"holds? 'blocks\.0\.up\.bias'.*'blocks\.1\.up\.bias'"):
            opened.alias_slice(opened.tensors["blocks.1.up.bias"].key, checkpoint.name, offset, size)


def test_concurrent_aliases_are_all_kept(cache: Path) -> None:
    """Two openings, four threads each, as two processes would."""
    with SplitZipShardCache(cache) as one, SplitZipShardCache(cache) as two:
        key, size = one.tensors["embed.weight"].key, one.tensors["embed.weight"].nbytes
        added = []

        def work(number: int) -> None:
            opened = (one, two)[number % 2]
            added.extend(opened.alias_slice(key, f"file{number}", offset, size) for offset in range(5))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert added == [True] * 40
    with SplitZipShardCache(cache) as opened:
        assert len(opened.manifest.aliases) == 40


def test_alias_while_rebuilt_and_after(cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitzip_aio.cache.shard_cache._ALIAS_WAIT_S", 0.1)
    with SplitZipShardCache(cache) as opened:
        key, size = opened.tensors["embed.weight"].key, opened.tensors["embed.weight"].nbytes
        with DirectoryLock(cache), pytest.raises(CacheBusyError):
            opened.alias_slice(key, "f", 0, size)
        build_cache(checkpoint, cache, force=True)
        with pytest.raises(CacheError, match="rebuilt since it was opened"):
            opened.alias_slice(key, "f", 0, size)


def test_read_blob(cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        entry = opened.tensors["blocks.0.up.weight"]
        blob = opened.read_blob(entry)
        assert blob == opened.read_blob(entry.name) == opened.read_blob(as_tensor(entry.name), entry.encoded_bytes)
        assert len(blob) == entry.encoded_bytes
        assert len(entry.segments) == 4
        offset = 0
        for size in entry.segments:
            header = parse_header(memoryview(blob)[offset:], where="test")
            assert header.segment_bytes == size
            offset += size
        assert opened.read_blob("empty") == b""
        with pytest.raises(InvalidArgumentError, match=rf"expected {len(blob)} .*found 6144"):
            opened.read_blob(entry, 6144)
        for absent in ("absent", torch.zeros(3)):
            with pytest.raises(CacheError, match="the cache has no tensor"):
                opened.read_blob(absent)


def test_closed(cache: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    opened = SplitZipShardCache(cache)
    assert len(os.listdir("/proc/self/fd")) > descriptors
    opened.close()
    opened.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert opened.closed
    name = next(iter(opened.tensors))
    for act in (
        lambda: opened.read_blob(name),
        lambda: opened.load_tensor(name),
        opened.verify,
        lambda: opened.open_pack(0),
        lambda: opened.alias_slice(opened.tensors[name].key, "f", 0, opened.tensors[name].nbytes),
    ):
        with pytest.raises(ClosedError):
            act()


@pytest.mark.parametrize("root", ["absent", "empty", "file"])
def test_no_cache(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(CacheNotFoundError, match=root):
        SplitZipShardCache(tmp_path / root)


def test_sources_are_compared(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        opened.check_sources(tmp_path)
        opened.check_source(checkpoint)
        with pytest.raises(CacheError, match="was not built from"):
            opened.check_source(tmp_path / "other.safetensors")
        longer = model() | {"more": ("U8", (1,), b"x")}
        renamed = {name.replace("ids", "sdi"): content for name, content in model().items()}
        for changed, problem in ((longer, "bytes, found"), (renamed, "hash")):
            write_checkpoint(checkpoint, changed, {"format": "pt"})
            with pytest.raises(SourceChangedError, match=problem):
                opened.check_sources(tmp_path)
        checkpoint.write_bytes(b"junk")
        with pytest.raises(SourceChangedError, match="header length"):
            opened.check_sources(tmp_path)
        checkpoint.unlink()
        with pytest.raises(SourceChangedError, match="No such file"):
            opened.check_sources(tmp_path)


def test_verify_names_every_damaged_tensor(cache: Path) -> None:
    seen: list[Progress] = []
    with SplitZipShardCache(cache) as opened:
        report = opened.verify(seen.append)
        assert report.ok
        assert report.tensors == len(opened.tensors)
        assert seen[-1].done_bytes == seen[-1].total_bytes == report.raw_bytes
        entry = opened.tensors["embed.weight"]
        flip(cache / opened.manifest.packs[entry.pack].file, entry.offset + 500)
        damaged = opened.verify().damaged
        assert [damage.tensor for damage in damaged] == ["embed.weight", "head.weight"]
        assert all(damage.pack == opened.pack_path(entry.pack).name for damage in damaged)
        with pytest.raises(CorruptDataError, match=r"'head\.weight', segment 0: .*\.szp at"):
            opened.load_tensor("head.weight")
        assert opened.load_tensor("ids").equal(as_tensor("ids"))  # the others are well


def test_padding_is_verified(cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        pack = opened.manifest.packs[0]
        flip(cache / pack.file, pack.bytes - 1)
        (damage,) = opened.verify().damaged
        assert (damage.tensor, damage.pack) == (None, Path(pack.file).name)
        with (cache / pack.file).open("ab") as file:
            file.write(b"more")
        assert "+4 bytes" in opened.verify().damaged[0].problem


@pytest.mark.parametrize("lost", [1, 5000, None], ids=["a byte", "5000 bytes", "all"])
def test_truncated_pack(cache: Path, lost: int | None) -> None:
    with SplitZipShardCache(cache) as opened:
        pack = opened.manifest.packs[0]
        inside = [entry for entry in opened.tensors.values() if entry.segments and entry.pack == 0]
    size = 0 if lost is None else pack.bytes - 4096 + 4096 - lost
    end = max(entry.offset + entry.encoded_bytes for entry in inside)
    if lost == 1:
        size = end - 1
    os.truncate(cache / pack.file, size)
    with SplitZipShardCache(cache) as opened:
        hurt = {entry.name for entry in inside if entry.offset + entry.encoded_bytes > size}
        assert hurt
        assert {damage.tensor for damage in opened.verify().damaged} == hurt | {None}
        for name in opened.tensors:
            if name in hurt:
                for read in (opened.load_tensor, opened.read_blob):
                    with pytest.raises(CorruptDataError, match=rf"'{name}'.*{Path(pack.file).name}.*truncated"):
                        read(name)
            else:
                opened.load_tensor(name)


def test_missing_pack(cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        pack = opened.manifest.packs[1]
        inside = {entry.name for entry in opened.tensors.values() if entry.segments and entry.pack == 1}
    (cache / pack.file).unlink()
    with SplitZipShardCache(cache) as opened:
        assert {damage.tensor for damage in opened.verify().damaged} == inside | {None}
        with pytest.raises(CorruptDataError, match=r"expected a pack, found none"):
            opened.open_pack(1)
    shutil.rmtree(cache / "packs")
    with SplitZipShardCache(cache) as opened:
        assert not opened.verify().ok


def test_reader_keeps_its_cache_during_a_rebuild(cache: Path, tmp_path: Path) -> None:
    """Other content under the same names; the reader goes on with the old bytes, reopened descriptors too."""
    other = write_checkpoint(tmp_path / "other.safetensors", {"embed.weight": ("BF16", (9,), weights(9))})
    with SplitZipShardCache(cache) as opened:
        build_cache(other, cache, force=True)
        assert not opened.pack_path(0).exists()
        assert opened.verify().ok
        assert opened.load_tensor("embed.weight").equal(as_tensor("embed.weight"))
        descriptor = opened.open_pack(0, getattr(os, "O_DIRECT", 0))
        assert os.fstat(descriptor).st_size == opened.manifest.packs[0].bytes
        os.close(descriptor)
        with SplitZipShardCache(cache) as rebuilt:
            assert list(rebuilt.tensors) == ["embed.weight"]


def test_opening_while_rebuilt(cache: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Whoever opens in the middle of rebuilds gets one cache or the other, whole."""
    other = write_checkpoint(tmp_path / "other.safetensors", {"x": ("BF16", (900,), weights(900))})
    done = threading.Event()

    def rebuild() -> None:
        for round_ in range(12):
            build_cache((checkpoint, other)[round_ % 2], cache, force=True, segment_elements=1 << 20)
        done.set()

    thread = threading.Thread(target=rebuild)
    thread.start()
    opened_times = 0
    while not done.is_set():
        with SplitZipShardCache(cache) as opened:
            assert len(opened.tensors) in (1, len(model()))
            name = next(iter(opened.tensors))
            opened.load_bytes(name)
            opened_times += 1
    thread.join()
    assert opened_times > 5


@pytest.mark.parametrize("what", ["manifest.json", "pack", "packs"])
def test_links_out_of_the_root_are_not_followed(cache: Path, tmp_path: Path, what: str) -> None:
    with SplitZipShardCache(cache) as opened:
        path = opened.pack_path(0) if what == "pack" else cache / what
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(ManifestError, match="link"):
        SplitZipShardCache(cache)


def test_pack_that_is_a_fifo_or_a_directory(cache: Path) -> None:
    with SplitZipShardCache(cache) as opened:
        path = opened.pack_path(0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ManifestError, match="regular file"):
        SplitZipShardCache(cache)  # and does not wait for a writer
    path.unlink()
    path.mkdir()
    with pytest.raises(ManifestError, match="regular file"):
        SplitZipShardCache(cache)


def test_read_failure_is_told_from_damage(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with SplitZipShardCache(cache) as opened:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(ReadError, match="Input/output") as caught:
            opened.load_bytes("ids")
        assert caught.value.errno == 5
        assert str(caught.value.filename) == str(opened.pack_path(opened.tensors["ids"].pack))
        assert len(opened.verify().damaged) >= len(opened.tensors) - 1


def test_short_reads_are_continued(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return whole(descriptor, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with SplitZipShardCache(cache) as opened:
        assert opened.verify().ok


def test_swapped_segments_are_seen_by_verify(cache: Path) -> None:
    """Each is whole, but they are not where they belong; only the content key can tell."""
    with SplitZipShardCache(cache) as opened:
        entry = opened.tensors["blocks.2.up.weight"]
        extents = list(entry.extents())
        one, two = next((a, b) for a in extents for b in extents if a.offset < b.offset and a.nbytes == b.nbytes)
        path = opened.pack_path(entry.pack)
        data = bytearray(path.read_bytes())
        first, second = slice(one.offset, one.offset + one.nbytes), slice(two.offset, two.offset + two.nbytes)
        data[first], data[second] = data[second], data[first]
        path.write_bytes(data)
        (damage,) = opened.verify().damaged
        assert damage.tensor == entry.name
        assert "content key" in damage.problem


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def test_single_bit_flips_anywhere(cache: Path) -> None:
    """Every bit of the manifest's bytes in turn by position, and a sample of each pack: detected, or padding."""
    rng = np.random.default_rng(3)
    names = [name for name in tree(cache) if name != "manifest.json"]
    with SplitZipShardCache(cache) as opened:
        for name in names:
            for offset in rng.integers(0, (cache / name).stat().st_size, 60).tolist():
                bit = int(rng.integers(8))
                flip(cache / name, offset, bit)
                assert not opened.verify().ok
                flip(cache / name, offset, bit)
        assert opened.verify().ok
