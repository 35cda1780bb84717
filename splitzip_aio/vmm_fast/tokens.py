"""Order on the GPU: what an upload's token waits for.

The consumer makes its compute stream wait for whatever ``upload_batch`` returned. Weights that came from the cache and
weights that the native transport brought may share a batch, and then one event has to stand for both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["completion", "current"]


def current(stream: Any) -> AbstractContextManager[object]:
    """Make this the current stream; None, where there is no GPU, is none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def completion(stream: Any, native_token: Any | None) -> torch.cuda.Event | None:
    """An event recorded on ``stream`` after all it was given, and after what a native transport's token stands for.

    None without a GPU, where everything is done.
    """
    if native_token is not None:
        _wait(stream, native_token)
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _wait(stream: Any, token: Any) -> None:
    """Make ``stream`` wait for a token of any of the kinds that the native transport returns."""
    if hasattr(token, "wait_on_stream"):  # a batch of its source cache, which copies when it pleases
        token.wait_on_stream(stream)
    elif hasattr(token, "ring"):  # a slot of its host ring
        token.ring.wait_slot_async(token.slot_index, stream=stream)
    else:
        stream.wait_event(token)
