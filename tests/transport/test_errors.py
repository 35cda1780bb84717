"""Each thing that goes wrong is an error of its own, told to whom it concerns, and to nobody else."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from splitzip_aio.abc import Arena
from splitzip_aio.errors import (
    CacheNotFoundError,
    ClosedError,
    CorruptDataError,
    InvalidArgumentError,
    LayerTooLargeError,
    LeaseReleasedError,
    ReadError,
    SplitZipError,
    TransportError,
    UnknownLayerError,
    UnsupportedError,
    WrongEventLoopError,
)
from splitzip_aio.host_cache import HostCache
from splitzip_aio.transport import Transport, open_transport
from tests.transport.samples import LAYER_BYTES, Sample, assert_idle, raw, settled

pytestmark = pytest.mark.anyio


@pytest.fixture
def damaged(sample: Sample, tmp_path: Path) -> Sample:
    """A copy of the cache, to be damaged."""
    return Sample(shutil.copytree(sample.root, tmp_path / "damaged"), sample.tensors)


def pack(sample: Sample, number: int = 0) -> Path:
    return sorted((sample.root / "packs").iterdir())[number]


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


async def test_unknown_layer(sample: Sample) -> None:
    async with open_transport(sample.root, device="cpu", ring_bytes="1MiB") as transport:
        with pytest.raises(UnknownLayerError, match=r"no layer 'blocks\.99'; the cache has 'blocks\.0'"):
            await transport.prefetch("blocks.99")


async def test_layer_larger_than_the_arena(sample: Sample, device: str) -> None:
    async with open_transport(
        sample.root, device=device, ring_bytes="1MiB", arena_bytes=LAYER_BYTES - 1, layer_of=_small_or_block
    ) as transport:
        with pytest.raises(LayerTooLargeError, match=rf"'blocks.1' needs {LAYER_BYTES} .* arena has {LAYER_BYTES - 1}"):
            await transport.prefetch("blocks.1")
        async with await transport.prefetch("small") as lease:
            assert len(lease.tensors) == 1


def _small_or_block(name: str) -> str:
    return "small" if name == "blocks.0.scale" else ".".join(name.split(".")[:2])


async def test_closed_transport(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="1MiB") as transport:
        lease = await transport.prefetch("blocks.0")
        await transport.aclose()
        await transport.aclose()
        with pytest.raises(ClosedError, match="transport is closed"):
            await transport.prefetch("blocks.0")
        assert lease.released
        with pytest.raises(LeaseReleasedError, match=r"lease on layer 'blocks\.0' is over"):
            lease.tensors  # noqa: B018
        lease.release()
    with pytest.raises(ClosedError):
        await transport.prefetch("blocks.0")


async def test_tensors_kept_beyond_the_transport_stay_readable(sample: Sample, device: str) -> None:
    async with (
        open_transport(sample.root, device=device, ring_bytes="1MiB") as transport,
        await transport.prefetch("blocks.0") as lease,
    ):
        kept = lease.tensors["blocks.0.up.weight"]
    assert raw(kept) == sample.tensors["blocks.0.up.weight"][2]


async def test_closing_tells_those_who_wait(sample: Sample, device: str) -> None:
    errors: list[SplitZipError] = []

    async def wait(layer: str) -> None:
        try:
            await transport.prefetch(layer)
        except ClosedError as error:
            errors.append(error)

    async with open_transport(sample.root, device=device, ring_bytes="1MiB", arena_bytes=LAYER_BYTES) as transport:
        lease = await transport.prefetch("blocks.0")
        async with anyio.create_task_group() as group:
            for layer in ("blocks.1", "blocks.1", "blocks.2"):
                group.start_soon(wait, layer)
            await anyio.wait_all_tasks_blocked()
            await transport.aclose()
        assert len(errors) == len({id(error) for error in errors}) == 3
        assert lease.released
        assert_idle(transport.statistics())


async def test_released_lease(sample: Sample, device: str) -> None:
    async with open_transport(sample.root, device=device, ring_bytes="1MiB") as transport:
        async with await transport.prefetch("blocks.0") as lease:
            assert not lease.released
            assert repr(lease) == "<Lease 'blocks.0'>"
        assert lease.released
        assert repr(lease) == "<Lease 'blocks.0' released>"
        with pytest.raises(LeaseReleasedError, match=r"'blocks\.0' is over; prefetch"):
            lease.tensors  # noqa: B018
        with pytest.raises(LeaseReleasedError):
            await lease.__aenter__()
        lease.release()
        async with await transport.prefetch("blocks.0") as another:
            sample.check("blocks.0", another.tensors)
            lease.release()  # counts once
            assert transport.statistics().residency.leased == 1


async def test_forgotten_lease_is_reported(sample: Sample) -> None:
    async with open_transport(sample.root, device="cpu", ring_bytes="1MiB") as transport:
        with pytest.warns(ResourceWarning, match=r"'blocks\.0' was never released"):
            await transport.prefetch("blocks.0")


async def test_another_event_loop(sample: Sample) -> None:
    async with open_transport(sample.root, device="cpu", ring_bytes="1MiB") as transport:
        for call in (lambda: transport.prefetch("blocks.0"), transport.aclose):
            for backend in ("asyncio", "trio"):
                with pytest.raises(WrongEventLoopError, match="event loop it was opened in"):
                    await anyio.to_thread.run_sync(lambda: anyio.run(call, backend=backend))  # noqa: B023
        await sample.check_prefetch(transport, "blocks.0")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ring_bytes": "many"}, InvalidArgumentError, "ring_bytes"),
        ({"arena_bytes": -1}, InvalidArgumentError, "arena_bytes"),
        ({"arena_bytes": 0}, InvalidArgumentError, "arena_bytes: expected at least 256, found 0"),
        ({"ring_bytes": 4096}, LayerTooLargeError, "the ring has 4096"),
        ({"driver": "telepathy"}, InvalidArgumentError, "telepathy"),
        ({"io": "sideways"}, InvalidArgumentError, "sideways"),
        ({"device": "abacus"}, InvalidArgumentError, "device: expected .* 'abacus'"),
        ({"device": "meta"}, UnsupportedError, "not on 'meta'"),
        ({"device": "cuda:99"}, UnsupportedError, "cuda:99"),
        ({"layer_of": len}, InvalidArgumentError, "layer_of"),
    ],
)
async def test_options_out_of_range(
    sample: Sample, options: dict[str, Any], error: type[SplitZipError], message: str
) -> None:
    with pytest.raises(error, match=message):
        async with open_transport(sample.root, **({"device": "cpu"} | options)):
            pass


async def test_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError):
        async with open_transport(tmp_path, device="cpu"):
            pass


async def test_one_flipped_bit_anywhere_hands_out_no_wrong_byte(damaged: Sample, device: str) -> None:
    chance = random.Random(3)
    path = pack(damaged)
    caught = 0
    async with open_transport(
        damaged.root, device=device, ring_bytes="1MiB", arena_bytes=LAYER_BYTES
    ) as transport:  # an arena of one layer, so that each prefetch reads
        for _ in range(60):
            offset, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
            flip(path, offset, bit)
            struck = [layer for layer in transport.layers if brings(transport, layer, path, offset)]
            failed = [layer for layer in struck if not await arrives(damaged, transport, layer)]
            assert failed in ([], struck)
            caught += bool(failed)
            flip(path, offset, bit)
            await settled(transport)
            assert_idle(transport.statistics())
        for layer in transport.layers:
            await damaged.check_prefetch(transport, layer)
    assert caught >= 50  # what is left is padding


def brings(transport: Transport, layer: str, path: Path, offset: int) -> bool:
    """Whether a segment of the layer is at this offset of the pack."""
    return any(
        segment.source <= offset - read.offset < segment.source + segment.nbytes
        for read in transport._parts.plan.layer(layer).reads
        if read.path == str(path)
        for segment in read.segments
    )


async def arrives(sample: Sample, transport: Transport, layer: str) -> bool:
    """Whether a layer came; if so it is right."""
    try:
        await sample.check_prefetch(transport, layer)
    except CorruptDataError:
        return False
    return True


async def test_corrupt_data_names_tensor_pack_and_offset(damaged: Sample, device: str) -> None:
    async with open_transport(damaged.root, device=device, ring_bytes="1MiB") as transport:
        read = transport._parts.plan.layer("blocks.2").reads[0]
        segment = read.segments[3]
        place = read.offset + segment.source
        flip(pack(damaged), place + 400)
        with pytest.raises(CorruptDataError) as caught:
            await transport.prefetch("blocks.2")
        for part in (repr(segment.tensor), str(pack(damaged)), f"at offset {place}"):
            assert part in str(caught.value)
        await sample_is_served(damaged, transport)
        flip(pack(damaged), place + 400)
        await damaged.check_prefetch(transport, "blocks.2")  # a failure is not remembered


async def sample_is_served(sample: Sample, transport: Transport) -> None:
    await sample.check_prefetch(transport, "blocks.1")
    await sample.check_prefetch(transport, "blocks.3")


async def test_everyone_who_waits_for_a_corrupt_layer_gets_an_error_of_their_own(damaged: Sample, device: str) -> None:
    errors: list[CorruptDataError] = []

    async def wait() -> None:
        with pytest.raises(CorruptDataError) as caught:
            await transport.prefetch("blocks.2")
        errors.append(caught.value)

    async with open_transport(damaged.root, device=device, ring_bytes="1MiB") as transport:
        read = transport._parts.plan.layer("blocks.2").reads[0]
        flip(pack(damaged), read.offset + read.segments[0].source + 8)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait)
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1


@pytest.mark.parametrize("how", ["truncated", "missing", "truncated while open"])
async def test_short_or_missing_pack_fails_only_what_is_in_it(damaged: Sample, device: str, how: str) -> None:
    last = pack(damaged, -1)

    def harm() -> None:
        if how == "missing":
            last.unlink()
        else:
            last.write_bytes(last.read_bytes()[:8192])

    if how != "truncated while open":
        harm()
    async with open_transport(damaged.root, device=device, ring_bytes="1MiB") as transport:
        if how == "truncated while open":
            harm()
        await damaged.check_prefetch(transport, "blocks.0")
        with pytest.raises((CorruptDataError, ReadError), match=str(last)):
            await transport.prefetch("blocks.9")
        await damaged.check_prefetch(transport, "blocks.1")
        await settled(transport)
        assert_idle(transport.statistics())


async def test_a_pack_that_is_a_link_is_not_followed(damaged: Sample, tmp_path: Path) -> None:
    path = pack(damaged)
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SplitZipError, match="link"):
        async with open_transport(damaged.root, device="cpu"):
            pass


async def test_an_exception_of_the_block_passes_through(sample: Sample, device: str) -> None:
    seen: list[Transport] = []

    async def fail() -> None:
        async with (
            open_transport(sample.root, device=device, ring_bytes="1MiB") as transport,
            await transport.prefetch("blocks.0"),
        ):
            seen.append(transport)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await fail()
    assert caught.value.__cause__ is None
    assert_idle(seen[0].statistics())


class BrokenError(Exception):
    """An error that the pipeline knows nothing of."""


class BreakingUploads:
    """An arena's uploads end, all of them, in an error of Python's, as soon as ``broken`` is set."""

    def __init__(self, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = anyio.Event()
        self.broken = anyio.Event()
        monkeypatch.setattr(arena, "submit", self.submit)
        monkeypatch.setattr(arena, "reap", self.reap)

    def submit(self, *args: object, **options: object) -> None:
        self.reached.set()

    async def reap(self) -> None:
        await self.broken.wait()
        raise BrokenError


async def test_a_breakdown_is_told_to_all_who_wait(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    causes = []
    transports: list[Transport] = []

    async def wait(transport: Transport, layer: str) -> None:
        with pytest.raises(TransportError, match="streaming broke down: BrokenError") as caught:
            await transport.prefetch(layer)
        causes.append(caught.value.__cause__)

    async def stream() -> None:
        async with open_transport(
            sample.root, device="cpu", ring_bytes="1MiB", arena_bytes="128KiB", host_cache=host
        ) as transport:
            transports.append(transport)
            BreakingUploads(transport._parts.arena, monkeypatch).broken.set()
            async with anyio.create_task_group() as group:
                for layer in transport.layers:
                    group.start_soon(wait, transport, layer)
            await wait(transport, "blocks.0")

    with HostCache("1MiB", pinned=False) as host:
        with anyio.fail_after(5), pytest.raises(TransportError, match="broke down"):
            await stream()
        assert host.statistics().held == 0
    assert len(causes) == 12
    assert all(isinstance(cause, ExceptionGroup) and cause.subgroup(BrokenError) for cause in causes)
    statistics = transports[0].statistics()
    assert statistics.ring.free == statistics.ring.slots
    assert statistics.io.open_files == 0


async def test_a_breakdown_that_nobody_waits_for_is_raised_at_the_end(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream() -> None:
        async with open_transport(sample.root, device="cpu", ring_bytes="1MiB") as transport:
            upload = BreakingUploads(transport._parts.arena, monkeypatch)
            async with anyio.create_task_group() as group:
                group.start_soon(transport.prefetch, "blocks.0")
                await upload.reached.wait()
                group.cancel_scope.cancel()
            upload.broken.set()

    with anyio.fail_after(5), pytest.raises(TransportError, match="broke down: BrokenError"):
        await stream()


async def test_a_failing_teardown_is_raised(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(arena: object) -> None:
        raise BrokenError

    monkeypatch.setattr("splitzip_aio.arena.host.HostArena.aclose", fail)
    with pytest.raises(TransportError, match="broke down: BrokenError"):
        async with open_transport(sample.root, device="cpu", ring_bytes="1MiB"):
            pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_is_told_and_the_parent_goes_on(sample: Sample) -> None:
    """Its event loop looks the same to it, down to the token."""
    async with open_transport(sample.root, device="cpu") as transport:
        child = os.fork()
        if child == 0:
            try:
                await transport.prefetch("blocks.0")
            except WrongEventLoopError as error:
                os._exit(0 if "in its child" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 - it ends at once
        for layer in transport.layers:
            await sample.check_prefetch(transport, layer)
