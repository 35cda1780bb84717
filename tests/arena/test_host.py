"""Uploads to host memory: exact, checked, and in as many threads as allowed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from splitzip_aio.abc import PlannedRead, PlannedSegment
from splitzip_aio.arena import HostArena
from splitzip_aio.codec.cpu import encode_segment, histogram
from splitzip_aio.codec.formats import BF16, RAW
from splitzip_aio.codec.schedule import STORED, Schedule
from splitzip_aio.errors import ClosedError, CorruptDataError, InvalidArgumentError
from tests.pipeline import upload

Bytes = NDArray[np.uint8]


def weights(elements: int, seed: int) -> Bytes:
    values = (np.random.default_rng(seed).standard_normal(elements) * 0.02).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def encoded(data: Bytes, number: int) -> Bytes:
    """A segment of it; every third is stored."""
    if number % 3 == 2:
        return encode_segment(data, RAW, STORED, ())
    schedule = Schedule.parse("2,3")
    return encode_segment(data, BF16, schedule, schedule.codebooks(histogram(data, BF16), BF16))


class Filled:
    """A slot of several segments, and where they go in an arena: every other 256 bytes stay as they are."""

    def __init__(self, sizes: list[int]) -> None:
        self.data = [weights(size, seed) for seed, size in enumerate(sizes)]
        segments = [encoded(data, number) for number, data in enumerate(self.data)]
        self.memory = memoryview(bytearray(b"".join(segment.tobytes() for segment in segments)))
        self.placements = []
        source = destination = 0
        for number, (segment, data) in enumerate(zip(segments, self.data, strict=True)):
            destination += 256
            self.placements.append(
                PlannedSegment(source, segment.size, destination - 256, data.size, f"number {number}")
            )
            source += segment.size
            destination += -(-data.size // 256) * 256
        self.end = destination

    async def upload(self, arena: HostArena, freed: list[str] | None = None) -> list[str]:
        """Upload to offset 256; what was called back."""
        freed = [] if freed is None else freed
        read = PlannedRead(0, "a.szp", 0, len(self.memory), tuple(self.placements))
        await upload(arena, self.memory, read, 256, drained=lambda: freed.append("drained"))
        return freed


SIZES = [1, 1000, 4096, 300_000, 700_000, 5, 600_000]


@pytest.mark.anyio
@pytest.mark.parametrize("workers", [1, 3])
async def test_segments_arrive_where_they_belong(workers: int) -> None:
    filled = Filled(SIZES)
    arena = HostArena(filled.end + 256, workers=workers)
    arena.buffer.fill_(0xA5)
    assert await filled.upload(arena) == ["drained"]
    untouched = np.ones(filled.end + 256, bool)
    for placement, data in zip(filled.placements, filled.data, strict=True):
        span = slice(256 + placement.destination, 256 + placement.destination + placement.decoded_bytes)
        assert np.array_equal(arena.view(span.start, data.size).numpy(), data)
        untouched[span] = False
    assert (arena.buffer.numpy()[untouched] == 0xA5).all()


@pytest.mark.anyio
async def test_the_first_wrong_segment_is_named_and_the_slot_freed() -> None:
    filled = Filled(SIZES)
    for number in (4, 3):
        filled.memory[filled.placements[number].source + 200] ^= 1
    freed: list[str] = []
    with pytest.raises(CorruptDataError, match="number 3"):
        await filled.upload(HostArena(filled.end), freed)
    assert freed == ["drained"]


@pytest.mark.anyio
async def test_an_error_keeps_no_view_of_the_slot() -> None:
    filled = Filled([1000])
    filled.memory[3] ^= 1
    with pytest.raises(CorruptDataError):
        await filled.upload(HostArena(filled.end))
    filled.memory.release()  # BufferError if anyone still looked at it


@pytest.mark.anyio
async def test_a_segment_that_decodes_to_another_size_is_refused() -> None:
    filled = Filled([1000])
    (one,) = filled.placements
    filled.placements = [PlannedSegment(one.source, one.nbytes, one.destination, 1998, one.tensor)]
    with pytest.raises(CorruptDataError, match=r"number 0.*2000 bytes.*1998"):
        await filled.upload(HostArena(filled.end))


@pytest.mark.anyio
async def test_views_outlive_the_arena() -> None:
    arena = HostArena(1024)
    view = arena.view(256, 4)
    view.fill_(7)
    await arena.aclose()
    await arena.aclose()
    assert view.tolist() == [7] * 4
    with pytest.raises(ClosedError):
        arena.view(0, 1)


def test_statistics_follow_ranges() -> None:
    arena = HostArena(1000)
    assert arena.statistics().largest_free_bytes == 768
    offset = arena.allocate(300)
    assert offset == 0
    assert arena.fits(256)
    assert not arena.fits(512)
    assert arena.fits(768, freeing=[offset])
    assert arena.allocate(512) is None
    arena.free(offset)
    statistics = arena.statistics()
    assert (statistics.capacity_bytes, statistics.used_bytes, statistics.peak_bytes, statistics.ranges) == (
        1000,
        0,
        512,
        0,
    )


@pytest.mark.parametrize(("size", "message"), [(255, "at least 256"), (1 << 62, "kernel refused")])
def test_impossible_capacities_are_refused(size: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"arena_bytes: .*{message}"):
        HostArena(size)
