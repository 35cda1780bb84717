"""Segments and a cache of earlier days, kept in the repository: they must decode for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from splitzip_aio.cache import SplitZipShardCache
from splitzip_aio.codec import cpu
from splitzip_aio.codec.formats import ElementFormat
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.codec.schedule import Schedule
from tests.codec.hostile import encode
from tests.codec.make_golden import CACHE, CHECKPOINT, GOLDEN, decoded_path, segment_path, segments
from tests.codec.test_dtypes import bits
from tests.codec.test_format_doc import Segment

KEPT = list(segments())
IDS = [segment_path(*each).stem for each in KEPT]


def test_nothing_is_lost_and_nothing_unknown() -> None:
    expected = {path for each in KEPT for path in (segment_path(*each), decoded_path(each[0]))}
    assert {path for path in GOLDEN.iterdir() if path.is_file()} == expected | {CHECKPOINT}
    assert len(KEPT) == 47


@pytest.mark.parametrize(("fmt", "schedule"), KEPT, ids=IDS)
def test_golden_segments_decode(fmt: ElementFormat, schedule: Schedule) -> None:
    segment, right = segment_path(fmt, schedule).read_bytes(), decoded_path(fmt).read_bytes()
    header = parse_header(segment, where="golden")
    assert (header.fmt, header.schedule, header.segment_bytes) == (fmt, schedule, len(segment))
    out = np.full(len(right), 0xA5, np.uint8)
    cpu.decode_segment(segment, out, where="golden")
    assert out.tobytes() == right
    cpu.verify_segment(segment, where="golden")


@pytest.mark.parametrize(("fmt", "schedule"), KEPT, ids=IDS)
def test_golden_segments_decode_by_the_document(fmt: ElementFormat, schedule: Schedule) -> None:
    assert Segment(segment_path(fmt, schedule).read_bytes()).decode() == decoded_path(fmt).read_bytes()


@pytest.mark.parametrize(("fmt", "schedule"), KEPT, ids=IDS)
def test_the_encoder_still_writes_golden_segments(fmt: ElementFormat, schedule: Schedule) -> None:
    """No promise to users, but a change of the bytes should be meant."""
    data = np.frombuffer(decoded_path(fmt).read_bytes(), np.uint8)
    assert encode(data, fmt, schedule).tobytes() == segment_path(fmt, schedule).read_bytes()


def test_the_golden_cache_is_read(tmp_path: Path) -> None:
    root = shutil.copytree(CACHE, tmp_path / "cache")
    expected = safetensors.torch.load_file(CHECKPOINT)
    with SplitZipShardCache(root) as cache:
        assert cache.verify().ok
        assert cache.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            found = cache.load_tensor(name)
            assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor)), name
        entries = cache.tensors
        assert entries["blocks.1.tied"].key == entries["blocks.0.BF16"].key
        assert len(entries["blocks.0.BF16"].segments) == 3
        cache.check_source(CHECKPOINT)
