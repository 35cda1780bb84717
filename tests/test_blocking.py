"""The transport for code without an event loop, from several threads, to the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitzip_aio import BlockingTransport, ClosedError, LeaseReleasedError, UnknownLayerError
from splitzip_aio.cache import build_cache
from splitzip_aio.errors import CacheNotFoundError
from splitzip_aio.telemetry import TransportStatistics
from tests.cache.samples import write_checkpoint
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, ten_layers

NAMES = [f"blocks.{number}" for number in range(10)]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    root = tmp_path_factory.mktemp("blocking")
    tensors = ten_layers()
    build_cache(write_checkpoint(root / "model.safetensors", tensors), root / "cache", segment_elements=2048)
    return Sample(root / "cache", tensors)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def transport(request: pytest.FixtureRequest, sample: Sample) -> Iterator[BlockingTransport]:
    with BlockingTransport(sample.root, device=request.param, arena_bytes=3 * LAYER_BYTES) as opened:
        yield opened


def idle(transport: BlockingTransport) -> TransportStatistics:
    """What the statistics say once that which is read ahead has landed: that nothing is going on, or held."""
    deadline = time.monotonic() + 60
    while (statistics := transport.statistics()).residency.loading and time.monotonic() < deadline:
        time.sleep(0.001)
    assert_idle(statistics)
    return statistics


def test_layers_come_through(transport: BlockingTransport, sample: Sample) -> None:
    assert set(transport.layers) > set(NAMES)
    for name in NAMES * 3:
        with transport.prefetch(name) as layer:
            sample.check(name, layer.tensors)
    assert idle(transport).residency.demands == 30


def test_many_threads(transport: BlockingTransport, sample: Sample) -> None:
    def use(place: int) -> None:
        name = NAMES[place % len(NAMES)]
        with transport.prefetch(name) as layer:
            sample.check(name, layer.tensors)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(use, range(100)))
    idle(transport)


def test_asked_for_ahead(transport: BlockingTransport, sample: Sample) -> None:
    pending = [transport.begin(name) for name in NAMES[:2]]
    for each in pending:
        with each.wait() as layer:
            assert each.done
            sample.check(each.layer, layer.tensors)


def test_cancelled_in_every_state(transport: BlockingTransport, sample: Sample) -> None:
    held = [transport.prefetch(name) for name in NAMES[:3]]
    waiting = transport.begin(NAMES[5])  # the arena is full
    assert not waiting.done
    waiting.cancel()
    waiting.cancel()
    for lease in held:
        lease.release()
    for place in range(200):
        pending = transport.begin(NAMES[place % len(NAMES)])
        if place % 3 == 0:
            while not pending.done:
                pass
        pending.cancel()
    failed = transport.begin("nothing")
    with pytest.raises(UnknownLayerError):
        failed.wait()
    failed.cancel()
    with transport.prefetch(NAMES[9]) as layer:
        sample.check(NAMES[9], layer.tensors)
    assert transport.statistics().residency.leased == 0


def test_released_lease(transport: BlockingTransport) -> None:
    lease = transport.prefetch(NAMES[0])
    assert lease.layer == NAMES[0]
    lease.release()
    lease.release()
    assert lease.released
    with pytest.raises(LeaseReleasedError):
        lease.wait()
    with pytest.raises(LeaseReleasedError):
        _ = lease.tensors


def test_errors_come_through(sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError):
        BlockingTransport(tmp_path)
    with BlockingTransport(sample.root, device="cpu") as transport:
        with pytest.raises(UnknownLayerError):
            transport.prefetch("nothing")
        with pytest.raises(KeyError), transport.prefetch(NAMES[0]):
            raise KeyError("of the block")
        assert transport.statistics().residency.leased == 0


def test_closing_ends_everything(sample: Sample) -> None:
    transport = BlockingTransport(sample.root, device="cpu", arena_bytes=LAYER_BYTES)
    assert not transport.closed
    held = transport.prefetch(NAMES[0])
    errors: list[Exception] = []

    def wait() -> None:
        try:
            transport.prefetch(NAMES[1])
        except ClosedError as exc:
            errors.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not transport.statistics().residency.waiting:
        pass
    transport.close()
    transport.close()
    waiter.join()
    assert len(errors) == 1
    assert transport.closed
    assert held.released
    held.release()
    for use in (transport.statistics, lambda: transport.prefetch(NAMES[0]), lambda: transport.begin(NAMES[0])):
        with pytest.raises(ClosedError):
            use()
    assert "splitzip_aio" not in {thread.name for thread in threading.enumerate()}


def test_forgotten_transport_is_closed(sample: Sample) -> None:
    transport = BlockingTransport(sample.root, device="cpu")
    with pytest.warns(ResourceWarning, match="never closed"):
        del transport
    assert "splitzip_aio" not in {thread.name for thread in threading.enumerate()}


def test_interpreter_ends_with_a_transport_open(sample: Sample) -> None:
    program = (
        "import sys, splitzip_aio\n"
        "transport = splitzip_aio.BlockingTransport(sys.argv[1], device='cpu')\n"
        "lease = transport.prefetch('blocks.0')\n"
        "pending = transport.begin('blocks.1')\n"
        "print(len(lease.tensors))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(sample.root)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
