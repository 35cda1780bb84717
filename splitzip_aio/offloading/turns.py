"""Units that take turns on the device: brought before their forward, let go after it.

A thread in a unit's forward holds leases on the unit's layer. The unit's parameters are the lease's views as long as
any thread is in there. Meanwhile the units that came next the last time are asked for *ahead*. Nobody waits for those
leases. Room is given in the order of asking, so a thread that must wait lets go of those that were asked for before
what it wants, and so no thread ever waits for one that waits for it:

- outside of all units a thread holds nothing while it waits;
- inside of one (a unit that calls another) it waits only if there is room for all that such threads hold and want, and
  not for ever.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from splitzip_aio.blocking import BlockingLease, BlockingTransport, PendingLease
from splitzip_aio.errors import UnsupportedError
from splitzip_aio.offloading.execution_units import Unit
from splitzip_aio.offloading.matching import Place
from splitzip_aio.offloading.placeholder import OffloadedWeight

__all__ = ["TurnCounts", "Turns", "set_parameter"]

_AHEAD = 2
_PATIENCE_S = 60.0
_SOON_S = 0.002
_LOOK_EVERY_S = 0.0005


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """How often units were entered, how many of them were there already, and the seconds spent waiting for others."""

    entered: int
    ready: int
    wait_s: float


class Turns:
    """Brings units in when they are entered.

    Args:
        transport: has a layer of the name of each unit.
        units: in the order they are likely to be used.
        placeholders: what is in each place of each unit while it is away.
        window_bytes: the transport's arena.
    """

    def __init__(
        self,
        transport: BlockingTransport,
        units: Sequence[Unit],
        placeholders: dict[str, list[tuple[Place, str, OffloadedWeight]]],
        window_bytes: int,
    ) -> None:
        self.transport = transport
        self.units = tuple(units)
        self._placeholders = placeholders
        self._window_bytes = window_bytes
        self._sizes = {unit.name: unit.nbytes for unit in units}
        self._next = {unit.name: after.name for unit, after in zip(units, [*units[1:], *units[:1]], strict=True)}
        self._forwards: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()  # threads in each unit
        self._claims: list[set[str]] = []  # what threads hold and want that wait inside of a unit
        self._ahead: dict[str, PendingLease] = {}
        self._here = threading.local()
        self._closed = False
        self._entered = self._ready = 0
        self._wait_s = 0.0

    def start(self) -> None:
        """Put the placeholders in, and watch each unit's forward."""
        for unit in self.units:
            self._restore(unit.name)
            module = unit.module
            assert module is not None
            self._forwards[unit.name] = module.forward, self._watched(unit, module.forward)
            module.forward = self._forwards[unit.name][1]

    def stop(self) -> None:
        """Let everything go, and let forwards be as they were; parameters are the caller's to replace."""
        self._closed = True
        self._drop_ahead()
        for unit in self.units:
            original, watched = self._forwards.pop(unit.name)
            assert unit.module is not None
            if unit.module.__dict__.get("forward") is watched:
                del unit.module.forward
                if unit.module.forward != original:
                    unit.module.forward = original
        self.transport.close()

    def counts(self) -> TurnCounts:
        """A snapshot."""
        with self._lock:
            return TurnCounts(self._entered, self._ready, self._wait_s)

    @property
    def busy(self) -> bool:
        """Whether any thread is in a unit."""
        with self._lock:
            return any(self._users.values())

    def _watched(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        # Around forward rather than in hooks: those are skipped by whoever calls forward itself, and torch does not run
        # the ones after it when a KeyboardInterrupt or a cancellation passes.
        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                return forward(*args, **kwargs)
            with self._turn(unit.name):
                return forward(*args, **kwargs)

        return watched

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        self._refuse_capture(name)
        held: list[str] = self._here.__dict__.setdefault("held", [])
        lease = self._bring(name, held)
        held.append(name)
        try:
            lease.wait()
            self._install(name, lease)
            try:
                with _no_gradients(name, lease):
                    yield
            finally:
                self._leave(name)
        finally:
            held.pop()
            lease.release()

    def _bring(self, name: str, held: Sequence[str]) -> BlockingLease:
        self._learn(name)
        with self._lock:
            pending, passed_over = self._take(name)
        for each in passed_over:
            each.cancel()
        foreseen = pending is not None
        pending = pending or self.transport.begin(name)
        began = time.perf_counter()
        ready = pending.done
        if not foreseen and not _soon(pending):
            self._drop_ahead()
        if held and name not in held and not pending.done:
            self._wait_inside(pending, held)
        lease = pending.wait()
        with self._lock:
            self._entered += 1
            self._ready += ready
            self._wait_s += time.perf_counter() - began
            self._ask_ahead(name)
        return lease

    def _take(self, name: str) -> tuple[PendingLease | None, list[PendingLease]]:
        """What was asked ahead for a unit, and what was before that, and is not what comes next after all."""
        if name not in self._ahead:
            return None, []
        earlier = list(self._ahead)[: list(self._ahead).index(name)]
        return self._ahead.pop(name), [self._ahead.pop(each) for each in earlier]

    def _wait_inside(self, pending: PendingLease, held: Sequence[str]) -> None:
        """Wait while holding leases, as long as that can end."""
        claim = {*held, pending.layer}
        with self._lock:
            self._claims.append(claim)
            nbytes = sum(self._sizes[name] for name in set().union(*self._claims))
        try:
            until_s = time.monotonic() + _PATIENCE_S
            # Neither is a sure sign alone: the room may be there in pieces, and the disk may be slow.
            while nbytes <= self._window_bytes and time.monotonic() < until_s and not pending.done:
                time.sleep(_LOOK_EVERY_S)
            if not pending.done:
                pending.cancel()
                raise UnsupportedError(
                    f"{pending.layer!r} is called inside of {held[-1]!r}, and the {nbytes} bytes that are needed at "
                    f"once do not fit the {self._window_bytes} bytes that units take turns in; give more "
                    "resident_bytes, or make one unit of both with offload(units=[...])"
                )
        finally:
            with self._lock:
                self._claims.remove(claim)

    def _learn(self, name: str) -> None:
        """Remember what this thread entered after what."""
        latest = self._here.__dict__.get("latest")
        if latest is not None and latest != name:
            with self._lock:
                self._next[latest] = name
        self._here.latest = name

    def _ask_ahead(self, name: str) -> None:
        """Ask for the next units: the second of them gets the room of this one as soon as that is let go."""
        for _ in range(_AHEAD):
            name = self._next[name]
            if len(self._ahead) < _AHEAD and name not in self._ahead and not self._users[name] and not self._closed:
                self._ahead[name] = self.transport.begin(name)

    def _drop_ahead(self) -> None:
        with self._lock:
            dropped, self._ahead = self._ahead, {}
        for pending in dropped.values():
            pending.cancel()

    def _install(self, name: str, lease: BlockingLease) -> None:
        """Make the views the unit's parameters, unless another thread, whose lease is on the same memory, has."""
        with self._lock:
            self._users[name] += 1
            if self._users[name] > 1:
                return
            tensors = lease.tensors
            parameters: dict[int, nn.Parameter] = {}
            for place, entry, placeholder in self._placeholders[name]:
                parameter = parameters.get(id(placeholder))
                if parameter is None:
                    parameter = parameters[id(placeholder)] = nn.Parameter(tensors[entry], requires_grad=False)
                set_parameter(place, parameter)

    def _leave(self, name: str) -> None:
        with self._lock:
            self._users[name] -= 1
            if not self._users[name]:
                self._restore(name)

    def _restore(self, name: str) -> None:
        for place, _, placeholder in self._placeholders[name]:
            set_parameter(place, placeholder)

    def _refuse_capture(self, name: str) -> None:
        if self.transport.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"a CUDA graph is being captured, and {name!r} is offloaded: a graph replays with the addresses it was "
                "captured with, and weights come to others; capture a model that fits resident_bytes as a whole"
            )


