"""The arena on a GPU: order between streams, reuse of memory, and what becomes of wrong bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

from splitzip_aio.abc import PlannedRead, PlannedSegment
from splitzip_aio.arena import CudaArena
from splitzip_aio.codec.cpu import encode_segment
from splitzip_aio.codec.formats import BF16
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.errors import CorruptDataError, InvalidArgumentError, UnsupportedError
from splitzip_aio.memory import _address
from splitzip_aio.staging import StagingRing
from splitzip_aio.transport import open_transport
from tests.pipeline import upload
from tests.transport.conftest import sample
from tests.transport.samples import LAYER_BYTES, Sample, raw

__all__ = ["sample"]

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

ELEMENTS = 40_000
LONG_NS = 200_000_000


def weights(seed: int) -> np.ndarray:
    values = (np.random.default_rng(seed).standard_normal(ELEMENTS) * 0.02).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


class Filled:
    """Pinned slots, each with four segments; everything else in them and in the arena is poisoned."""

    def __init__(self, slots: int) -> None:
        schedule = Schedule.parse("2,3")
        self.data = [[weights(4 * slot + place) for place in range(4)] for slot in range(slots)]
        books = schedule.codebooks(np.bincount(np.arange(256) % 16 + 112, minlength=256), BF16)
        self.segments = [[encode_segment(data, BF16, schedule, books) for data in each] for each in self.data]
        self.payload_bytes = -(-max(sum(part.size for part in each) for each in self.segments) // 4096) * 4096
        self.ring = StagingRing(
            slots, self.payload_bytes, table_bytes=CudaArena.table_bytes(self.payload_bytes), pinned=True
        )
        assert self.ring.statistics().pinned, self.ring.statistics().fallback
        self.reads: list[PlannedRead] = []
        for slot, each in zip(self.ring.slots, self.segments, strict=True):
            slot.memory[:] = b"\xa5" * len(slot.memory)
            starts = np.cumsum([0] + [segment.size for segment in each]).tolist()
            slot.memory[: starts[-1]] = b"".join(segment.tobytes() for segment in each)
            placed = tuple(
                PlannedSegment(start, segment.size, 2 * ELEMENTS * place, 2 * ELEMENTS, f"slot {slot.index}, {place}")
                for place, (start, segment) in enumerate(zip(starts[:-1], each, strict=True))
            )
            self.reads.append(PlannedRead(0, "a.szp", 0, self.payload_bytes, placed))
        self.arena = CudaArena(
            slots * 8 * ELEMENTS, device=torch.device("cuda", 0), slot_bytes=len(self.ring.slots[0].memory)
        )
        self.arena.buffer.fill_(0xA5)
        torch.cuda.synchronize()

    async def upload(self, slot: int, *, base: int | None = None) -> None:
        """Upload a slot to its place, or to ``base``."""
        calls: list[int] = []
        base = self.base(slot) if base is None else base
        memory = self.ring.slots[slot].memory
        await upload(self.arena, memory, self.reads[slot], base, drained=lambda: calls.append(slot))
        assert calls == [slot]

    async def upload_all(self, drained: Callable[[int], None]) -> None:
        """Upload every slot to its place, all at once."""
        results: list[object] = []
        for slot, read in enumerate(self.reads):
            memory = self.ring.slots[slot].memory
            self.arena.submit(memory, read, self.base(slot), drained=partial(drained, slot), done=results.append)
        await self.arena.reap()
        assert not [result for result in results if isinstance(result, Exception)]
        assert len(results) == len(self.reads)

    def base(self, slot: int) -> int:
        return 8 * slot * ELEMENTS

    def check(self, slot: int, *, base: int | None = None) -> None:
        base = self.base(slot) if base is None else base
        for segment, data in zip(self.reads[slot].segments, self.data[slot], strict=True):
            found = self.arena.view(base + segment.destination, data.size).cpu().numpy()
            assert np.array_equal(found, data)


@pytest.fixture
def filled() -> Iterator[Filled]:
    filled = Filled(12)
    yield filled
    filled.ring.close()


async def test_more_slots_at_once_than_landing_buffers(filled: Filled) -> None:
    drained: list[int] = []
    await filled.upload_all(drained.append)
    assert drained == list(range(12))
    for slot in range(12):
        filled.check(slot)
    await filled.arena.aclose()
    await filled.arena.aclose()


async def test_the_drained_slot_may_be_overwritten_at_once(filled: Filled) -> None:
    def overwrite(slot: int) -> None:
        memory = filled.ring.slots[slot].memory
        memory[:] = bytes(len(memory))

    await filled.upload_all(overwrite)
    for slot in range(12):
        filled.check(slot)


async def test_a_slot_is_given_back_before_the_verdict_is_in(filled: Filled) -> None:
    """The decode has to wait for someone who still uses the range; the copy has not."""
    await filled.upload(5)  # compiles the kernel, which can take longer than the stream is busy
    calls: list[str] = []
    busy, range_offset = torch.cuda.Stream(), filled.arena.allocate(8 * ELEMENTS)
    assert range_offset == 0
    with torch.cuda.stream(busy):
        torch.cuda._sleep(LONG_NS)
        fence = filled.arena.fence()
    assert fence is not None
    filled.arena.free(range_offset, after=[fence])
    filled.arena.submit(
        filled.ring.slots[3].memory,
        filled.reads[3],
        range_offset,
        drained=lambda: calls.append(f"drained, verdict {'in' if fence.query() else 'out'}"),
        done=lambda result: calls.append("done"),
    )
    await filled.arena.reap()
    assert calls == ["drained, verdict out", "done"]
    filled.check(3, base=range_offset)


async def test_slots_are_uploaded_from_a_thread_that_never_used_the_device(filled: Filled) -> None:
    await anyio.to_thread.run_sync(anyio.run, filled.upload, 2)
    filled.check(2)


async def test_a_table_follows_its_layer_to_another_place(filled: Filled) -> None:
    for base in (filled.base(4), filled.base(9), filled.base(0), filled.base(4)):
        filled.arena.buffer.fill_(0)
        torch.cuda.synchronize()
        await filled.upload(4, base=base)
        filled.check(4, base=base)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize(("offset", "what"), [(2000, "checksum"), (20, "header")])
async def test_wrong_bytes_are_named_and_the_next_upload_is_right(
    filled: Filled, place: int, offset: int, what: str
) -> None:
    slot = filled.ring.slots[5]
    at = filled.reads[5].segments[place].source + offset
    slot.memory[at] ^= 4
    with pytest.raises(CorruptDataError, match=rf"slot 5, {place}.*{what}"):
        await filled.upload(5)
    slot.memory[at] ^= 4
    await filled.upload(5)
    filled.check(5)


async def test_a_header_that_turns_wrong_later_harms_nobody(filled: Filled) -> None:
    """What it said is known by then; what matters is what the segment decodes to."""
    await filled.upload(5)
    source = filled.reads[5].segments[1].source
    filled.ring.slots[5].memory[source : source + 160] = b"\xff" * 160
    filled.arena.buffer.fill_(0)
    torch.cuda.synchronize()
    await filled.upload(5)
    filled.check(5)
    filled.ring.slots[5].memory[source + 5000] ^= 1
    with pytest.raises(CorruptDataError, match=r"slot 5, 1.*checksum"):
        await filled.upload(5)


async def test_a_place_that_a_gpu_cannot_decode_to_is_refused(filled: Filled) -> None:
    one, *others = filled.reads[0].segments
    misplaced = PlannedSegment(one.source, one.nbytes, 8, one.decoded_bytes, one.tensor)
    filled.reads[0] = PlannedRead(0, "a.szp", 0, filled.payload_bytes, (misplaced, *others))
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        await filled.upload(0)


async def test_reuse_waits_for_the_fence_of_whoever_used_it(filled: Filled) -> None:
    """A consumer's stream still reads the range when it is given back and decoded into anew."""
    arena, consumer = filled.arena, torch.cuda.Stream()
    offset = arena.allocate(8 * ELEMENTS)
    assert offset == 0
    await filled.upload(0)
    with torch.cuda.stream(consumer):
        torch.cuda._sleep(LONG_NS)
        seen = arena.view(0, 8 * ELEMENTS).clone()
        fence = arena.fence()
    assert fence is not None
    assert not fence.query()
    arena.free(offset, after=[fence])
    await filled.upload(1, base=offset)
    filled.check(1, base=offset)
    assert np.array_equal(seen.cpu().numpy(), np.concatenate(filled.data[0]))


