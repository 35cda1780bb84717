"""A GPU without memory to spare, in the middle of a layer: one error, and after it all is as before.

The allocations fail on purpose, and memory is limited for this process alone: the device is never filled, so tests can
run beside others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from splitzip_aio.arena import cuda
from splitzip_aio.codec.gpu import PreparedDecode
from splitzip_aio.errors import InvalidArgumentError, TransportError
from splitzip_aio.transport import open_transport
from tests.transport.conftest import sample
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

__all__ = ["sample"]

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

SPARE_BYTES = 64 << 20  # torch's allocator takes 20 MiB at least
RING_BYTES = 500 << 10  # most of it for tables; a layer is four slots or more


class Refusal:
    """Puts ``function`` in the place of ``real``: from call number ``first`` on, so many calls find no memory."""

    def __init__(self, real: Callable[..., Any], first: int, count: int = 1) -> None:
        self.calls = self.refused = 0

        def function(*arguments: Any) -> Any:
            self.calls += 1
            if first < self.calls <= first + count:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return real(*arguments)

        self.function = function


@contextmanager
def limited(spare_bytes: int) -> Iterator[None]:
    """This process may allocate no more than so much beyond what it has."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(("what", "first"), [("decode", 0), ("decode", 1), ("decode", 2), ("verdict", 0)])
async def test_in_the_middle_of_a_layer(sample: Sample, monkeypatch: pytest.MonkeyPatch, what: str, first: int) -> None:
    """The one layer fails, its neighbours come, and the same layer asked for again comes in the same memory."""
    if what == "decode":
        refusal = Refusal(PreparedDecode.launch, first)
        monkeypatch.setattr(PreparedDecode, "launch", refusal.function)
    else:
        monkeypatch.setattr(cuda, "_VERDICTS", 0)
        refusal = Refusal(cuda._Verdict.make, first + 1)  # the first call is the arena's own, for none
        monkeypatch.setattr(cuda._Verdict, "make", refusal.function)
    async with open_transport(
        sample.root, device="cuda", ring_bytes=RING_BYTES, arena_bytes=LAYER_BYTES, io="buffered"
    ) as transport:
        errors = []
        for layer in ("blocks.1", "blocks.2"):  # of several slots each
            try:
                await sample.check_prefetch(transport, layer)
            except TransportError as error:
                errors.append(str(error))
        assert refusal.refused == 1, f"{refusal.calls} calls: the layers were of too few slots"
        (said,) = errors
        assert "cuda:0 ran out of memory while this was uploaded; free some, and ask for the layer again" in said
        await settled(transport)
        assert_idle(transport.statistics())
        before = allocated()
        for layer in ("blocks.1", "blocks.2", "blocks.1"):
            await sample.check_prefetch(transport, layer)
        await settled(transport)
        statistics = transport.statistics()
        assert_idle(statistics)
        assert statistics.residency.failed == 1
        assert statistics.arena.peak_bytes <= LAYER_BYTES
        assert allocated() == before


async def test_every_upload_fails_and_then_none(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred failures on one transport lose no slot and no byte of the arena."""
    refusal = Refusal(PreparedDecode.launch, 0, 1 << 30)
    async with open_transport(sample.root, device="cuda", ring_bytes=RING_BYTES, arena_bytes=LAYER_BYTES) as transport:
        await sample.check_prefetch(transport, "blocks.0")
        before = allocated()
        with monkeypatch.context() as patch:
            patch.setattr(PreparedDecode, "launch", refusal.function)
            for number in range(100):
                with pytest.raises(TransportError, match="ran out of memory"):
                    await transport.prefetch(f"blocks.{1 + number % 9}")
        await settled(transport)
        assert_idle(transport.statistics())
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
        assert allocated() == before
        assert refusal.refused >= 100


async def test_no_room_for_what_was_ordered(sample: Sample) -> None:
    before = allocated()
    with limited(SPARE_BYTES):
        with pytest.raises(InvalidArgumentError, match=r"ring_bytes: cuda:0 has no \d+ bytes left; give less"):
            async with open_transport(sample.root, device="cuda", ring_bytes="256MiB", arena_bytes=LAYER_BYTES):
                pass
        assert allocated() == before
        async with open_transport(
            sample.root, device="cuda", ring_bytes=RING_BYTES, arena_bytes=LAYER_BYTES
        ) as transport:
            await sample.check_prefetch(transport, "blocks.0")


def test_the_limit_limits() -> None:
    """Else the tests above show nothing."""
    with limited(SPARE_BYTES):
        torch.empty(SPARE_BYTES // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * SPARE_BYTES, dtype=torch.uint8, device="cuda")
