"""The bindings of io_uring by themselves: entries, completions, registrations, and how they end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitzip_aio.drivers.rings import Ring, kernel, trial
from splitzip_aio.drivers.rings.syscall_ring import SyscallRing

DEPTH = 4
BLOCK = 4096
MakeRing = Callable[[int], Ring]


@pytest.fixture(params=["liburing", "syscall"])
def make_ring(request: pytest.FixtureRequest) -> MakeRing:
    try:
        ring = SyscallRing(DEPTH)
    except OSError as exc:
        pytest.skip(f"no io_uring here: {exc}")
    vectored = kernel.supports(ring.descriptor, kernel.OP_READV_FIXED)
    ring.close()
    if request.param == "syscall":
        return SyscallRing
    if not vectored:
        pytest.skip("Linux 6.15 has vectored reads into registered buffers")
    if (fault := trial.liburing_fault()) is not None:
        pytest.skip(fault)
    from splitzip_aio.drivers.rings.liburing_ring import LiburingRing

    return LiburingRing


@pytest.fixture
def ring(make_ring: MakeRing) -> Iterator[Ring]:
    made = make_ring(DEPTH)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    made = mmap.mmap(-1, DEPTH * BLOCK)
    yield made
    made.close()  # BufferError if a closed ring still holds on to it


@pytest.fixture
def descriptor(big_file: Path) -> Iterator[int]:
    opened = os.open(big_file, os.O_RDONLY)
    yield opened
    os.close(opened)


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def outcome(ring: Ring, count: int = 1) -> dict[int, int]:
    found: dict[int, int] = {}
    while len(found) < count:
        ring.wait()
        found |= dict(ring.completions())
    return found


@pytest.mark.parametrize("flags", [0, kernel.SQE_ASYNC], ids=["inline", "async"])
@pytest.mark.parametrize("buffer", [None, 0], ids=["plain", "fixed"])
def test_queues_wrap_around(
    ring: Ring, memory: mmap.mmap, descriptor: int, content: bytes, flags: int, buffer: int | None
) -> None:
    base = address(memory)
    ring.register_buffers([(base, len(memory))])
    for turn in range(25):
        memory[:] = bytes(len(memory))
        count = 1 + turn % DEPTH
        for token in range(count):
            offset = (turn * DEPTH + token) * 1000
            ring.prepare_read(token, descriptor, flags, base + token * BLOCK, BLOCK - token, offset, buffer)
        ring.submit()
        assert outcome(ring, count) == {token: BLOCK - token for token in range(count)}
        for token in range(count):
            offset, start = (turn * DEPTH + token) * 1000, token * BLOCK
            assert memory[start : start + BLOCK - token] == content[offset : offset + BLOCK - token]
            assert memory[start + BLOCK - token : start + BLOCK] == bytes(token)
    assert ring.completions() == []


def test_result_of_a_failed_read_is_its_errno(ring: Ring, memory: mmap.mmap, descriptor: int) -> None:
    base = address(memory)
    ring.register_buffers([(base, BLOCK)])
    ring.prepare_read(0, 1 << 20, 0, base, BLOCK, 0, None)
    assert outcome(ring) == {0: -errno.EBADF}
    ring.prepare_read(1, descriptor, 0, base + 1, BLOCK, 0, 0)  # a byte beyond the registered buffer
    assert outcome(ring) == {1: -errno.EFAULT}
    ring.prepare_read(2, descriptor, 0, base, BLOCK, 0, 0)
    assert outcome(ring) == {2: BLOCK}


def test_registered_files(ring: Ring, memory: mmap.mmap, descriptor: int) -> None:
    ring.register_files(3)
    ring.update_file(2, descriptor)
    expected = {2: BLOCK, 1: -errno.EBADF}
    for _ in range(2):
        for index, result in expected.items():
            ring.prepare_read(0, index, kernel.SQE_FIXED_FILE, address(memory), BLOCK, 0, None)
            assert outcome(ring) == {0: result}
        ring.update_file(2, -1)
        expected[2] = -errno.EBADF


def test_event_is_signalled(ring: Ring, memory: mmap.mmap, descriptor: int) -> None:
    event = ring.register_event()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)
    ring.prepare_read(0, descriptor, kernel.SQE_ASYNC, address(memory), BLOCK, 0, None)
    assert outcome(ring) == {0: BLOCK}
    assert os.eventfd_read(event) >= 1
    os.close(event)


def test_closed_ring_lets_go_of_files_and_memory_at_once(
    make_ring: MakeRing, memory: mmap.mmap, no_leaked_descriptors: Any
) -> None:
    with no_leaked_descriptors():
        readable, writable = os.pipe2(os.O_NONBLOCK)
        ring = make_ring(DEPTH)
        ring.register_buffers([(address(memory), len(memory))])
        ring.register_files(1)
        ring.update_file(0, writable)
        os.close(writable)
        with pytest.raises(BlockingIOError):
            os.read(readable, 1)
        ring.close()
        assert os.read(readable, 1) == b"", "the ring still has the other end open"
        os.close(readable)


def test_kernel_that_takes_one_entry_at_a_time(
    memory: mmap.mmap, descriptor: int, content: bytes, monkeypatch: Any, make_ring: MakeRing
) -> None:
    if make_ring is not SyscallRing:
        pytest.skip("liburing enters by itself")
    ring, enter = make_ring(DEPTH), kernel.enter
    refusals = iter([errno.EAGAIN, errno.EBUSY, errno.EINTR])

    def grudging(descriptor: int, to_submit: int, *rest: int) -> int:
        if (code := next(refusals, None)) is not None:
            raise OSError(code, os.strerror(code))
        return enter(descriptor, min(to_submit, 1), *rest)

    monkeypatch.setattr(kernel, "enter", grudging)
    for token in range(DEPTH):
        ring.prepare_read(token, descriptor, 0, address(memory) + token * BLOCK, BLOCK, token * BLOCK, None)
    for _ in range(3):
        with pytest.raises(OSError, match=r"unavailable|busy|Interrupted"):
            ring.submit()
        assert ring.completions() == []
    ring.submit()
    monkeypatch.undo()
    assert outcome(ring, DEPTH) == dict.fromkeys(range(DEPTH), BLOCK)
    assert memory[:] == content[: DEPTH * BLOCK]
    ring.close()


def test_kernel_before_coop_taskrun(memory: mmap.mmap, descriptor: int, monkeypatch: Any, make_ring: MakeRing) -> None:
    if make_ring is not SyscallRing:
        pytest.skip("kernels that old are not liburing's here")
    setup = kernel.setup

    def old(entries: int, flags: int) -> kernel.Layout:
        if flags:
            raise OSError(errno.EINVAL, "Invalid argument")
        return setup(entries, flags)

    monkeypatch.setattr(kernel, "setup", old)
    ring = make_ring(DEPTH)
    ring.prepare_read(0, descriptor, 0, address(memory), BLOCK, 0, None)
    assert outcome(ring) == {0: BLOCK}
    ring.close()


def test_kernel_before_5_6_is_refused(monkeypatch: Any, make_ring: MakeRing, no_leaked_descriptors: Any) -> None:
    setup = kernel.setup
    monkeypatch.setattr(
        kernel, "setup", lambda entries, flags: setup(entries, flags)._replace(features=kernel.FEAT_SINGLE_MMAP)
    )
    with no_leaked_descriptors(), pytest.raises(OSError, match="Invalid argument"):
        SyscallRing(DEPTH)
