"""Builds that fail: one clear error, the old cache untouched, nothing left behind, and a rerun that works."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from splitzip_aio.cache import Progress, SplitZipShardCache, build_cache, builder
from splitzip_aio.cache.checkpoint import CheckpointReader
from splitzip_aio.cache.header import SourceTensor
from splitzip_aio.codec.coders import CpuSegmentCoder
from splitzip_aio.errors import CacheError, CacheExistsError, CheckpointError, ReadError, SourceChangedError
from tests.cache.samples import tree


class Disk:
    """A disk with room for so many bytes: ``os.pwrite`` writes what fits, then fails as the kernel does."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if not self.room and len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(descriptor, data[: self.room], offset)
        self.room -= written
        return written


def problem_of_build(checkpoint: Path, out: Path) -> str | None:
    """What the CacheError says that the build ends in; None if it succeeds."""
    try:
        build_cache(checkpoint, out, force=True)
    except CacheError as error:
        return str(error)
    return None


@pytest.mark.parametrize("before", ["absent", "empty", "cache"])
def test_disk_full_at_any_byte(
    tmp_path: Path, checkpoint: Path, cache: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = cache if before == "cache" else tmp_path / "out"
    if before == "empty":
        out.mkdir()
    total = sum(map(len, tree(cache).values())) + 20_000  # journal
    old = tree(out)
    failed = 0
    for room in [*range(40), *range(40, total, total // 25)]:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", Disk(room).pwrite)
            problem = problem_of_build(checkpoint, out)
        if problem is not None:
            failed += 1
            assert "No space left on device; free some space" in problem
            assert tree(out) == old
            assert out.exists() == (before != "absent")
    assert failed > 50
    build_cache(checkpoint, out, force=True)


@pytest.mark.parametrize("name", ["fsync", "ftruncate", "pwrite", "rename", "mkdir", "open"])
def test_any_call_may_fail(
    tmp_path: Path, checkpoint: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EDQUOT from the first call, the second, and so on until none is left: the old cache or the new, whole."""
    owner: object = Path if name in ("rename", "mkdir") else os
    real = getattr(owner, name)
    old = tree(cache)
    for count in range(1, 1000):
        calls = 0

        def failing(*args: object, _count: int = count, **kwargs: object) -> object:
            nonlocal calls
            writes = name != "open" or int(args[1]) & (os.O_CREAT | os.O_RDWR)  # type: ignore[call-overload]
            calls += bool(writes)
            if calls == _count and writes:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            problem = problem_of_build(checkpoint, cache)
        if problem is None:
            break
        assert "quota exceeded; free some space" in problem
        found = tree(cache)
        if found["manifest.json"] == old["manifest.json"]:
            assert found == old
        else:  # what failed is to make the new manifest durable
            assert (name, found.keys() >= old.keys() - {"manifest.json"}) == ("fsync", True)
            with SplitZipShardCache(cache) as opened:
                assert opened.verify().ok
            break
    assert count > 1
    build_cache(checkpoint, cache, force=True)
    build_cache(checkpoint, tmp_path / "expected")
    assert tree(cache) == tree(tmp_path / "expected")


TINY_FILE_LIMIT = """
import resource, sys
from splitzip_aio.cache import build_cache
from splitzip_aio.errors import CacheError
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    build_cache(sys.argv[1], sys.argv[2])
except CacheError as error:
    print(error)
"""


def test_file_size_limit_of_the_process(tmp_path: Path, checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TINY_FILE_LIMIT, str(checkpoint), str(tmp_path / "out")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large; free some space" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
def test_full_tmpfs(tmp_path: Path, checkpoint: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(CacheError, match="No space left"):
            build_cache(checkpoint, mount / "cache")
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Act as a user who may not do everything, which root may."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    yield
    os.seteuid(user)


def test_permission_denied(checkpoint: Path, cache: Path, request: pytest.FixtureRequest) -> None:
    content, built = checkpoint.read_bytes(), tree(cache)
    request.getfixturevalue("nobody")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        source = home / "s.safetensors"
        source.write_bytes(content)
        for name, data in built.items():
            (home / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            (home / "cache" / name).write_bytes(data)
        (home / "cache" / "packs").chmod(0o500)
        (home / "locked").mkdir(mode=0o500)
        for out in (home / "locked" / "cache", home / "locked", home / "cache"):
            with pytest.raises(CacheError, match="Permission denied; check"):
                build_cache(source, out, force=True)
        (home / "cache" / "packs").chmod(0o700)
        assert tree(home / "cache") == built
        assert list((home / "locked").iterdir()) == []
        (home / "cache").chmod(0o500)
        with pytest.raises(CacheExistsError, match="already holds"):  # also where nothing may be written
            build_cache(source, home / "cache")
        with SplitZipShardCache(home / "cache") as opened:
            entry = opened.tensors["ids"]
            with pytest.raises(CacheError, match="Permission denied"):
                opened.alias_slice(entry.key, "f", 0, entry.nbytes)
        (home / "cache").chmod(0o700)
        source.chmod(0)
        with pytest.raises(CheckpointError, match="Permission denied"):
            build_cache(source, home / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
def test_interruption_anywhere(cache: Path, checkpoint: Path, tmp_path: Path, error: type[BaseException]) -> None:
    old = tree(cache)
    for out in (cache, tmp_path / "out"):
        for stop in (1, 7, 29):
            calls = 0

            def interrupt(_: Progress, _stop: int = stop) -> None:
                nonlocal calls
                calls += 1
                if calls == _stop:
                    raise error

            with pytest.raises(error):
                build_cache(checkpoint, out, force=True, progress=interrupt)
            assert calls == stop
    assert tree(cache) == old
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_bad_source_makes_nothing(tmp_path: Path, checkpoint: Path, cache: Path, damage: str) -> None:
    old = tree(cache)
    if damage == "truncated":
        os.truncate(checkpoint, checkpoint.stat().st_size - 1)
    elif damage == "garbage":
        checkpoint.write_bytes(b"\1" * 300)
    else:
        checkpoint.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_cache(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_cache(checkpoint, cache, force=True)
    assert not (tmp_path / "out").exists()
    assert tree(cache) == old


def test_source_changed_while_reading(tmp_path: Path, checkpoint: Path, cache: Path) -> None:
    old = tree(cache)
    touched = False

    def touch(_: Progress) -> None:
        nonlocal touched
        if not touched:
            touched = True
            os.utime(checkpoint, ns=(1, 1))

    with pytest.raises(SourceChangedError, match=r"model\.safetensors: changed while it was read"):
        build_cache(checkpoint, cache, force=True, progress=touch)
    assert tree(cache) == old
    build_cache(checkpoint, cache, force=True)


def test_source_changed_between_the_passes_without_a_trace(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written through a mapping, say: same size, same times. The second reading is compared with the first."""
    read_into = CheckpointReader.read_into
    seen: set[tuple[str, int]] = set()

    def changing(self: CheckpointReader, tensor: SourceTensor, offset: int, out: NDArray[np.uint8]) -> None:
        read_into(self, tensor, offset, out)
        if tensor.name == "blocks.5.up.weight" and (tensor.name, offset) in seen:
            out[0] ^= 1
        seen.add((tensor.name, offset))

    def in_many_batches(device: str) -> CpuSegmentCoder:
        coder = CpuSegmentCoder()
        coder.batch_bytes = 1  # what fits one batch is read once
        return coder

    monkeypatch.setattr(builder, "open_coder", in_many_batches)
    monkeypatch.setattr(CheckpointReader, "read_into", changing)
    with pytest.raises(SourceChangedError, match=r"bytes 0 to .* changed while it was read"):
        build_cache(checkpoint, tmp_path / "out", segment_elements=1000)
    assert not (tmp_path / "out").exists()


def test_read_failure_of_a_source(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ReadError, match="Input/output error") as caught:
        build_cache(checkpoint, tmp_path / "out")
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "out").exists()


def test_few_descriptors_are_enough(tmp_path: Path, checkpoint: Path) -> None:
    """A builder holds one source, one pack, the journal and the lock open, whatever the number of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 6, hard))
    try:
        build_cache(checkpoint, tmp_path / "out", pack_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with SplitZipShardCache(tmp_path / "out") as opened:
        assert len(opened.manifest.packs) == len(opened.manifest.blobs) - 1
