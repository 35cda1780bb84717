"""Whatever ends in the middle of reads: nothing crashes, hangs or stays, and what can be retried works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from splitzip_aio.drivers import DriverName
from splitzip_aio.drivers.faults import FaultSchedule, faulty_driver
from splitzip_aio.errors import ClosedError, CorruptDataError, ReadError
from splitzip_aio.transport import open_transport
from tests.environments.test_environments import digest_of
from tests.faults.lives import reading
from tests.faults.test_seeded import skip_without_uring
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["uring", "threads"])
def driver(request: pytest.FixtureRequest) -> DriverName:
    if request.param == "uring":
        skip_without_uring()
    return request.param  # type: ignore[no-any-return]


def live(name: str, sample: Sample, driver: DriverName) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.lives", name, str(sample.root), driver],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_leaving_the_process_in_the_middle(sample: Sample, driver: DriverName) -> None:
    done = live("leave", sample, driver)
    assert (done.returncode, done.stdout) == (3, "in flight\n"), done.stderr


def test_interpreter_ends_under_a_daemon_thread(sample: Sample, driver: DriverName) -> None:
    done = live("end_of_main_thread", sample, driver)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in flight\n"
    assert "Fatal" not in done.stderr


def test_event_loop_closed_in_the_middle(sample: Sample, driver: DriverName) -> None:
    done = live("closed_loop", sample, driver)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in flight\nclosed\n"
    assert "Fatal" not in done.stderr


def test_fork(sample: Sample, driver: DriverName) -> None:
    done = live("fork", sample, driver)
    assert done.returncode == 0, done.stderr
    said, ended, digest = done.stdout.splitlines()
    assert said.startswith("WrongEventLoopError: the transport was opened in process")
    assert ended == "child ended 0"
    assert digest == digest_of(sample)


@pytest.mark.anyio
async def test_closed_by_several_at_once(sample: Sample, driver: DriverName) -> None:
    schedule = FaultSchedule(rate=1.0, kinds=["delay"], longest_delay_s=0.05)
    async with open_transport(
        sample.root, device="cpu", ring_bytes="1MiB", driver=faulty_driver(schedule, driver)
    ) as transport:
        async with anyio.create_task_group() as group:
            for layer in transport.layers[:3]:
                group.start_soon(closed_meanwhile, transport, layer)
            await reading(transport)
            for _ in range(3):
                group.start_soon(transport.aclose)
        await transport.aclose()
        assert_idle(transport.statistics())
        assert transport.statistics().io.open_files == 0


async def closed_meanwhile(transport: object, layer: str) -> None:
    with pytest.raises(ClosedError):
        await transport.prefetch(layer)  # type: ignore[attr-defined]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["eio", "bit-flip"])
async def test_failures_cost_no_memory_and_a_retry_succeeds(sample: Sample, driver: DriverName, kind: str) -> None:
    """Slots and ranges of the arena come back from a failed layer, a hundred times over."""
    schedule = FaultSchedule(rate=1.0, kinds=[kind])
    async with open_transport(
        sample.root, device="cpu", ring_bytes="256KiB", arena_bytes=LAYER_BYTES, driver=faulty_driver(schedule, driver)
    ) as transport:
        layers = [layer for layer in transport.layers if layer.startswith("blocks")]
        failures = 0
        for number in range(100):
            try:
                (await transport.prefetch(layers[number % len(layers)])).release()
            except (ReadError, CorruptDataError):
                failures += 1
        await settled(transport)
        statistics = transport.statistics()
        assert_idle(statistics)
        # A flipped bit may be one of no tensor's; and a layer that is read ahead may fail before it is asked for.
        assert 90 <= failures <= statistics.residency.failed
        schedule.rate = 0.0
        for layer in layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        assert transport.statistics().arena.peak_bytes <= LAYER_BYTES
