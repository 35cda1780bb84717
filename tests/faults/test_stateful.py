"""Any order of asking, releasing, cancelling, failing and closing, with rules checked at each step.

The transport is driven from outside, through what users see of it, under asyncio and trio. After every step each slot
is in one state, the arena holds no more than it has, and every lease that is held shows the right bytes.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitzip_aio.drivers.faults import FaultKind, FaultSchedule, faulty_driver
from splitzip_aio.errors import ClosedError, CorruptDataError, ReadError
from splitzip_aio.transport import Transport, open_transport
from tests.cache.samples import FUZZ_SCALE
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

PER_READ = [kind for kind in FaultKind if kind is not FaultKind.ENOMEM_REGISTERING]
PATIENCE_S = 60.0


class Ask:
    """A task that asks for a layer and holds it until it is told to let go."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.let_go = anyio.Event()
        self.scope = anyio.CancelScope()
        self.held = False
        self.error: Exception | None = None
        self.over = anyio.Event()

    async def live(self, sample: Sample, transport: Transport) -> None:
        try:
            with self.scope:
                async with await transport.prefetch(self.layer) as lease:
                    self.held = True
                    while not self.let_go.is_set():
                        sample.check(self.layer, lease.tensors)
                        with anyio.move_on_after(0.01):
                            await self.let_go.wait()
                        if lease.released:  # the transport was closed
                            break
        except (ReadError, CorruptDataError, ClosedError) as error:
            self.error = error
        finally:
            self.held = False
            self.over.set()


class Machine(RuleBasedStateMachine):
    """Drives one transport on an event loop of its own thread."""

    sample: ClassVar[Sample]
    backend: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.portal: BlockingPortal = self.stack.enter_context(start_blocking_portal(self.backend))
        self.asks: list[Ask] = []
        self.closed = False

    @initialize(
        seed=st.integers(0, 1 << 16),
        ring_kib=st.sampled_from([64, 200, 1024]),
        layers=st.integers(1, 5),
        host_bytes=st.sampled_from([0, 100_000]),
        driver=st.sampled_from(["auto", "threads"]),
    )
    def open(self, seed: int, ring_kib: int, layers: int, host_bytes: int, driver: str) -> None:
        self.capacity = layers * LAYER_BYTES
        self.schedule = FaultSchedule(seed, rate=0.0, kinds=PER_READ, longest_delay_s=0.002)
        self.transport: Transport = self.stack.enter_context(
            self.portal.wrap_async_context_manager(
                open_transport(
                    self.sample.root,
                    device="cpu",
                    ring_bytes=ring_kib << 10,
                    arena_bytes=self.capacity,
                    host_cache_bytes=host_bytes,
                    driver=faulty_driver(self.schedule, driver),  # type: ignore[arg-type]
                )
            )
        )

    @rule(number=st.integers(0, 10))
    def ask(self, number: int) -> None:
        ask = self.portal.call(self._make_ask, self.transport.layers[number])
        self.portal.start_task_soon(ask.live, self.sample, self.transport)
        self.asks.append(ask)

    async def _make_ask(self, layer: str) -> Ask:
        return Ask(layer)

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ask = self._take(data)
        self.portal.call(self._end, ask, ask.let_go.set)

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ask = self._take(data)
        self.portal.call(self._end, ask, ask.scope.cancel)

    def _take(self, data: st.DataObject) -> Ask:
        return self.asks.pop(data.draw(st.integers(0, len(self.asks) - 1)))

    async def _end(self, ask: Ask, how: object) -> None:
        how()  # type: ignore[operator]
        if ask.held:  # else it may have to wait for room that others hold
            with anyio.fail_after(PATIENCE_S):
                await ask.over.wait()

    @rule(rate=st.sampled_from([0.0, 0.3, 1.0]))
    def change_faults(self, rate: float) -> None:
        self.schedule.rate = rate

    @rule()
    def let_it_run(self) -> None:
        self.portal.call(anyio.sleep, 0.003)

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        self.portal.call(self.transport.aclose)
        self.closed = True

    @invariant()
    def each_slot_is_in_one_state_and_memory_is_bounded(self) -> None:
        if not hasattr(self, "transport"):
            return
        statistics = self.portal.call(self._statistics)
        ring, residency, arena = statistics.ring, statistics.residency, statistics.arena
        assert ring.free + ring.reading + ring.ready + ring.copying == ring.slots
        assert arena.used_bytes <= arena.capacity_bytes <= self.capacity
        if not self.closed:
            assert arena.ranges == residency.resident + residency.loading + residency.draining
        assert residency.loaded <= residency.demands + residency.read_ahead
        assert residency.hits + residency.joins + residency.misses == residency.demands

    async def _statistics(self) -> object:
        return self.transport.statistics()

    def teardown(self) -> None:
        try:
            if hasattr(self, "transport"):
                self.schedule.rate = 0.0
                self.portal.call(self._finish)
        finally:
            self.stack.close()

    async def _finish(self) -> None:
        """Everyone lets go; then nothing is held, and, unless it was closed, any layer still comes."""
        with anyio.fail_after(PATIENCE_S):
            for ask in self.asks:
                ask.let_go.set()
            for ask in self.asks:
                await ask.over.wait()
            if not self.closed:
                await settled(self.transport)
                try:
                    await self.sample.check_prefetch(self.transport, self.transport.layers[0])
                except CorruptDataError:  # the host tier kept what a fault had left, and drops it now
                    await self.sample.check_prefetch(self.transport, self.transport.layers[0])
                await settled(self.transport)
            assert_idle(self.transport.statistics())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_any_order_of_events(backend: str, sample: Sample, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "splitzip_aio")
    machine = type(f"Machine{backend}", (Machine,), {"sample": sample, "backend": backend}).TestCase
    machine.settings = settings(
        max_examples=15 * FUZZ_SCALE,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine().runTest()
