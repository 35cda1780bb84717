"""Tensors that share an arena's memory: the same as views of their bytes, made in one step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.arena.base import BufferArena
from splitzip_aio.codec.dtypes import DTYPE_BITS, torch_view
from splitzip_aio.errors import ClosedError

CAPACITY = 4097  # no multiple of any element's size


class Plain(BufferArena):
    """No more than the memory."""

    max_segments = 1

    def __init__(self) -> None:
        super().__init__((torch.arange(CAPACITY) % 251).to(torch.uint8))

    @staticmethod
    def table_bytes(payload_bytes: int) -> int:
        return 0

    def submit(self, *_: object, **__: object) -> None:
        raise NotImplementedError

    async def reap(self) -> None:
        raise NotImplementedError

    def fence(self) -> None:
        return None

    async def aclose(self) -> None:
        self._let_go()


ARENA = Plain()


@given(
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    shape=st.lists(st.integers(0, 5), max_size=4),
    offset=st.integers(0, 200),
)
def test_a_tensor_is_the_view_of_its_bytes(dtype: str, shape: list[int], offset: int) -> None:
    count = torch.Size(shape).numel()
    nbytes = count * DTYPE_BITS[dtype] // 8
    offset = offset if DTYPE_BITS[dtype] % 8 else offset * DTYPE_BITS[dtype] // 8
    if count * DTYPE_BITS[dtype] % 8 or offset + nbytes > CAPACITY:
        return
    wanted = torch_view(ARENA.view(offset, nbytes), dtype, shape)
    found = ARENA.tensor(offset, nbytes, dtype, tuple(shape))
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if nbytes:
        assert found.stride() == wanted.stride()
        assert found.data_ptr() == wanted.data_ptr() == ARENA.buffer.data_ptr() + offset
        assert found.untyped_storage().data_ptr() == ARENA.buffer.untyped_storage().data_ptr()


@pytest.mark.anyio
async def test_a_closed_arena_has_none_and_those_that_are_out_stay_valid() -> None:
    arena = Plain()
    tensor = arena.tensor(0, 8, "BF16", (2, 2))
    before = tensor.clone()
    await arena.aclose()
    with pytest.raises(ClosedError):
        arena.tensor(0, 8, "BF16", (2, 2))
    assert torch.equal(tensor.view(torch.int16), before.view(torch.int16))


def test_the_mode_of_who_was_first_is_nobody_elses() -> None:
    arena = Plain()
    with torch.inference_mode():
        arena.tensor(0, 8, "BF16", (2, 2))
    tensor = arena.tensor(0, 8, "BF16", (2, 2))
    scale = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    tensor.mul_(scale)  # refused for a view that was made in inference mode
    assert tensor.requires_grad
