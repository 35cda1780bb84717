from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitzip_aio.cache import SplitZipShardCache, SplitZipShardCacheBuilder, build_cache
from splitzip_aio.cache.files import write_at
from splitzip_aio.cache.manifest import save_manifest
from splitzip_aio.errors import CacheExistsError
from tests.cache.samples import tree

ROOT = Path(__file__).parents[2]
OPTIONS = {"segment_elements": 1000, "pack_bytes": 30_000}


def test_killed_builds_leave_the_old_cache_or_the_new_or_none() -> None:
    """Twenty builds; ``python -m tests.cache.crashes 1000`` for more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.crashes", "20"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = {outcome: int(count) for count, outcome in (line.split(maxsplit=1) for line in done.stdout.splitlines())}
    assert counts["killed"] >= 10


class Killed(BaseException):
    """Stands for the end of the process: nothing of the builder's own cleanup runs."""


def end(builder: SplitZipShardCacheBuilder) -> None:
    """What the kernel does when a process ends: close its files."""
    workspace, builder._workspace = builder._workspace, None
    if workspace is not None and workspace._lock._descriptor is not None:
        os.close(workspace._lock._descriptor)
        for file in (builder._writer, builder._journal):
            if file is not None:
                file.close()


@pytest.fixture
def no_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitZipShardCacheBuilder, "abort", end)


def build_until(count: int, checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Build, dying at write number ``count``; whether it came that far."""
    writes = 0

    def dying(descriptor: int, data: memoryview, offset: int) -> None:
        nonlocal writes
        writes += 1
        if writes == count:
            write_at(descriptor, data[: len(data) // 2], offset)
            raise Killed
        write_at(descriptor, data, offset)

    with monkeypatch.context() as patched:
        for module in ("packs", "journal", "files"):
            patched.setattr(f"splitzip_aio.cache.{module}.write_at", dying)
        try:
            build_cache(checkpoint, out, **OPTIONS)  # type: ignore[arg-type]
        except Killed:
            return True
    return False


@pytest.mark.usefixtures("no_cleanup")
def test_continues_after_death_at_any_write(
    tmp_path: Path, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome is that of a build that was never interrupted, and what was in place is not done again."""
    expected, resumed = tree(cache), []
    count = 1
    last = 29  # tensors, all in place before the manifest is written
    while build_until(count, checkpoint, tmp_path / f"out{count}", monkeypatch):
        out = tmp_path / f"out{count}"
        assert not (out / "manifest.json").exists()
        resumed.append(build_cache(checkpoint, out, **OPTIONS).resumed)  # type: ignore[arg-type]
        assert tree(out) == expected
        count += 5 if resumed[-1] < last - 1 else 1
    assert len(resumed) > 12
    # The last write is the manifest's, after the journal is gone.
    assert resumed[:-1] == sorted(resumed[:-1])
    assert resumed[-2:] == [last, 0]


@pytest.mark.usefixtures("no_cleanup")
@pytest.mark.parametrize("damage", ["other options", "other source", "torn journal", "torn pack", "no pack", "junk"])
def test_continues_only_what_is_good(
    tmp_path: Path, checkpoint: Path, cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert build_until(60, checkpoint, out, monkeypatch)
    journal, packs = out / ".building.jsonl", sorted((out / "packs").iterdir())
    options, expected, fewest = dict(OPTIONS), tree(cache), 0
    if damage == "other options":
        options["segment_elements"] = 999
        build_cache(checkpoint, tmp_path / "other", **options)  # type: ignore[arg-type]
        expected = tree(tmp_path / "other")
    elif damage == "other source":
        os.utime(checkpoint)
    elif damage == "torn journal":
        journal.write_bytes(journal.read_bytes()[:-5])
        fewest = 5
    elif damage == "torn pack":
        data = bytearray(packs[-1].read_bytes())
        data[len(data) // 2] ^= 1
        packs[-1].write_bytes(data)
        fewest = 3
    elif damage == "no pack":
        packs[0].unlink()
    else:
        journal.write_bytes(b"\0" * 5000 + b"\n")
    report = build_cache(checkpoint, out, **options)  # type: ignore[arg-type]
    assert fewest <= report.resumed < 29
    assert bool(report.resumed) == bool(fewest)
    assert tree(out) == expected


@pytest.mark.usefixtures("no_cleanup")
def test_death_after_the_manifest_leaves_old_packs_to_the_next(
    cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(root: Path, manifest: object) -> int:
        save_manifest(root, manifest)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("splitzip_aio.cache.workspace.save_manifest", die)
        with pytest.raises(Killed):
            build_cache(checkpoint, cache, force=True)
    with SplitZipShardCache(cache) as opened:
        assert opened.verify().ok
        named = {"manifest.json", *(pack.file for pack in opened.manifest.packs)}
    assert tree(cache).keys() > named
    with pytest.raises(CacheExistsError):
        build_cache(checkpoint, cache)  # refused, but tidies up
    assert tree(cache).keys() == named


@pytest.mark.usefixtures("no_cleanup")
def test_builder_without_a_plan_starts_over(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert build_until(60, checkpoint, out, monkeypatch)
    SplitZipShardCacheBuilder(out).finish()
    assert tree(out).keys() == {"manifest.json"}
