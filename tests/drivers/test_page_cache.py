"""What the kernel says is cached, by either call."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitzip_aio.drivers import page_cache
from splitzip_aio.drivers.files import direct_support
from splitzip_aio.drivers.page_cache import PageCache

PAGE = mmap.PAGESIZE
PAGES = 4096


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A file of 16 MiB less a few bytes, all of it cached, none of it dirty."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * PAGE - 100))
    opened = os.open(path, os.O_RDWR)
    if not direct_support(opened).supported:
        os.close(opened)
        pytest.skip("this file system lives in memory")
    os.fsync(opened)
    yield opened
    os.close(opened)


@pytest.fixture(params=["cachestat", "mincore"])
def cache(request: pytest.FixtureRequest, descriptor: int, monkeypatch: Any) -> Iterator[PageCache]:
    if request.param == "mincore":
        monkeypatch.setattr(PageCache, "_cachestat", lambda *_: -errno.ENOSYS)
    found = PageCache(descriptor, os.fstat(descriptor).st_size)
    if found.method != request.param:
        pytest.skip("no cachestat here")
    yield found
    found.close()
    found.close()


def drop(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def test_cached_is_what_is_cached_to_its_last_page(cache: PageCache, descriptor: int) -> None:
    assert cache.reason is None
    assert cache.holds(0, PAGES * PAGE)
    assert cache.holds(5 * PAGE + 1, 1)
    assert cache.holds((PAGES - 1) * PAGE, 10 * PAGE)  # past the end of the file there is nothing to hold
    assert not cache.holds(PAGES * PAGE, PAGE)
    drop(descriptor)
    assert not cache.holds(0, PAGE)
    assert not cache.holds(0, PAGES * PAGE)


def test_one_missing_page_is_enough(cache: PageCache, descriptor: int) -> None:
    drop(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    for page in (8, 9, 11):
        os.pread(descriptor, 1, page * PAGE)
    if cache.holds(10 * PAGE, 1):
        pytest.skip("this file system caches in larger units")
    assert cache.holds(8 * PAGE, 2 * PAGE)
    assert not cache.holds(8 * PAGE, 4 * PAGE)
    assert not cache.holds(9 * PAGE, PAGE + 1)


def test_asking_is_cheap(cache: PageCache) -> None:
    """Measured for 16 MiB: 12 µs with cachestat, 360 µs with mincore, which looks up each page; reading takes 300."""
    assert min(timed(cache) for _ in range(50)) < {"cachestat": 100e-6, "mincore": 2e-3}[cache.method or ""]


def timed(cache: PageCache) -> float:
    began = time.perf_counter()
    assert cache.holds(0, PAGES * PAGE)
    return time.perf_counter() - began


@pytest.mark.parametrize("mappable", [False, True])
def test_a_kernel_that_tells_nothing_is_not_believed(descriptor: int, monkeypatch: Any, mappable: bool) -> None:
    monkeypatch.setattr(PageCache, "_cachestat", lambda *_: -errno.EPERM)
    if mappable:
        monkeypatch.setattr(page_cache, "_may_write", lambda descriptor: False)
    else:
        monkeypatch.setattr(page_cache.mmap, "mmap", refuse)
    cache = PageCache(descriptor, os.fstat(descriptor).st_size)
    assert cache.method is None
    assert cache.reason is not None
    assert "EPERM" in cache.reason
    assert not cache.holds(0, PAGE)
    cache.close()


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENODEV, "cannot be mapped")


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    opened = os.open(path, os.O_RDONLY)
    cache = PageCache(opened, 0)
    assert not cache.holds(0, PAGE)
    os.close(opened)
