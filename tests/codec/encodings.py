"""Segments encoded by the kernels, on any device, compared with the CPU's byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import ElementFormat
from splitzip_aio.codec.gpu_segments import DeviceContents, GpuSegmentEncoder
from splitzip_aio.codec.schedule import Schedule
from splitzip_aio.codec.segments import SegmentPlan, plan_segments
from tests.codec.data import Bytes

SENTRY = 4096


@dataclass(frozen=True)
class Job:
    """Elements, how to cut and code them (by default at choice), and what the codebooks are made from."""

    data: Bytes
    fmt: ElementFormat
    schedule: Schedule | None = None
    segment_elements: int = 1 << 20
    ranking: NDArray[np.int64] | None = None

    @property
    def step(self) -> int:
        return self.segment_elements * self.fmt.element_bytes

    @property
    def pieces(self) -> list[Bytes]:
        return [self.data[start : start + self.step] for start in range(0, self.data.size, self.step)]

    def contents(self, device: str) -> DeviceContents:
        return DeviceContents.of(torch.from_numpy(self.data.copy()).to(device), self.fmt, self.step)

    def plan(self, counts: NDArray[np.int64]) -> SegmentPlan:
        return plan_segments(self.fmt, counts, schedule=self.schedule, ranking=self.ranking)


def check(jobs: Sequence[Job], *, device: str, look_twice: bool = False) -> list[SegmentPlan]:
    """Encode all jobs at once; every count, size and byte is the CPU's, and nothing behind the output is touched."""
    encoder = GpuSegmentEncoder(device)
    contents = [job.contents(device) for job in jobs]
    pending = encoder.count(contents)
    plans = []
    for job, counts in zip(jobs, pending.wait(), strict=True):
        assert np.array_equal(counts, [cpu.histogram(piece, job.fmt) for piece in job.pieces])
        plans.append(job.plan(counts))
    size = sum(sum(plan.segments) for plan in plans)
    room = torch.zeros(size + SENTRY, dtype=torch.uint8, device=device)
    encoded = encoder.encode(contents, plans, None if look_twice else pending, room)
    out = torch.full((size,), 0xA5, dtype=torch.uint8)
    encoded.to_host(out)
    stop = 0
    for job, plan in zip(jobs, plans, strict=True):
        for piece, nbytes in zip(job.pieces, plan.segments, strict=True):
            start, stop = stop, stop + nbytes
            expected = cpu.encode_segment(piece, job.fmt, plan.schedule, plan.codebooks)
            differ = np.flatnonzero(out.numpy()[start:stop] != expected)
            assert not differ.size, f"{job.fmt.name} {plan.schedule}, {piece.size} bytes: first at {differ[:4]}"
    assert not room[size:].any()
    return plans