def _soon(pending: PendingLease) -> bool:
    """Whether a layer is there, or is after the moment that the event loop takes to say so."""
    until_s = time.monotonic() + _SOON_S
    while not pending.done and time.monotonic() < until_s:
        time.sleep(_SOON_S / 10)
    return pending.done


def set_parameter(place: Place, parameter: nn.Parameter) -> None:
    """Put a parameter in its place.

    Straight into the registry, which is all that ``nn.Module.__setattr__`` would do in the end; modules with one of
    their own, as recurrent ones, are asked.
    """
    if type(place.module).__setattr__ is nn.Module.__setattr__:
        place.module._parameters[place.attribute] = parameter
    else:
        setattr(place.module, place.attribute, parameter)


def _no_gradients(name: str, lease: BlockingLease) -> AbstractContextManager[Any]:
    """Refuse to keep an offloaded weight for a backward pass: by then other weights are in its place."""
    if not torch.is_grad_enabled():
        return nullcontext()
    arena = next((tensor.untyped_storage().data_ptr() for tensor in lease.tensors.values() if tensor.numel()), None)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if arena is not None and tensor.untyped_storage().data_ptr() == arena:
            raise UnsupportedError(
                f"a backward pass would need the weights of {name!r}, which are offloaded; run the model under "
                "torch.no_grad() or torch.inference_mode(), or call splitzip_aio.detach(model) first"
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