async def test_a_lease_released_early_is_evicted_late(sample: Sample) -> None:
    """The same by way of leases: the caller releases while the stream has the work still before it."""
    stream = torch.cuda.Stream()
    async with open_transport(sample.root, device="cuda", ring_bytes="4MiB", arena_bytes=LAYER_BYTES) as transport:
        for layer in ("blocks.1", "blocks.5", "blocks.2"):
            with torch.cuda.stream(stream):
                async with await transport.prefetch(layer) as lease:
                    torch.cuda._sleep(LONG_NS)
                    seen = {name: tensor.clone() for name, tensor in lease.tensors.items()}
            await sample.check_prefetch(transport, "blocks.8")
            stream.synchronize()
            sample.check(layer, seen)


async def test_default_statistics(sample: Sample) -> None:
    async with open_transport(sample.root) as transport:
        await sample.check_prefetch(transport, "blocks.0")
        statistics = transport.statistics()
    assert statistics.device == f"cuda:{torch.cuda.current_device()}"
    assert statistics.ring.pinned


async def test_the_event_loop_is_never_blocked_for_long(sample: Sample) -> None:
    delays: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(0.005)
            delays.append(time.perf_counter() - began - 0.005)

    async with (
        open_transport(sample.root, device="cuda", ring_bytes="4MiB", arena_bytes=2 * LAYER_BYTES) as transport,
        anyio.create_task_group() as group,
    ):
        group.start_soon(tick)
        with torch.cuda.stream(torch.cuda.Stream()):
            for layer in transport.layers * 3:
                async with await transport.prefetch(layer) as lease:
                    torch.cuda._sleep(LONG_NS // 20)
                    assert len(lease.tensors) > 1
        group.cancel_scope.cancel()
    assert len(delays) > 20
    assert np.percentile(delays, 90) < 0.01


async def test_opening_and_closing_leaves_no_memory_behind(sample: Sample) -> None:
    async def once() -> None:
        async with open_transport(sample.root, device="cuda", ring_bytes="8MiB") as transport:
            await sample.check_prefetch(transport, "blocks.0")

    def used() -> tuple[int, int]:
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    await once()
    before = used()
    for _ in range(20):
        await once()
    assert used() == before


def test_a_refused_registration_is_survived(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory registered already is refused; nothing of that error surfaces later, in an innocent call."""
    with StagingRing(1, 4096, pinned=True) as ring:
        monkeypatch.setattr("splitzip_aio.memory._address", lambda _: _address(ring.slots[0].memory))
        with StagingRing(1, 4096, pinned=True) as refused:
            reason = refused.statistics().fallback
            assert reason is not None
            assert "cudaHostRegister of 4096 bytes failed" in reason
            assert reason in caplog.text
            assert not refused.statistics().pinned
            assert torch.zeros(8, device="cuda").sum().item() == 0


def test_more_than_the_device_has_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="arena_bytes: cuda:0 has no"):
        CudaArena(1 << 44, device=torch.device("cuda", 0), slot_bytes=1 << 20)


def test_views_outlive_the_arena(filled: Filled) -> None:
    view = filled.arena.view(0, 4)
    anyio.run(filled.arena.aclose)
    assert raw(view) == b"\xa5" * 4
