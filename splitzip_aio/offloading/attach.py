"""``offload`` and ``detach``: a model's weights into the cache's care, and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from splitzip_aio.blocking import BlockingTransport
from splitzip_aio.cache import Entry, ProgressCallback, SplitZipShardCache
from splitzip_aio.errors import InvalidArgumentError, UnsupportedError
from splitzip_aio.host_cache.headroom import headroom
from splitzip_aio.materialize import copy_tensors, find_cache
from splitzip_aio.offloading.budget import Division, divide
from splitzip_aio.offloading.execution_units import Unit, find_units
from splitzip_aio.offloading.matching import Matched, NameRule, Place, Weight, kind_of, match
from splitzip_aio.offloading.placeholder import OffloadedWeight
from splitzip_aio.offloading.turns import Turns, set_parameter
from splitzip_aio.telemetry import TransportStatistics
from splitzip_aio.units import parse_bytes

__all__ = ["OffloadStatistics", "detach", "offload", "offload_statistics"]

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)

_HANDLE = "_splitzip_offload"
_UNUSED = "(not in the model)"
_DIVIDE_ABOVE = 4  # units larger than this part of the budget are divided: two of them take turns in half of it


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """A snapshot of an offloaded model.

    Attributes:
        device: where it runs.
        resident: names of the units that stay there.
        rotating: names of the units that come for their forward, in the order of the model.
        resident_bytes: bytes of the weights that stay.
        rotating_bytes: bytes of those that come and go: what a pass through the model brings.
        window_bytes: the memory that they take turns in.
        largest_units_bytes: bytes of the two largest of those that take turns.
        host_cache_bytes: the most host memory that their compressed bytes may be kept in.
        entered: how often a rotating unit's forward began.
        ready: how many of those found their weights there.
        wait_s: seconds that the others waited.
        transport: the transport's own account; None if nothing rotates.
    """

    device: str
    resident: tuple[str, ...]
    rotating: tuple[str, ...]
    resident_bytes: int
    rotating_bytes: int
    window_bytes: int
    largest_units_bytes: int
    host_cache_bytes: int
    entered: int
    ready: int
    wait_s: float
    transport: TransportStatistics | None


def offload(
    model: ModelT,
    cache: str | PathLike[str],
    *,
    device: str | torch.device = "auto",
    resident_bytes: int | str = "4GiB",
    host_cache_bytes: int | str = "auto",
    units: Iterable[str] | None = None,
    names: NameRule | None = None,
    compare: bool = True,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> ModelT:
    """Run a model in less memory than its weights need: they come from the cache, unit by unit, as they are used.

    Weights that the cache has leave memory; as many as fit stay on the device, and the others come there for the
    ``forward`` of their unit, the next ones on their way meanwhile. The model computes what it would with all of its
    weights on the device, bit for bit. Buffers, and parameters that the cache does not have, move to the device.

    Inference only: offloaded weights have ``requires_grad=False``, and a backward pass that needs one is refused.
    Several threads may run the model at once, on streams of their own.

    Args:
        model: on the CPU, a GPU, or the meta device, in which case its weights are never in memory. Changed in place.
        cache: made of this model's checkpoint, or the checkpoint that has it beside it (see ``load_file``).
        device: where to run, or ``"auto"``: the current CUDA device if there is one.
        resident_bytes: device memory for weights, at most. Staging buffers come on top, and what the model computes.
        host_cache_bytes: host memory for compressed weights, at most, page-locked for a GPU. ``"auto"`` is what all
            that rotates needs, or three quarters of the memory available. 0 reads them from the files each time.
        units: names of the modules to bring as one, ``"blocks.*"`` for each of ``blocks``. By default the items of the
            outermost lists, divided if they are large, and single layers around them.
        names: from a parameter's name in the model to its name in the cache.
        compare: hash the model's own weights, and refuse a cache that has others. Without, the cache's are taken.
        progress: called as resident weights arrive.
        options: for the transport, as for ``open_transport``: ``ring_bytes``, ``driver``, ``io``, ``timeline``.

    Returns:
        The model.

    Raises:
        CacheNotFoundError, ManifestError: there is no usable cache.
        InvalidArgumentError: the cache is not of this model, nothing of the model is in it, or an option is out of
            range, as when ``resident_bytes`` has no room for the two largest units.
        UnsupportedError: there is no such device here, or the model is offloaded already.
    """
    budget_bytes = parse_bytes(resident_bytes, name="resident_bytes")
    if host_cache_bytes != "auto":
        host_cache_bytes = parse_bytes(host_cache_bytes, name="host_cache_bytes")
    target = _device(device)
    with ExitStack() as own:
        opened = own.enter_context(SplitZipShardCache(find_cache(cache)))
        matched = match(model, opened, names=names, compare=compare)
        limit_bytes = max(1, budget_bytes // _DIVIDE_ABOVE)
        division = divide(find_units(model, matched.weights, limit_bytes=limit_bytes, patterns=units), budget_bytes)
        names_to_stay = _names_to_stay(division, matched)
        room_bytes = division.window_bytes  # which nothing else takes yet
        fixed = copy_tensors(
            opened, names_to_stay, target, progress=progress, room_bytes=room_bytes, **_for_loading(options)
        )
        host_bytes = _host_bytes(division.rotating) if host_cache_bytes == "auto" else int(host_cache_bytes)
        turns = _open_turns(opened, division, target, host_bytes, options, own) if division.rotating else None
        # From here on nothing fails: the model is either as it was, or offloaded.
        handle = _Handle(opened, target, division, matched, host_bytes, turns, own.pop_all())
    handle.attach(model, fixed)
    logger.info("%r", handle)
    return model


def detach(model: ModelT) -> ModelT:
    """Make an offloaded model an ordinary one again, all of it on the CPU, with the memory that this takes.

    Raises:
        InvalidArgumentError: the model is not offloaded.
        UnsupportedError: a thread is in its forward.
        CorruptDataError, ReadError: the cache cannot be read any more; the model stays offloaded.
    """
    _handle(model).detach(model)
    return model


def offload_statistics(model: nn.Module) -> OffloadStatistics:
    """What an offloaded model has in memory, and how often it had to wait.

    Raises:
        InvalidArgumentError: the model is not offloaded.
    """
    return _handle(model).statistics()


class _Handle:
    """What an offloaded model has to be detached with."""

    def __init__(
        self,
        cache: SplitZipShardCache,
        device: torch.device,
        division: Division,
        matched: Matched,
        host_cache_bytes: int,
        turns: Turns | None,
        resources: ExitStack,
    ) -> None:
        self._cache = cache
        self._device = device
        self._division = division
        self._matched = matched
        self._host_cache_bytes = host_cache_bytes
        self._turns = turns
        self._resources = resources

    def attach(self, model: nn.Module, fixed: Mapping[str, torch.Tensor]) -> None:
        for weight in (each for unit in self._division.resident for each in unit.weights):
            _put(weight, nn.Parameter(fixed[_entry(weight).name], requires_grad=False))
        for weight in self._matched.kept:
            with torch.no_grad():
                weight.tensor.data = weight.tensor.data.to(self._device)
        for buffer in self._matched.buffers:
            moved = buffer.tensor.to(self._device) if buffer.entry is None else fixed[buffer.entry.name]
            for place in buffer.places:
                place.module._buffers[place.attribute] = moved
        if self._turns is not None:
            self._turns.start()
        for weight in self._matched.weights:
            weight.tensor = torch.empty(0)  # the model's own is not kept in memory
        setattr(model, _HANDLE, self)
        weakref.finalize(model, self._resources.close)

    def detach(self, model: nn.Module) -> None:
        if self._turns is not None and self._turns.busy:
            raise UnsupportedError("detach: a thread is in the model's forward; wait for it first")
        names = {_entry(weight).name for unit in self._division.rotating for weight in unit.weights}
        loaded = copy_tensors(self._cache, names, "cpu")
        if self._turns is not None:
            self._turns.stop()
        for weight in self._matched.weights:
            place = weight.places[0]
            tensor = loaded.get(_entry(weight).name)
            if tensor is None:
                tensor = place.module._parameters[place.attribute].detach().cpu()  # type: ignore[union-attr]
            _put(weight, nn.Parameter(tensor, requires_grad=weight.requires_grad))
        delattr(model, _HANDLE)
        model.cpu()
        self._resources.close()

    def statistics(self) -> OffloadStatistics:
        turns, division = self._turns, self._division
        counts = None if turns is None else turns.counts()
        return OffloadStatistics(
            device=str(self._device),
            resident=tuple(unit.name for unit in division.resident),
            rotating=tuple(unit.name for unit in division.rotating),
            resident_bytes=sum(unit.nbytes for unit in division.resident),
            rotating_bytes=sum(unit.nbytes for unit in division.rotating),
            window_bytes=division.window_bytes,
            largest_units_bytes=sum(sorted((unit.nbytes for unit in division.rotating), reverse=True)[:2]),
            host_cache_bytes=0 if turns is None else self._host_cache_bytes,
            entered=0 if counts is None else counts.entered,
            ready=0 if counts is None else counts.ready,
            wait_s=0.0 if counts is None else counts.wait_s,
            transport=None if turns is None else turns.transport.statistics(),
        )

    def __repr__(self) -> str:
        division = self._division
        resident = sum(unit.nbytes for unit in division.resident)
        rotating = sum(unit.nbytes for unit in division.rotating)
        return (
            f"<offloaded to {self._device}: {len(division.resident)} units of {resident} bytes stay, "
            f"{len(division.rotating)} of {rotating} take turns in {division.window_bytes}>"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UnsupportedError("an offloaded model cannot be copied; call splitzip_aio.detach(model) first")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError("an offloaded model cannot be pickled; save its state_dict(), or detach it first")


def _handle(model: nn.Module) -> _Handle:
    handle = getattr(model, _HANDLE, None)
    if not isinstance(handle, _Handle):
        raise InvalidArgumentError(f"{type(model).__name__}: is not offloaded; give the model that offload returned")
    return handle


def _entry(weight: Weight) -> Entry:
    assert weight.entry is not None
    return weight.entry


def _put(weight: Weight, parameter: nn.Parameter) -> None:
    for place in weight.places:
        set_parameter(place, parameter)


def _device(device: str | torch.device) -> torch.device:
    """The device with its index, and what "auto" means."""
    from splitzip_aio.codec.gpu import triton_available

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and triton_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as exc:
        raise InvalidArgumentError(f"device: expected 'auto', 'cpu' or one like 'cuda:0', found {device!r}") from exc
    if str(target) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _names_to_stay(division: Division, matched: Matched) -> list[str]:
    resident = [_entry(weight).name for unit in division.resident for weight in unit.weights]
    return resident + [buffer.entry.name for buffer in matched.buffers if buffer.entry is not None]


def _for_loading(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that also concern what is loaded once."""
    return {name: value for name, value in options.items() if name in {"ring_bytes", "driver", "io"}}


