"""Building a cache: tensors in, packs and a manifest out, all or nothing."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from splitzip_aio.cache.contents import BuildReport, Contents
from splitzip_aio.cache.encoder import ArrayTensor, Survey, TensorData, TensorEncoder
from splitzip_aio.cache.journal import Journal, Record
from splitzip_aio.cache.layers import LayerRule, layer_name
from splitzip_aio.cache.manifest import Blob, Source, Tensor
from splitzip_aio.cache.packs import PackWriter
from splitzip_aio.cache.workspace import Workspace
from splitzip_aio.codec import cpu
from splitzip_aio.codec.coders import open_coder
from splitzip_aio.codec.dtypes import tensor_contents
from splitzip_aio.codec.layout import MAX_SEGMENT_ELEMENTS, SEGMENT_ELEMENTS
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.errors import ClosedError, CorruptDataError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

__all__ = ["PACK_BYTES", "BuildReport", "SplitZipShardCacheBuilder"]

PACK_BYTES = 4 << 30
_COVERAGE_DIGITS = 6


class SplitZipShardCacheBuilder:
    """Builds a cache tensor by tensor, in the order in which they will be used.

    Nothing of it can be seen before ``finish``. A failure to read or write, leaving the ``with`` block without
    ``finish``, or ``abort`` removes all that was made and keeps the cache that was there, if any. A refused
    argument changes nothing::

        with SplitZipShardCacheBuilder("cache/") as builder:
            for name, tensor in model.state_dict().items():
                builder.add_tensor(name, tensor)
            report = builder.finish()

    Args:
        out: directory to build in; new, empty, or with ``force`` a cache, which serves readers until it is replaced.
        force: replace a cache.
        schedule: how to code exponents, such as ``"top16"``, ``"2,3"`` or ``(2, 3)``, where that applies to the dtype
            and is not larger than storing; by default the smallest for each tensor.
        coverage_min: store tensors whose 16 most frequent exponents make up less than this share; by default none.
        segment_elements: elements of a segment, the unit of reading and checking.
        pack_bytes: size at which another pack is begun.
        device: what encodes: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``, a GPU where one can be used. The cache
            is the same.
        layer_of: from a tensor's name to its layer's; by default ``splitzip_aio.cache.layer_name``.
        sources: the files that origins given to ``add`` refer to.

    Raises:
        CacheExistsError: ``out`` holds something that is no cache, or a cache and not ``force``.
        CacheBusyError: another builder is at work in ``out``.
        CacheError: ``out`` cannot be written.
        InvalidArgumentError: an option is out of range.
        UnsupportedError: ``device`` names a GPU that is not there, or Triton is missing.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        force: bool = False,
        schedule: str | Sequence[int] | Schedule | None = None,
        coverage_min: float | None = None,
        segment_elements: int = SEGMENT_ELEMENTS,
        pack_bytes: int = PACK_BYTES,
        device: str = "auto",
        layer_of: LayerRule | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        self._workspace: Workspace | None = None
        if coverage_min is not None and not 0.0 <= coverage_min <= 1.0:
            raise InvalidArgumentError(f"coverage_min: expected 0 to 1, found {coverage_min}")
        if not 1 <= segment_elements <= MAX_SEGMENT_ELEMENTS:
            raise InvalidArgumentError(
                f"segment_elements: expected 1 to {MAX_SEGMENT_ELEMENTS}, found {segment_elements}"
            )
        if pack_bytes < 1:
            raise InvalidArgumentError(f"pack_bytes: expected 1 or more, found {pack_bytes}")
        self._started = time.perf_counter()
        self._segment_elements = segment_elements
        self._layer_of = layer_of or layer_name
        self._encoder = TensorEncoder(
            schedule=None if schedule is None else Schedule.parse(schedule),
            coverage_min=coverage_min,
            segment_elements=segment_elements,
            coder=open_coder(device),
        )
        self._contents = Contents(tuple(sources))
        self._resumed = 0
        self._journal: Journal | None = None
        self._writer: PackWriter | None = None
        self._workspace = Workspace(Path(out), force=force)
        self._pack_bytes = pack_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if self._workspace is not None:
            warnings.warn(f"unfinished builder of {self._workspace.root}", ResourceWarning, source=self, stacklevel=2)
            self.abort()

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor on any device; it is read before this returns.

        Raises:
            UnsupportedError: safetensors has no such dtype, or the tensor is not dense.
            InvalidArgumentError: the name is taken or is no text.
            CacheError: the cache cannot be written.
        """
        self.add(name, ArrayTensor(*tensor_contents(tensor)))

    def add(
        self,
        name: str,
        data: TensorData,
        *,
        origin: tuple[int, int] | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        """Add a tensor given as something to read bytes from, twice.

        Args:
            name: its name.
            data: its dtype, shape and bytes.
            origin: index in ``sources`` and offset of the same bytes in that file.
            advance: called with the number of bytes done, segment by segment.

        Raises:
            SourceChangedError: the bytes changed between the two readings.
            InvalidArgumentError: the name is taken or is no text.
            CacheError: the cache cannot be written.
        """
        writer = self._begin()
        tensor = self._describe(name, data)
        try:
            survey = self._encoder.survey(data)
            blob, new = self._contents.blob_of(survey.key), None
            if blob is None:
                blob, new = self._contents.blobs, self._write(writer, data, survey, advance)
            elif advance is not None:
                advance(data.nbytes)
            tensor = msgspec.structs.replace(tensor, blob=blob)
            placed = Record(tensor, origin if data.nbytes else None, new)
            self._contents.add(placed)
            if self._journal is not None:
                self._journal.append(placed)
        except BaseException:
            self.abort()
            raise

    def resume(self, plan: str) -> int:
        """Continue what a killed build with the same plan left, and leave a trail for the next.

        Call it before the first tensor is added. ``plan`` stands for all that determines what is added, in which order
        and how; it is up to the caller. What is taken over is checked first.

        Returns:
            How many tensors are in place, so which one to add next.
        """
        workspace = self._live()
        if self._writer is not None:
            raise InvalidArgumentError("resume: expected before the first tensor, found after it")
        self._writer = PackWriter(workspace.root, pack_bytes=self._pack_bytes)
        try:
            self._journal = Journal(workspace.root, plan)
            for record in self._journal.records():
                if not self._take_over(self._writer, record):
                    break
            self._journal.start()
        except BaseException:
            self.abort()
            raise
        self._resumed = len(self._contents)
        return self._resumed

    def finish(self) -> BuildReport:
        """Make the cache complete and visible at one instant, durably.

        Raises:
            CacheError: it cannot be written; nothing of it is left.
            ClosedError: finished or aborted already.
        """
        writer = self._begin()
        workspace = self._live()
        try:
            writer.seal()
            if self._journal is not None:
                self._journal.close(remove=True)
            packs = writer.publish()
            manifest_bytes = workspace.commit(self._contents.manifest(self._segment_elements, packs))
        except BaseException:
            self.abort()
            raise
        self._workspace = None
        size = manifest_bytes + sum(pack.bytes for pack in packs)
        return self._contents.report(
            workspace.root,
            compressed_bytes=size,
            resumed=self._resumed,
            seconds=time.perf_counter() - self._started,
        )

    def abort(self) -> None:
        """Remove all that was made, unless it is finished. Idempotent."""
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            if self._writer is not None:
                self._writer.close()
            if self._journal is not None:
                self._journal.close()
            workspace.rollback()

    def _live(self) -> Workspace:
        if self._workspace is None:
            raise ClosedError("this builder is finished or was aborted; make a new one")
        return self._workspace

    def _begin(self) -> PackWriter:
        workspace = self._live()
        if self._writer is None:
            try:
                workspace.drop_unfinished()
            except BaseException:
                self.abort()
                raise
            self._writer = PackWriter(workspace.root, pack_bytes=self._pack_bytes)
        return self._writer

    def _describe(self, name: str, data: TensorData) -> Tensor:
        layer = self._layer_of(name)
        try:
            f"{name}{layer}".encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"{name!r}: expected text as the name of tensor and layer: {error}") from error
        if not layer and layer_name(name):
            raise InvalidArgumentError(f"{name!r}: layer_of gave an empty name for its layer")
        if name in self._contents:
            raise InvalidArgumentError(f"{name!r}: a tensor of this name is in the cache already")
        return Tensor(name, data.dtype, data.shape, 0, "" if layer == layer_name(name) else layer)

    def _write(
        self, writer: PackWriter, data: TensorData, survey: Survey, advance: Callable[[int], None] | None
    ) -> Blob:
        plan = self._encoder.plan(survey)
        coverage = None if survey.coverage is None else round(survey.coverage, _COVERAGE_DIGITS)
        if not data.nbytes:
            return Blob(survey.key, 0, 0, 0, (), str(plan.schedule), coverage)
        pack, offset = writer.begin(sum(plan.segments))
        sizes = []
        for segment, decoded_bytes in self._encoder.segments(data, survey, plan):
            writer.append(segment)
            sizes.append(segment.size)
            if advance is not None:
                advance(decoded_bytes)
        return Blob(survey.key, pack, offset, sum(sizes), tuple(sizes), str(plan.schedule), coverage)

    def _take_over(self, writer: PackWriter, record: Record) -> bool:
        """Whether a record of a killed build and the bytes it speaks of are good; then they are ours."""
        if not self._fits(record):
            return False
        try:
            if record.blob is not None and record.blob.segments:
                writer.adopt(record.blob, lambda segment: _verify(segment, record.tensor.name))
        except CorruptDataError:
            return False
        self._contents.add(record)
        return True

    def _fits(self, record: Record) -> bool:
        expected = range(self._contents.blobs) if record.blob is None else [self._contents.blobs]
        return record.tensor.blob in expected and record.tensor.name not in self._contents


def _verify(segment: bytearray, name: str) -> None:
    header = cpu.verify_segment(memoryview(segment), where=f"{name!r} of an interrupted build")
    if header.segment_bytes != len(segment):
        raise CorruptDataError(f"{name!r} of an interrupted build: a segment ends early")
