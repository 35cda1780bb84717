"""Prefetches that are cancelled while their slot is being filled, and how soon the slot can be used again."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field

import anyio
from anyio.lowlevel import checkpoint

from splitzip_aio.drivers import DriverName
from splitzip_aio.drivers.faults import FaultKind, FaultSchedule, faulty_driver
from splitzip_aio.transport import Transport, open_transport
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

LATE = (FaultKind.DELAY, FaultKind.REORDER, FaultKind.AFTER_CANCELLATION)
STUCK_S = 60.0


@dataclass
class Cancellations:
    """How many prefetches were cancelled, how many came before that, and the waits for their slots in seconds."""

    cancelled: int = 0
    came: int = 0
    waits_s: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The counts as text."""
        ordered = sorted(self.waits_s)
        at = {share: ordered[int(share * (len(ordered) - 1))] * 1e6 for share in (0.5, 0.99, 1.0)}
        return [
            f"{self.cancelled:8d}  cancelled while their slot was being filled, none lost",
            f"{self.came:8d}  came before they were cancelled",
            f"from cancel to the slot reusable: median {statistics.median(ordered) * 1e6:.0f} us, "
            f"99% {at[0.99]:.0f} us, longest {at[1.0]:.0f} us",
        ]


async def cancel_many(sample: Sample, driver: DriverName, count: int, *, seed: int, rate: float) -> Cancellations:
    """Cancel ``count`` prefetches on one transport; ``rate`` of the reads complete late on purpose."""
    chance, found = random.Random(seed), Cancellations()
    schedule = FaultSchedule(seed, rate=rate, kinds=LATE, longest_delay_s=0.002)
    async with open_transport(
        sample.root,
        device="cpu",
        ring_bytes="256KiB",
        arena_bytes=LAYER_BYTES,  # of one layer, so that each prefetch reads
        driver=faulty_driver(schedule, driver),
    ) as transport:
        layers = [layer for layer in transport.layers if layer.startswith("blocks")]
        last = layers[0]
        while found.cancelled < count:
            last = chance.choice([layer for layer in layers if layer != last])
            await cancel_one(sample, transport, last, chance, found)
        for layer in layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        totals = transport.statistics()
        assert_idle(totals)
        assert totals.residency.abandoned == found.cancelled
        assert totals.residency.demands == found.cancelled + found.came + len(layers)
    return found


async def cancel_one(
    sample: Sample, transport: Transport, layer: str, chance: random.Random, found: Cancellations
) -> None:
    """Ask for a layer, cancel as soon as a slot is taken or a little later, and wait until no slot is."""
    came = False

    async def use() -> None:
        nonlocal came
        async with await transport.prefetch(layer) as lease:
            came = True
            sample.check(layer, lease.tensors)

    before = transport.statistics().residency.abandoned
    async with anyio.create_task_group() as group:
        group.start_soon(use)
        while not busy(transport) and not came:
            await checkpoint()
        for _ in range(chance.randrange(4)):
            await checkpoint()
        began = time.perf_counter()
        group.cancel_scope.cancel()
    with anyio.fail_after(STUCK_S):
        while busy(transport):
            await checkpoint()
    waited_s = time.perf_counter() - began
    await settled(transport)
    if transport.statistics().residency.abandoned > before:
        found.cancelled += 1
        found.waits_s.append(waited_s)
    else:
        found.came += 1


def busy(transport: Transport) -> bool:
    """Whether a slot is taken."""
    ring = transport.statistics().ring
    return ring.free < ring.slots
