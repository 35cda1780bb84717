"""The demo: a checkpoint is compressed, streamed through the real pipeline, and compared bit by bit."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
import torch
from safetensors import safe_open

import splitzip_aio
from splitzip_aio.cache.checkpoint import Checkpoint, open_checkpoint
from splitzip_aio.cli.output import Output, format_bytes
from splitzip_aio.cli.streaming import StreamReport, stream_cache
from splitzip_aio.cli.synthetic import write_checkpoint

__all__ = ["Comparison", "DemoReport", "run_demo", "same_bits"]

_WARM_UP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo found.

    Attributes:
        checkpoint: the source, or None where it was made for the demo.
        build: the builder's report.
        ratio: bytes of the cache, everything counted, over those of the tensors.
        stream: the timed pass over the cache.
        bit_exact: every tensor equals the source in dtype, shape and each bit.
        differing: names of those that do not.
    """

    checkpoint: str | None
    build: splitzip_aio.BuildReport
    ratio: float
    stream: StreamReport
    bit_exact: bool
    differing: tuple[str, ...]


def run_demo(
    checkpoint: Path | None, *, size: int, directory: Path | None, device: torch.device, output: Output
) -> DemoReport:
    """Build a cache of ``checkpoint``, or of one made up with ``size`` bytes, in a scratch folder, and stream it twice.

    The first pass compares with the source, the second is timed. What is compiled on first use has been by then.

    Raises:
        SplitZipError: any step failed.
        OSError: the scratch folder cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="splitzip-demo-", dir=directory) as scratch:
        source = checkpoint or Path(scratch, "model.safetensors")
        if checkpoint is None:
            _need_room(Path(scratch), 2 * size)
            with output.progress(f"make a checkpoint of {format_bytes(size)}") as progress:
                write_checkpoint(source, size, progress=progress)
        contents = open_checkpoint(source)
        total_bytes = sum(tensor.nbytes for tensor in contents.tensors)
        _need_room(Path(scratch), total_bytes)
        with output.progress("compile, where this is the first time"):
            _warm_up(Path(scratch), device)
        cache = Path(scratch, "cache")
        with output.progress("compress") as progress:
            build = splitzip_aio.build_cache(source, cache, device=str(device), progress=progress)
        stream = partial(stream_cache, cache, device=device, driver="auto", total_bytes=total_bytes)
        with output.progress("stream and compare") as progress, Comparison(contents) as comparison:
            anyio.run(partial(stream, progress=progress, visit=comparison.visit))
        with output.progress("stream") as progress:
            report = anyio.run(partial(stream, progress=progress))
    return DemoReport(
        checkpoint=None if checkpoint is None else str(checkpoint),
        build=build,
        ratio=build.ratio,
        stream=report,
        bit_exact=not comparison.differing,
        differing=tuple(sorted(comparison.differing)),
    )


def _warm_up(scratch: Path, device: torch.device) -> None:
    """Build and stream something small: numba and Triton compile on first use, and keep it for the next process."""
    source, cache = scratch / "small.safetensors", scratch / "small"
    write_checkpoint(source, _WARM_UP_BYTES)
    splitzip_aio.build_cache(source, cache, device=str(device))
    stream = partial(stream_cache, cache, device=device, driver="auto", total_bytes=_WARM_UP_BYTES)
    anyio.run(partial(stream, progress=lambda _: None))


def _need_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"the demo needs {format_bytes(nbytes)} and finds {format_bytes(free)}; name a roomier folder with --dir",
            str(directory.parent),
        )


class Comparison:
    """Compares streamed tensors with those that the safetensors library reads from the source.

    ``differing`` are the names of the tensors not yet seen, or seen and found to be of another dtype or shape or to
    have a bit that differs.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}
        self.differing: set[str] = set()

    def __enter__(self) -> Self:
        for file in self._checkpoint.files:
            opened = self._files.enter_context(safe_open(file.path, framework="pt"))
            self._file_of |= dict.fromkeys((tensor.name for tensor in file.tensors), opened)
        self.differing = set(self._file_of)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()

    def visit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Strike out those of ``tensors`` that equal the source."""
        for name, tensor in tensors.items():
            source = self._file_of[name].get_tensor(name).to(tensor.device)
            if same_bits(tensor, source):
                self.differing.discard(name)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one device have the same dtype, shape and bit patterns; NaNs and zeros by their bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (left, right)))
