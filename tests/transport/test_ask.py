"""Layers that no task waits for: answered at once where they are resident, later where not, and not once withdrawn."""

from __future__ import annotations

import anyio
import pytest

from splitzip_aio.errors import ClosedError, LayerTooLargeError, SplitZipError, UnknownLayerError
from splitzip_aio.transport import Lease, open_transport
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, settled

pytestmark = pytest.mark.anyio


class Answers:
    """What was answered, in order."""

    def __init__(self) -> None:
        self.found: list[Lease | SplitZipError] = []
        self._more = anyio.Event()

    def __call__(self, result: Lease | SplitZipError) -> None:
        self.found.append(result)
        self._more.set()

    async def lease(self) -> Lease:
        """The next answer, which is to be a lease."""
        with anyio.fail_after(30):
            while not self.found:
                self._more = anyio.Event()
                await self._more.wait()
        result = self.found.pop(0)
        assert isinstance(result, Lease)
        return result


async def test_answers_come_at_once_or_later(sample: Sample, device: str) -> None:
    answers = Answers()
    async with open_transport(sample.root, device=device) as transport:
        transport.ask("blocks.3", answers)
        assert not answers.found
        async with await answers.lease() as lease:
            sample.check("blocks.3", lease.tensors)
            transport.ask("blocks.3", answers)
            (again,) = answers.found
            assert isinstance(again, Lease)
            again.release()
        await settled(transport)
        assert_idle(transport.statistics())
        assert transport.statistics().residency.hits == 1


async def test_errors_are_answered_or_raised(sample: Sample) -> None:
    async with open_transport(sample.root, device="cpu", arena_bytes=LAYER_BYTES - 256) as transport:
        for layer, error in (("nothing", UnknownLayerError), ("blocks.0", LayerTooLargeError)):
            with pytest.raises(error):
                transport.ask(layer, Answers())
        assert_idle(transport.statistics())


async def test_what_is_withdrawn_is_not_answered(sample: Sample) -> None:
    async with open_transport(sample.root, device="cpu", arena_bytes=LAYER_BYTES) as transport:
        held = await transport.prefetch("blocks.0")
        unwanted, wanted = Answers(), Answers()
        withdraw = transport.ask("blocks.1", unwanted)
        transport.ask("blocks.2", wanted)
        withdraw()
        withdraw()
        held.release()
        async with await wanted.lease() as lease:
            sample.check("blocks.2", lease.tensors)
            late = Answers()
            withdraw = transport.ask("blocks.2", late)
            withdraw()  # it has been answered, and the lease is the caller's
            (await late.lease()).release()
        await settled(transport)
        assert not unwanted.found
        assert_idle(transport.statistics())


async def test_closing_answers_who_still_waits(sample: Sample) -> None:
    answers = Answers()
    async with open_transport(sample.root, device="cpu", arena_bytes=LAYER_BYTES) as transport:
        async with await transport.prefetch("blocks.0"):
            transport.ask("blocks.1", answers)
            transport.ask("blocks.2", answers)
            await transport.aclose()
        assert [type(result) for result in answers.found] == [ClosedError, ClosedError]
        with pytest.raises(ClosedError):
            transport.ask("blocks.3", answers)
