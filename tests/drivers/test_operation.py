"""The continuation of a read, without any I/O."""

from __future__ import annotations

import errno
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.drivers.files import DirectSupport, OpenFile
from splitzip_aio.drivers.operation import Operation, Outcome, split
from splitzip_aio.errors import ReadError

ALIGN = 512


def opened(size: int, *, direct: bool) -> OpenFile:
    support = DirectSupport(True, "", ALIGN, ALIGN) if direct else DirectSupport(False, "")
    return OpenFile("somewhere", -1, size, support, may_demote=False)


@given(data=st.data(), direct=st.booleans(), size=st.integers(0, 20_000), chunk=st.integers(1, 8))
def test_any_sequence_of_short_reads_covers_the_range_once(data: Any, direct: bool, size: int, chunk: int) -> None:
    """A model kernel returns any part of what is asked, as often as there is progress; the bytes must add up."""
    align = ALIGN if direct else 1
    offset = data.draw(st.integers(0, 25_000)) // align * align
    nbytes = data.draw(st.integers(0, 12_000)) // align * align
    operation = Operation(opened(size, direct=direct))
    extents = split(operation, slot=0, position=0, offset=offset, nbytes=nbytes, chunk_bytes=chunk * ALIGN)
    assert operation.queued == len(extents)
    outcome = Outcome()
    for extent in extents:
        again = True
        while again:
            start, asked = extent.offset + extent.done, extent.nbytes - extent.done
            assert start % align == asked % align == 0
            there = min(asked, size - start)
            assert there > 0
            again = extent.settle(data.draw(st.integers(min(there, ALIGN), there)), outcome)
        assert operation.failure is None
        assert extent.done == extent.expected
    assert sum(extent.expected for extent in extents) == max(0, min(nbytes, size - offset))
    assert [extent.offset for extent in extents] == [offset + extent.position for extent in extents]


def test_first_failure_is_kept_and_the_rest_withdrawn() -> None:
    operation = Operation(opened(4096, direct=False))
    first, second, _ = split(operation, slot=0, position=0, offset=0, nbytes=3000, chunk_bytes=1000)
    operation.queued, operation.active = 1, 2
    assert not first.settle(-errno.EIO, Outcome())
    assert (operation.queued, operation.active, operation.done) == (0, 2, False)
    assert not second.settle(-errno.ENOMEM, Outcome())
    assert isinstance(operation.failure, ReadError)
    assert operation.failure.errno == errno.EIO


def test_a_file_that_grew_is_read_to_its_size_when_opened() -> None:
    operation = Operation(opened(100, direct=True))
    (extent,) = split(operation, slot=0, position=0, offset=0, nbytes=512, chunk_bytes=512)
    assert not extent.settle(512, Outcome())
    assert extent.done == 100
