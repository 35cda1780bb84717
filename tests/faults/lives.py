"""Processes that end, fork or lose their event loop while reads are in flight.

``python -m tests.faults.lives NAME CACHE`` lives one of these lives and prints what came of it. Reads take as long as
they can, so that whatever happens, happens in the middle of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from splitzip_aio.drivers.faults import FaultKind, FaultSchedule, faulty_driver
from splitzip_aio.errors import SplitZipError
from splitzip_aio.transport import Transport, open_transport
from tests.transport.samples import raw

LATE_S = 0.3


def slow(driver: str) -> Any:
    """A driver whose reads all come as late as they may."""
    kinds = [FaultKind.AFTER_CANCELLATION]
    return faulty_driver(FaultSchedule(rate=1.0, kinds=kinds, longest_delay_s=LATE_S), driver)  # type: ignore[arg-type]


async def begin(cache: str, driver: str, then: Callable[[Transport], Any]) -> None:
    """Open a transport, ask for three layers, and go on with ``then`` while they are read."""
    async with (
        open_transport(cache, device="cpu", ring_bytes="1MiB", driver=slow(driver)) as transport,
        anyio.create_task_group() as group,
    ):
        for layer in transport.layers[:3]:
            group.start_soon(transport.prefetch, layer)
        await reading(transport)
        print("in flight", flush=True)
        result = then(transport)
        if result is not None:
            await result


async def reading(transport: Transport) -> None:
    """Wait until the kernel has something to do."""
    while transport.statistics().io.in_flight == 0:  # noqa: ASYNC110 - nobody tells
        await anyio.sleep(0.001)


def leave(cache: str, driver: str) -> None:
    """SystemExit in the middle of the block."""

    async def main() -> None:
        async with open_transport(cache, device="cpu", ring_bytes="1MiB", driver=slow(driver)) as transport:
            asked = [asyncio.ensure_future(transport.prefetch(layer)) for layer in transport.layers[:3]]
            await reading(transport)
            print("in flight", flush=True)
            for each in asked:
                each.add_done_callback(lambda done: done.exception())
            sys.exit(3)

    anyio.run(main)


def end_of_main_thread(cache: str, driver: str) -> None:
    """The interpreter ends while a daemon thread streams."""
    began = threading.Event()

    def then(transport: Transport) -> Any:
        began.set()
        return anyio.sleep(60)

    threading.Thread(target=anyio.run, args=(begin, cache, driver, then), daemon=True).start()
    began.wait(60)


def closed_loop(cache: str, driver: str) -> None:
    """The event loop is stopped and closed; what was in flight is waited for when the process ends, at the latest."""
    warnings.simplefilter("ignore", ResourceWarning)
    loop = asyncio.new_event_loop()

    def stop(transport: Transport) -> Any:
        asyncio.get_running_loop().stop()
        return anyio.sleep(60)

    task = loop.create_task(begin(cache, driver, stop))
    loop.run_forever()
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if hasattr(thread, "stop"):  # anyio's own, which wait for their loop for ever, whoever used it
            thread.stop()
            thread.join()
    print("closed")


def fork(cache: str, driver: str) -> None:
    """A child of multiprocessing uses the transport, and ends; the parent goes on."""
    warnings.simplefilter("ignore", DeprecationWarning)

    def use(transport: Transport, answer: Any) -> None:
        try:
            anyio.run(transport.prefetch, transport.layers[0])
        except SplitZipError as error:
            answer.send(f"{type(error).__name__}: {error}")

    def child(transport: Transport, answer: Any) -> None:
        """In a thread, since this one was forked in the middle of an event loop."""
        thread = threading.Thread(target=use, args=(transport, answer))
        thread.start()
        thread.join()

    async def main() -> None:
        async with open_transport(cache, device="cpu", ring_bytes="1MiB", driver=slow(driver)) as transport:
            digest = hashlib.sha256()
            for number, layer in enumerate(transport.layers):
                if number == 2:
                    async with anyio.create_task_group() as group:
                        group.start_soon(transport.prefetch, layer)
                        await anyio.sleep(0.05)
                        context = multiprocessing.get_context("fork")
                        ours, theirs = context.Pipe()
                        process = context.Process(target=child, args=(transport, theirs))
                        process.start()
                        print(ours.recv() if ours.poll(60) else "no answer", flush=True)
                        await anyio.to_thread.run_sync(process.join)
                        print(f"child ended {process.exitcode}", flush=True)
                lease = await transport.prefetch(layer)
                async with lease:
                    for name in sorted(lease.tensors):
                        digest.update(name.encode() + raw(lease.tensors[name]))
            print(digest.hexdigest())

    anyio.run(main)


LIVES = {life.__name__: life for life in (leave, end_of_main_thread, closed_loop, fork)}


if __name__ == "__main__":
    LIVES[sys.argv[1]](str(Path(sys.argv[2])), sys.argv[3])
