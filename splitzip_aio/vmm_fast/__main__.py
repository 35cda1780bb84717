"""``python -m splitzip_aio.vmm_fast CHECKPOINT CACHE``: whether a cache serves a checkpoint, and how to use it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.errors import SplitZipError
from splitzip_aio.vmm_fast.catalog import Catalog

__all__ = ["coverage", "main"]

_ADVICE = """
Add to the program, after the model was loaded and its hook applied:

    from splitzip_aio.vmm_fast import enable_splitzip_fast_transport

    transport = enable_splitzip_fast_transport(loaded.hook, {cache!r})

and give its DynamicOffloadConfig vmm_page_mb=64, unless the weight budget is below 1 GiB.
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a checkpoint as the consumer describes it."""

    path: Path
    offset_bytes: int
    size_bytes: int


def coverage(checkpoint: Path, cache: SplitZipShardCache) -> tuple[int, int, int, int]:
    """How much of a checkpoint a cache has: tensors of how many, bytes of how many.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        SourceChangedError: a file of it is not what the cache was built from.
    """
    catalog = Catalog(cache)
    places = [
        _Place(file.path, tensor.offset, tensor.nbytes)
        for file in open_checkpoint(checkpoint).files
        for tensor in file.tensors
        if tensor.nbytes
    ]
    found = [place.size_bytes for place in places if catalog.find(place) is not None]
    return len(found), len(places), sum(found), sum(place.size_bytes for place in places)


def main(arguments: Sequence[str] | None = None) -> int:
    """Say whether a cache serves a checkpoint; the exit status is 0 if it has any of it, and none of it has changed."""
    parser = argparse.ArgumentParser(prog="python -m splitzip_aio.vmm_fast", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="what the model is loaded from")
    parser.add_argument("cache", type=Path, help="what 'splitzip-aio build CHECKPOINT CACHE' made of it")
    options = parser.parse_args(arguments)
    try:
        with SplitZipShardCache(options.cache) as cache:
            found, tensors, found_bytes, all_bytes = coverage(options.checkpoint, cache)
    except SplitZipError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    share = f"{found} of {tensors} tensors, {found_bytes} of {all_bytes} bytes"
    if not found:
        sys.stderr.write(f"{share}: the cache was built from other files; build one from {options.checkpoint}\n")
        return 1
    sys.stdout.write(f"{share} come from the cache; the rest is left to the native transport\n")
    sys.stdout.write(_ADVICE.format(cache=str(options.cache)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
