"""Every driver × event loop × way of reading, over one suite."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitzip_aio.abc import FileHandle, IOMode, ReadDriver
from splitzip_aio.drivers import copying
from splitzip_aio.drivers.rings import open_ring, trial
from splitzip_aio.errors import DriverUnavailableError, UnsupportedError

BLOCK = 4096
SLOT_BYTES = 3 << 20
FILE_BYTES = 7 * (1 << 20) + 1234
POISON = 0xA5


@pytest.fixture(params=["liburing", "syscall", "threads"])
def driver_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``"uring"``, over each of its bindings, or ``"threads"``."""
    if request.param == "threads":
        return "threads"
    hindrance: str | None = "kept out of this test"
    if request.param == "liburing":
        hindrance = trial.liburing_fault()
        if hindrance is not None:
            pytest.skip(hindrance)
    monkeypatch.setattr(trial, "liburing_fault", lambda: hindrance)
    try:
        ring, reason = open_ring(1)
    except (DriverUnavailableError, OSError) as exc:
        pytest.skip(f"no io_uring here: {exc}")
    ring.close()
    if not ring.binding.startswith("liburing" if request.param == "liburing" else "system calls"):
        pytest.skip(reason)
    return "uring"


@pytest.fixture(autouse=True)
def no_copying_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where an earlier test has loaded what they run; ``copying_threads`` has them copy."""
    monkeypatch.setattr(copying, "code_is_loaded", lambda: False)


@pytest.fixture(params=["direct", "buffered"])
def io(request: pytest.FixtureRequest) -> IOMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def content() -> bytes:
    return random.Random(7).randbytes(FILE_BYTES)


@pytest.fixture(scope="session")
def big_file(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drivers") / "content.bin"
    path.write_bytes(content)
    return path


@dataclass
class Slots:
    """Page-aligned memory, poisoned, that closing checks nobody still refers to."""

    maps: list[mmap.mmap]

    @property
    def views(self) -> list[memoryview]:
        return [memoryview(each) for each in self.maps]

    def poison(self, slot: int) -> None:
        self.maps[slot][:] = bytes([POISON]) * len(self.maps[slot])

    def peek(self, slot: int, start: int, count: int) -> bytes:
        return self.maps[slot][start : start + count]


@pytest.fixture
def make_slots() -> Iterator[Callable[..., Slots]]:
    made: list[mmap.mmap] = []

    def make(count: int, nbytes: int = SLOT_BYTES) -> Slots:
        maps = [mmap.mmap(-1, nbytes) for _ in range(count)]
        made.extend(maps)
        slots = Slots(maps)
        for slot in range(count):
            slots.poison(slot)
        return slots

    yield make
    for each in made:
        each.close()  # BufferError if a closed driver still holds a view


@pytest.fixture
def open_for() -> Callable[[ReadDriver, Path, IOMode], FileHandle]:
    def open_or_skip(driver: ReadDriver, path: Path, io: IOMode) -> FileHandle:
        try:
            return driver.open(path, io=io)
        except UnsupportedError as exc:
            pytest.skip(str(exc))

    return open_or_skip


@pytest.fixture
def no_leaked_descriptors() -> Callable[[], AbstractContextManager[None]]:
    """Compare /proc/self/fd around a block."""

    def descriptors() -> dict[str, str]:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                found[name] = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:  # the one that listed
                continue
        return found

    @contextmanager
    def check() -> Iterator[None]:
        before = descriptors()
        yield
        assert descriptors() == before

    return check
