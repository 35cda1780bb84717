"""Watching a descriptor, and waiting that cancellation does not cut short."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import anyio
import pytest

from splitzip_aio.waiting import Watch, finish_whatever_comes

pytestmark = pytest.mark.anyio


class Pipe:
    """A pipe, and what was read from it."""

    def __init__(self) -> None:
        self.readable, self.writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.found: list[bytes] = []

    def fileno(self) -> int:
        return self.readable

    def read(self) -> None:
        self.found.append(os.read(self.readable, 100))


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.readable)
    os.close(pipe.writable)


async def call_when_readable(pipe: Pipe, call: Callable[[], None], wanted: Callable[[], bool]) -> None:
    with Watch(pipe) as watch:
        await watch.call(call, wanted)


def fail() -> NoReturn:
    raise ZeroDivisionError


async def test_it_calls_each_time_until_no_more_is_wanted(pipe: Pipe) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(call_when_readable, pipe, pipe.read, lambda: len(pipe.found) < 3)
        for letter in (b"a", b"b", b"c"):
            os.write(pipe.writable, letter)
            await anyio.sleep(0.05)
    assert pipe.found == [b"a", b"b", b"c"]
    os.write(pipe.writable, b"d")
    await anyio.sleep(0.01)
    assert len(pipe.found) == 3  # nobody watches any more


async def test_between_calls_nothing_is_read(pipe: Pipe) -> None:
    with Watch(pipe) as watch:
        for letter in (b"a", b"b"):
            os.write(pipe.writable, letter)
            await anyio.sleep(0.01)
            assert letter not in pipe.found
            with anyio.fail_after(5):
                await watch.call(pipe.read, lambda: False)
            assert pipe.found[-1] == letter


async def test_what_fails_is_raised_where_it_is_waited_for(pipe: Pipe) -> None:
    os.write(pipe.writable, b"a")
    with anyio.fail_after(5), pytest.raises(ZeroDivisionError):
        await call_when_readable(pipe, fail, lambda: True)
    with anyio.fail_after(5), pytest.raises(ZeroDivisionError):
        await call_when_readable(pipe, pipe.read, fail)
    assert pipe.found == [b"a"]


async def test_cancelled_it_watches_no_longer(pipe: Pipe) -> None:
    with anyio.move_on_after(0.01) as scope:
        await call_when_readable(pipe, pipe.read, lambda: True)
    assert scope.cancelled_caught
    os.write(pipe.writable, b"a")
    await anyio.sleep(0.01)
    assert pipe.found == []


async def test_a_cancellation_comes_through_once_the_waiting_is_over() -> None:
    event, ended = anyio.Event(), []

    async def wait() -> None:
        try:
            await finish_whatever_comes(event.wait)
        finally:
            ended.append(event.is_set())

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert ended == []
            event.set()
    assert ended == [True]
