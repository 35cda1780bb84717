"""Each kind of fault does what it says, and the driver above it does about it what it should."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from splitzip_aio.abc import FileHandle, IOMode, ReadDriver
from splitzip_aio.drivers.faults import FaultKind, FaultSchedule, faulty_driver
from splitzip_aio.errors import InvalidArgumentError, ReadError

pytestmark = pytest.mark.anyio

BLOCK = 4096
MIB = 1 << 20
SHORT = [FaultKind.SHORT_BYTE, FaultKind.SHORT_SECTOR, FaultKind.SHORT_BY_ONE]


class Rig:
    """A driver with faults over poisoned slots, and what it should read."""

    def __init__(self, driver: ReadDriver, slots: Any, file: FileHandle, content: bytes) -> None:
        self.driver, self.slots, self.file, self.content = driver, slots, file, content

    async def read(self, offset: int = 0, nbytes: int = MIB, slot: int = 0) -> bool:
        """Read and compare; whether all is right."""
        self.slots.poison(slot)
        count = await self.driver.read(self.file, slot, 0, offset=offset, nbytes=nbytes)
        assert count == min(nbytes, len(self.content) - offset)
        return bool(self.slots.peek(slot, 0, count) == self.content[offset : offset + count])


@pytest.fixture
def rig(driver_name: Any, make_slots: Any, big_file: Path, content: bytes, open_for: Any) -> Callable[..., Any]:
    """Makes rigs: ``async with rig(schedule, io="direct") as it``."""

    def make(schedule: FaultSchedule, io: IOMode = "buffered", slots: int = 3) -> Any:
        memory = make_slots(slots)
        driver = faulty_driver(schedule, driver_name)(memory.views)
        return _opened(driver, memory, lambda: open_for(driver, big_file, io), content)

    return make


class _opened:  # noqa: N801 - used as a function
    def __init__(self, driver: ReadDriver, slots: Any, open_file: Callable[[], FileHandle], content: bytes) -> None:
        self.driver, self.slots, self.open_file, self.content = driver, slots, open_file, content

    async def __aenter__(self) -> Rig:
        await self.driver.__aenter__()
        return Rig(self.driver, self.slots, self.open_file(), self.content)

    async def __aexit__(self, *exc: Any) -> None:
        await self.driver.__aexit__(*exc)


@pytest.mark.parametrize("kind", [*SHORT, FaultKind.EINTR, FaultKind.EAGAIN])
async def test_what_can_be_repeated_ends_in_right_bytes(rig: Any, io: IOMode, kind: FaultKind) -> None:
    schedule = FaultSchedule(3, rate=0.6, kinds=[kind])
    async with rig(schedule, io) as it:
        for offset in range(0, 6 * MIB, MIB):
            assert await it.read(offset)
        assert await it.read(0, 3 * MIB)
        statistics = it.driver.statistics()
    assert schedule.counts[kind] > 0
    counted = statistics.short_reads if kind in SHORT else statistics.retries
    assert counted == schedule.counts[kind]


@pytest.mark.parametrize(
    ("kind", "left"), [(FaultKind.SHORT_BYTE, 1), (FaultKind.SHORT_SECTOR, 512), (FaultKind.EIO, 0)]
)
async def test_what_is_said_not_to_have_come_is_not_there(rig: Any, kind: FaultKind, left: int) -> None:
    """Otherwise a driver that believes too much would be right by luck."""
    schedule = FaultSchedule(0, rate=1.0, kinds=[kind])
    async with rig(schedule) as it:
        engine = it.driver._engine
        collect, results = engine.collect, []

        def stop_after_one() -> list[Any]:
            found = collect()
            results.extend(result for _, result in found)
            schedule.rate = 0.0
            if found:
                seen.append(it.slots.peek(0, 0, 8192))
            return found

        seen: list[bytes] = []
        engine.collect = stop_after_one
        if kind is FaultKind.EIO:
            with pytest.raises(ReadError):
                await it.read(0, 8192)
        else:
            assert await it.read(0, 8192)
    assert results[0] == (left or -5)
    assert seen[0] == it.content[:left] + b"\xa5" * (8192 - left)


async def test_eio_is_one_error_and_the_next_read_is_right(rig: Any) -> None:
    schedule = FaultSchedule(0, rate=1.0, kinds=["eio"])
    async with rig(schedule) as it:
        with pytest.raises(ReadError, match="Input/output error") as caught:
            await it.read(0, 3 * MIB)
        assert caught.value.filename == it.file.path
        schedule.rate = 0.0
        assert await it.read(0, 3 * MIB)
    assert schedule.counts == {FaultKind.EIO: 1}


async def test_a_refused_direct_read_goes_on_buffered(rig: Any) -> None:
    schedule = FaultSchedule(0, rate=1.0, kinds=["einval-direct"])
    async with rig(schedule, "auto") as it:
        if not it.file.direct:
            pytest.skip(it.file.reason)
        assert await it.read(0, MIB)
        assert not it.file.direct
        assert "refused an aligned direct read" in it.file.reason
        assert await it.read(MIB, MIB)
    assert schedule.counts == {FaultKind.EINVAL_DIRECT: 1}


async def test_slots_that_cannot_be_registered_are_a_fallback(rig: Any, driver_name: str, caplog: Any) -> None:
    schedule = FaultSchedule(0, rate=1.0, kinds=["enomem-registering"])
    with caplog.at_level(logging.WARNING, "splitzip_aio"):
        async with rig(schedule) as it:
            assert await it.read()
            statistics = it.driver.statistics()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "faults are injected into reads: seed 0, rate 1.0"
    assert not statistics.fixed_buffers
    if driver_name == "threads":
        assert (statistics.fallbacks, len(said)) == ((), 1)
        assert schedule.counts == {FaultKind.ENOMEM_REGISTERING: 0}
    else:
        assert len(said) == 2
        assert "fixed buffers: ENOMEM" in said[1]
        assert said[1].endswith(statistics.fallbacks[0])


@pytest.mark.parametrize("kind", [FaultKind.DELAY, FaultKind.REORDER, FaultKind.AFTER_CANCELLATION])
async def test_what_comes_late_comes_whole(rig: Any, io: IOMode, kind: FaultKind) -> None:
    schedule = FaultSchedule(1, rate=0.5, kinds=[kind], longest_delay_s=0.01)
    async with rig(schedule, io) as it:

        async def reads(slot: int) -> None:
            for offset in range(slot * MIB, 6 * MIB, 3 * MIB):
                assert await it.read(offset, MIB, slot)

        async with anyio.create_task_group() as group:
            for slot in range(3):
                group.start_soon(reads, slot)
        assert it.driver.statistics().in_flight == 0
    assert schedule.counts[kind] > 0


async def test_completions_are_reordered(rig: Any) -> None:
    """The first of two waits for the second."""
    done: list[int] = []
    schedule = FaultSchedule(0, rate=1.0, kinds=["reorder"], longest_delay_s=60)
    async with rig(schedule) as it:

        async def read(slot: int) -> None:
            assert await it.read(slot * MIB, MIB, slot)
            done.append(slot)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(read, 0)
                while not schedule.counts[FaultKind.REORDER]:  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.001)
                schedule.rate = 0.0
                group.start_soon(read, 1)
    assert sorted(done) == [0, 1]


async def test_a_completion_after_cancellation_finds_its_memory_still_its_own(rig: Any) -> None:
    schedule = FaultSchedule(0, rate=1.0, kinds=["after-cancellation"], longest_delay_s=0.05)
    async with rig(schedule) as it:
        began = anyio.current_time()
        with anyio.move_on_after(0.005) as scope:
            await it.read()
        assert scope.cancelled_caught
        assert anyio.current_time() - began >= 0.05  # cancelled at once, and let go only after the completion
        assert it.slots.peek(0, 0, MIB) == it.content[:MIB]
        it.slots.poison(0)
        await anyio.sleep(0.1)
        assert it.slots.peek(0, 0, MIB) == b"\xa5" * MIB  # nothing is written behind anyone's back
    assert schedule.counts[FaultKind.AFTER_CANCELLATION] > 0


async def test_one_bit_is_flipped(rig: Any) -> None:
    schedule = FaultSchedule(0, rate=1.0, kinds=["bit-flip"])
    async with rig(schedule) as it:
        assert not await it.read(0, 4096)
        found = int.from_bytes(it.slots.peek(0, 0, 4096), "little")
        assert (found ^ int.from_bytes(it.content[:4096], "little")).bit_count() == 1


async def test_a_seed_fixes_what_happens(rig: Any) -> None:
    """Whatever the order in which reads complete."""
    counts = []
    for seed in (5, 5, 6):
        schedule = FaultSchedule(seed, rate=0.5, kinds=["short-byte", "eintr", "bit-flip"])
        right = {}
        async with rig(schedule) as it:

            async def read(slot: int, offset: int, right: dict[int, bool] = right, it: Rig = it) -> None:
                right[offset] = await it.read(offset, 256 << 10, slot)

            for start in range(0, 6 * MIB, 3 * (256 << 10)):
                async with anyio.create_task_group() as group:
                    for slot in range(3):
                        group.start_soon(read, slot, start + slot * (256 << 10))
        counts.append((dict(schedule.counts), right))
    assert counts[0] == counts[1] != counts[2]


async def test_nothing_happens_at_rate_zero(rig: Any) -> None:
    schedule = FaultSchedule(rate=0.0)
    async with rig(schedule, "auto") as it:
        assert await it.read(0, 3 * MIB)
        assert it.driver.name == it.driver.statistics().name
        assert it.driver.name.endswith(" with faults")
    assert not any(schedule.counts.values())


async def test_descriptors_are_returned(rig: Any, no_leaked_descriptors: Any) -> None:
    async with rig(FaultSchedule(rate=0.0)) as it:  # what an event loop keeps is kept from now on
        await it.read()
    with no_leaked_descriptors():
        async with rig(FaultSchedule(1, rate=0.3, kinds=["delay", "eintr"])) as it:
            assert await it.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, "rate: expected 0 to 1, found 1.5"),
        ({"rate": float("nan")}, "rate"),
        ({"kinds": ["earthquake"]}, "kinds: expected some of short-byte, .*, found 'earthquake'"),
        ({"kinds": []}, "kinds: expected at least one"),
        ({"longest_delay_s": -1}, "longest_delay_s: expected 0 or more"),
    ],
)
def test_impossible_schedules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        FaultSchedule(**options)


def test_forked_child_leaves_the_parents_engine_alone(rig: Any) -> None:
    async def main() -> None:
        async with rig(FaultSchedule(rate=0.0)) as it:
            assert await it.read()
            child = os.fork()
            if child == 0:
                it.driver._engine.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once
            assert await it.read(MIB)

    anyio.run(main)
