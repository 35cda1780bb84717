"""Consumers whose CUDA stream lags behind: they release a layer long before the device has looked at it.

Each lease is used on a stream of its task's own, which sleeps for a random time and only then compares every byte, on
the device. The task releases at once and goes on, so the layer may be evicted and its memory given to another while the
comparison is still to come: nothing but the fence of the release keeps the bytes until then. On the CPU the same is
done without streams.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import anyio
import torch

from splitzip_aio.cache import layer_name
from splitzip_aio.errors import SplitZipError
from splitzip_aio.transport import Lease, Transport
from tests.faults.seeded import LONGEST_RUN_S, Tally
from tests.transport.samples import Sample

__all__ = ["Expected", "LateConsumer"]

LONGEST_DELAY_CYCLES = 20_000_000  # a hundredth of a second
LATE_HOST_S = 0.002


class Expected:
    """The bytes of a sample's layers on a device, made once for a whole soak."""

    def __init__(self, sample: Sample, device: str) -> None:
        self.device = torch.device(device)
        self.layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, (_, _, data) in sample.tensors.items():
            tensor = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
            self.layers.setdefault(layer_name(name), {})[name] = tensor.to(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    async def use(
        self, transport: Transport, layers: list[str], patience_s: float | None, chance: random.Random, tally: Tally
    ) -> None:
        """Ask for layers one after another, for so many seconds at most, and let the device check what comes."""
        consumer = LateConsumer(self, chance, tally)
        with anyio.CancelScope(deadline=anyio.current_time() + (LONGEST_RUN_S if patience_s is None else patience_s)):
            for layer in layers:
                await consumer.ask(transport, layer)
        await consumer.finish()


class LateConsumer:
    """One task's stream, and what the device found on it.

    Attributes:
        used: layers that were used since ``finish``.
    """

    def __init__(self, expected: Expected, chance: random.Random, tally: Tally) -> None:
        self.used: list[str] = []
        self._expected = expected
        self._chance = chance
        self._tally = tally
        self._stream = torch.cuda.Stream(expected.device) if expected.device.type == "cuda" else None
        self._wrong = torch.zeros(len(expected.layers), dtype=torch.int64, device=expected.device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(expected.device))

    async def ask(self, transport: Transport, layer: str) -> None:
        """Ask for a layer, use it if it comes, and release it before the device has."""
        outcome = "cancelled"
        try:
            lease = await transport.prefetch(layer)
            try:
                if self._chance.random() < 0.3:  # leases last, too
                    await anyio.sleep(self._chance.random() * LATE_HOST_S)
                self._use(layer, lease)
            finally:
                self._release(lease)
            outcome = "used late"
        except SplitZipError as error:
            outcome = type(error).__name__
        finally:
            self._tally.outcomes[outcome] += 1

    async def finish(self) -> None:
        """Wait for the device, cancelled or not, and see what it found.

        Raises:
            AssertionError: there was a wrong byte.
        """
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            with anyio.CancelScope(shield=True):
                while not done.query():  # noqa: ASYNC110 - the device tells nobody
                    await anyio.sleep(0.001)
        wrong = self._wrong.tolist()
        layers = list(self._expected.layers)
        found = {layer: count for layer, count in zip(layers, wrong, strict=True) if count}
        assert not found, f"wrong bytes on the device, of {len(self.used)} layers used: {found}"
        self._tally.outcomes["right bytes"] += len(self.used)
        self.used.clear()

    def _use(self, layer: str, lease: Lease) -> None:
        """Give the stream a nap, and then the comparison."""
        expected = self._expected.layers[layer]
        assert lease.tensors.keys() == expected.keys()
        with torch.cuda.stream(self._stream):  # does nothing for None
            lease.wait()
            if self._stream is not None:
                torch.cuda._sleep(self._chance.randrange(LONGEST_DELAY_CYCLES))
            self._compare(lease.tensors, expected, self._wrong[list(self._expected.layers).index(layer)])
        self.used.append(layer)

    def _compare(
        self, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], wrong: torch.Tensor
    ) -> None:
        for name, right in expected.items():
            if right.numel():
                bytes_ = found[name].reshape(-1).view(torch.uint8)
                wrong += (bytes_ != right).sum()

    def _release(self, lease: Lease) -> None:
        """On the stream that the work was given to, which is behind."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            lease.release()
