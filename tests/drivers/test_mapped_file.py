"""Mapped files: who has to wait for whom, which pages are locked, and what is left in the end."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from splitzip_aio.drivers.mapped_file import MappedExtent, MappedFile
from splitzip_aio.errors import ReadError
from tests.drivers.locked import locked_bytes

PAGE = mmap.PAGESIZE
PAGES = 64


class Rig:
    """A file of 64 pages, each of its own bytes, and a mapping of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = b"".join(bytes([page]) * PAGE for page in range(PAGES))
        path.write_bytes(self.data)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.before = os.fstat(self.descriptor)
        self.file = MappedFile(self.descriptor, str(path), self.unchanged)

    def unchanged(self, descriptor: int) -> bool:
        now = os.fstat(descriptor)
        return (now.st_size, now.st_mtime_ns) == (self.before.st_size, self.before.st_mtime_ns)

    def hold(self, first: int, stop: int) -> MappedExtent:
        extent = self.file.hold(first * PAGE, (stop - first) * PAGE)
        assert extent is not None, self.file.refusal
        return extent

    def locked(self, first: int, stop: int) -> MappedExtent:
        extent = self.hold(first, stop)
        assert extent.lock_mapped() or extent.lock(), self.file.refusal
        return extent

    @property
    def may_be_held(self) -> bool:
        extent = self.file.hold(0, PAGE)
        if extent is not None:
            extent.release()
        return extent is not None

    @property
    def writers_wait(self) -> bool:
        """Whether who opens the file for writing has to wait. That is asked by trying, and so asks for the lease."""
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        except BlockingIOError:
            return True
        return False