def _host_bytes(rotating: Sequence[Unit]) -> int:
    """Enough for the compressed bytes of all that rotates, whole pages and decode tables included."""
    encoded = {_entry(weight).key: _entry(weight).encoded_bytes for unit in rotating for weight in unit.weights}
    needed = sum(encoded.values())
    return min(needed + needed // 8 + (16 << 20), headroom().available_bytes * 3 // 4)


def _open_turns(
    cache: SplitZipShardCache,
    division: Division,
    device: torch.device,
    host_bytes: int,
    options: Mapping[str, Any],
    resources: ExitStack,
) -> Turns:
    unit_of = {_entry(weight).name: unit.name for unit in division.rotating for weight in unit.weights}
    transport = resources.enter_context(
        BlockingTransport(
            cache,
            device=device,
            layer_of=lambda name: unit_of.get(name, _UNUSED),
            order=[unit.name for unit in division.rotating],
            arena_bytes=division.window_bytes,
            host_cache_bytes=host_bytes,
            **options,
        )
    )
    placeholders = {unit.name: list(_placeholders(unit, cache, transport.device)) for unit in division.rotating}
    return Turns(transport, division.rotating, placeholders, division.window_bytes)


def _placeholders(
    unit: Unit, cache: SplitZipShardCache, device: torch.device
) -> Iterator[tuple[Place, str, OffloadedWeight]]:
    for weight in unit.weights:
        entry = _entry(weight)
        dtype, shape = kind_of(entry)  # also of a weight on the meta device, as in load_state_dict(assign=True)
        load: Callable[[], torch.Tensor] = partial(cache.load_tensor, entry)
        placeholder = OffloadedWeight.make(weight.name, unit.name, dtype, shape, device, load)
        for place in weight.places:
            yield place, entry.name, placeholder
