"""What a stream waited for, and its timeline, through the whole pipeline."""

from __future__ import annotations

import time

import anyio
import pytest
import torch

from splitzip_aio.telemetry import TimeStatistics
from splitzip_aio.timeline import Stage, Timeline
from splitzip_aio.transport import open_transport
from tests.transport.samples import Sample, arena_of, settled

pytestmark = pytest.mark.anyio


def total(times: TimeStatistics) -> float:
    return times.disk_s + times.slot_s + times.copy_s + times.decode_s + times.consumer_s


async def test_times_add_up_to_the_time_that_it_was_open(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="4MiB", arena_bytes="1MiB") as transport:
        before, began = transport.statistics().time, time.perf_counter()
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        after, ended = transport.statistics().time, time.perf_counter()
    assert total(after) - total(before) == pytest.approx(ended - began, abs=0.01)
    assert after.decode_s > before.decode_s
    assert after.copy_s == 0 or not arena_of(device).decodes_in_place


async def test_who_takes_their_time_is_waited_for(sample: Sample, device: str) -> None:
    async with (
        open_transport(sample.root, device=device, ring_bytes="4MiB") as transport,
        await transport.prefetch(transport.layers[0]),
    ):
        await settled(transport)
        before = transport.statistics().time
        await anyio.sleep(0.2)
        after = transport.statistics().time
    assert after.consumer_s - before.consumer_s == pytest.approx(0.2, abs=0.1)
    assert after.disk_s == before.disk_s


async def test_a_closed_transport_waits_no_longer(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="4MiB") as transport:
        pass
    before = transport.statistics().time
    await anyio.sleep(0.05)
    assert transport.statistics().time == before


async def test_a_timeline_has_a_slice_for_each_slot_and_stage(sample: Sample, device: str) -> None:
    timeline = Timeline()
    began = time.perf_counter()
    async with open_transport(sample.root, device=device, ring_bytes="4MiB", timeline=timeline) as transport:
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
    ended = time.perf_counter()
    by_stage = {stage: [each for each in timeline.slices if each.stage is stage] for stage in Stage}
    uploads = statistics.ring.acquired - sum(not each.nbytes for each in by_stage[Stage.READ])
    assert len(by_stage[Stage.DECODE]) == len(by_stage[Stage.READ]) <= uploads
    assert len(by_stage[Stage.COPY]) == (0 if arena_of(device).decodes_in_place else len(by_stage[Stage.READ]))
    assert [each.layer for each in by_stage[Stage.LEASE]] == list(transport.layers)
    assert sum(each.nbytes for each in by_stage[Stage.DECODE]) == statistics.decoded_bytes
    slack = 0.001 if device == "cuda" else 0
    for each in timeline.slices:
        assert began - slack <= each.begin_s <= each.end_s <= ended + slack


async def test_slots_are_read_before_they_are_decoded(sample: Sample, device: str) -> None:
    timeline = Timeline()
    async with open_transport(sample.root, device=device, ring_bytes="4MiB", timeline=timeline) as transport:
        await sample.check_prefetch(transport, transport.layers[0])
    slices = [each for each in timeline.slices if each.layer == transport.layers[0]]
    for decode in (each for each in slices if each.stage is Stage.DECODE):
        (read,) = (each for each in slices if each.stage is Stage.READ and each.slot == decode.slot)
        assert read.end_s <= decode.begin_s + (0.001 if device == "cuda" else 0)


async def test_off_by_default(sample: Sample, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded, no event is made to be timed, for a transport without a timeline."""
    timed: list[object] = []
    event = torch.cuda.Event

    def make_event(**options: bool) -> torch.cuda.Event:
        if options.get("enable_timing"):
            timed.append(options)
        return event(**options)

    monkeypatch.setattr(torch.cuda, "Event", make_event)
    monkeypatch.setattr(Timeline, "add", lambda *_: timed.append("a slice"))
    async with open_transport(sample.root, device=device, ring_bytes="4MiB") as transport:
        await sample.check_prefetch(transport, transport.layers[0])
    assert not timed