def can_be_leased(path: Path) -> bool:
    """Whether the kernel leases a file of one of the file systems that are trusted; without asking what is tested."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True).stdout
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return kind.strip() in {"ext2/ext3", "xfs", "btrfs", "f2fs"}


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    before = locked_bytes()
    rig = Rig(tmp_path / "file")
    extent = rig.file.hold(0, PAGE)
    if extent is None and not can_be_leased(rig.path):
        pytest.skip(f"nothing is mapped here: {rig.file.refusal}")
    assert extent is not None, rig.file.refusal
    extent.release()
    del extent
    yield rig
    rig.file.close()
    os.close(rig.descriptor)
    assert locked_bytes() == before


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_an_extent_is_the_files(rig: Rig) -> None:
    extent = rig.locked(3, 9)
    assert extent.memory == rig.data[3 * PAGE : 9 * PAGE]
    assert extent.memory.readonly
    extent.release()
    extent.release()


def test_writers_wait_for_the_last_hold(rig: Rig) -> None:
    assert not rig.writers_wait  # an idle one keeps nobody
    first, second = rig.locked(0, 4), rig.locked(8, 12)
    assert rig.writers_wait
    first.release()
    assert rig.writers_wait
    second.release()
    assert not rig.writers_wait


def test_no_further_hold_is_given_while_someone_waits(rig: Rig) -> None:
    extent = rig.locked(0, 4)
    assert rig.writers_wait
    assert rig.file.hold(8 * PAGE, PAGE) is None
    assert rig.file.refusal is None
    extent.release()
    rig.locked(8, 9).release()  # who waited has gone, and changed nothing


def test_who_cuts_the_file_short_waits(rig: Rig) -> None:
    """And is not noticed by who decodes: not by wrong bytes, and not by SIGBUS."""
    extent = rig.locked(0, PAGES)
    cutting = threading.Thread(target=os.truncate, args=(rig.path, 0))
    cutting.start()
    wait_until(lambda: not rig.may_be_held)
    assert os.stat(rig.path).st_size == PAGES * PAGE
    assert bytes(extent.memory) == rig.data
    assert cutting.is_alive()
    began = time.monotonic()
    extent.release()
    cutting.join(20)
    assert time.monotonic() - began < 10  # the kernel itself would have waited for 45 seconds
    assert os.stat(rig.path).st_size == 0
    assert rig.file.hold(0, PAGE) is None
    assert rig.file.refusal == "it is not the file any more that it was"


def test_a_file_that_is_written_to_is_not_mapped(rig: Rig) -> None:
    writing = os.open(rig.path, os.O_WRONLY)
    assert rig.file.hold(0, PAGE) is None
    assert rig.file.refusal == "a lease on it is refused: it is open for writing elsewhere"
    os.close(writing)
    rig.locked(0, 1).release()
    assert rig.file.refusal is None


def test_a_changed_file_is_not_mapped(rig: Rig) -> None:
    with rig.path.open("r+b") as writing:
        writing.write(b"other")
    os.utime(rig.path)
    assert rig.file.hold(0, PAGE) is None
    assert not rig.writers_wait


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_page_is_locked_as_long_as_anyone_holds_it(rig: Rig, order: tuple[int, ...]) -> None:
    """Extents share the pages at their ends, and may be held twice."""
    ranges = [(0, 11), (10, 20), (5, 20)]
    before, extents = locked_bytes(), [rig.locked(*each) for each in ranges]
    left = dict(enumerate(ranges))
    for place in order:
        pages = {page for each in left.values() for page in range(*each)}
        assert locked_bytes() - before == len(pages) * PAGE
        extents[place].release()
        del left[place]
    assert locked_bytes() == before


def test_what_stayed_mapped_is_locked_as_it_is(rig: Rig) -> None:
    extent = rig.hold(0, PAGES)
    assert not extent.lock_mapped()  # nothing has been brought yet
    assert not extent.locked
    assert extent.lock()
    extent.release()
    again = rig.hold(0, PAGES)
    if kernel() < (6, 7):
        pytest.skip("this kernel does not tell which pages are mapped")
    assert again.lock_mapped()
    assert again.locked
    assert locked_bytes() >= PAGES * PAGE
    again.release()


def test_beyond_the_end_nothing_is_mapped(rig: Rig) -> None:
    assert rig.file.hold((PAGES - 1) * PAGE, 2 * PAGE) is None
    assert rig.file.refusal is None
    assert not rig.writers_wait


def test_closing_gives_everything_back(rig: Rig) -> None:
    before, extents = locked_bytes(), [rig.locked(0, 11), rig.locked(10, 20)]
    rig.file.close()
    rig.file.close()
    assert locked_bytes() == before
    assert not rig.writers_wait
    assert "/file" not in Path("/proc/self/maps").read_text()
    assert not extents[0].lock()
    assert rig.file.hold(0, PAGE) is None


def test_dropped_it_gives_the_lease_back(rig: Rig) -> None:
    extents = [rig.locked(0, 11)]
    assert rig.writers_wait
    rig.file = MappedFile(rig.descriptor, str(rig.path), rig.unchanged)
    extents.clear()
    gc.collect()
    assert not rig.writers_wait


def test_a_forked_child_gives_nothing_back(rig: Rig) -> None:
    extent = rig.locked(0, 4)
    child = os.fork()
    if not child:
        rig.file.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert rig.writers_wait
    assert bytes(extent.memory) == rig.data[: 4 * PAGE]
    extent.release()
    assert not rig.writers_wait


def test_after_too_long_a_hold_is_worth_nothing_if_someone_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets a writer have the file in the end; from half that time on nobody may begin to decode."""
    extent = rig.locked(0, 4)
    monkeypatch.setattr(time, "monotonic", lambda: time.perf_counter() + 3600)
    assert extent.memory == rig.data[: 4 * PAGE]  # nobody does
    assert rig.writers_wait
    with pytest.raises(ReadError, match="opened for writing while held"):
        _ = extent.memory
    extent.release()


@pytest.mark.parametrize("seconds", [1, 4])
def test_leases_that_are_over_soon_are_not_relied_on(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    (tmp_path / "lease-break-time").write_text(f"{seconds}\n")
    monkeypatch.setattr("splitzip_aio.drivers.mapped_file._BREAK_TIME", tmp_path / "lease-break-time")
    file = MappedFile(rig.descriptor, str(rig.path), rig.unchanged)
    assert file.hold(0, PAGE) is None
    assert f"is {seconds}, less than 5 seconds" in str(file.refusal)


def test_a_file_system_that_others_may_change_is_not_relied_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitzip_aio.drivers.mapped_file._TRUSTED", {0x6969: "nfs"})
    file = MappedFile(rig.descriptor, str(rig.path), rig.unchanged)
    assert file.hold(0, PAGE) is None
    assert "is none of nfs" in str(file.refusal)
    assert not rig.writers_wait
