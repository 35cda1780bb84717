"""The consumer of these tests, and caches of all, half and none of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from splitzip_aio.cache import SplitZipShardCache, build_cache

if TYPE_CHECKING:
    from tests.vmm_fast.host import Consumer

SEGMENT_ELEMENTS = 1024


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Consumer]:
    """A consumer; attach it with a budget."""
    pytest.importorskip("ddo_vmm_allocator", reason="the consumer's package is not installed: pip install '.[ddo]'")
    from tests.vmm_fast import host

    host.use_host(monkeypatch)
    directory = tmp_path / "model"
    directory.mkdir()
    with host.consumer(directory) as opened:
        yield opened


@pytest.fixture
def cache(attached: Consumer, tmp_path: Path) -> Iterator[SplitZipShardCache]:
    """All of its weights."""
    build_cache(attached.shards, tmp_path / "cache", segment_elements=SEGMENT_ELEMENTS)
    with SplitZipShardCache(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def enable() -> Iterator[Callable[..., Any]]:
    """``enable_splitzip_fast_transport`` for the host; what it made is closed at the end."""
    from splitzip_aio.vmm_fast import enable_splitzip_fast_transport
    from tests.vmm_fast.host import arena_view

    made: list[Any] = []

    def enable_here(store: Any, cache: Any, **options: Any) -> Any:
        options = {"device": "cpu", "arena_view_fn": arena_view, "ring_bytes": "1MiB"} | options
        made.append(enable_splitzip_fast_transport(store, cache, **options))
        return made[-1]

    yield enable_here
    for each in made:
        each.close()
