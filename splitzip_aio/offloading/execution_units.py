"""Execution units: which modules come and go as one.

A unit is a module whose ``forward`` uses all of its weights and nobody else does: an item of the outermost lists
(``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``), as blocks of a transformer are. An item that is too large is
divided into its children, and so on. What is in no list is divided into its leaves.

Weights that belong to no single unit are the *core*: those of a module with units inside it, and those that several
units share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.offloading.matching import Place, Weight

__all__ = ["CORE", "Unit", "find_units"]

CORE = "(core)"
"""Name of the group of weights that belong to no single unit."""

_ALIGN = 256

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module and those of its weights that the cache has; ``module`` is None for the core.

    ``listed`` says that it is an item of a list, or was named, rather than one of the leaves around.
    """

    name: str
    module: nn.Module | None
    weights: tuple[Weight, ...]
    listed: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes in an arena, where equal tensors are there once and each begins at a multiple of 256."""
        sizes = {weight.entry.key: weight.entry.nbytes for weight in self.weights if weight.entry is not None}
        return max(_ALIGN, sum(-(-size // _ALIGN) * _ALIGN for size in sizes.values()))

    @property
    def places(self) -> Iterator[tuple[Weight, Place]]:
        """Each place of each weight."""
        return ((weight, place) for weight in self.weights for place in weight.places)


def find_units(
    model: nn.Module, weights: Sequence[Weight], *, limit_bytes: int, patterns: Iterable[str] | None = None
) -> list[Unit]:
    """The units of a model, in the order of its modules, the core last if there is one.

    Args:
        model: where to look.
        weights: what the cache has.
        limit_bytes: units larger than this are divided where they can be.
        patterns: names of the modules that are to be units instead, ``"blocks.*"`` for ``blocks.0`` and so on; what
            is outside of them is divided into leaves as usual.

    Raises:
        InvalidArgumentError: a pattern matches nothing, or a unit is inside another.
    """
    finder = _Finder(model, weights, limit_bytes)
    chosen = finder.found() if patterns is None else finder.named(patterns)
    return _assign(chosen, weights)


class _Finder:
    """Walks the module tree."""

    def __init__(self, model: nn.Module, weights: Sequence[Weight], limit_bytes: int) -> None:
        self._model = model
        self._limit_bytes = limit_bytes
        self._own: dict[int, int] = {}
        for weight in weights:
            for place in weight.places:
                size = weight.entry.nbytes if weight.entry is not None else 0
                self._own[id(place.module)] = self._own.get(id(place.module), 0) + size

    def found(self) -> dict[str, tuple[nn.Module, bool]]:
        return dict(self._around("", self._model))

    def named(self, patterns: Iterable[str]) -> dict[str, tuple[nn.Module, bool]]:
        if isinstance(patterns, str):
            raise InvalidArgumentError(f"units: expected names of modules, found {patterns!r}; write [{patterns!r}]")
        wanted: dict[str, nn.Module] = {}
        modules = dict(self._model.named_modules())
        for pattern in patterns:
            matches = {name: module for name, module in modules.items() if _matches(name, pattern)}
            if not matches:
                raise InvalidArgumentError(f"units: the model has no module {pattern!r}")
            wanted |= matches
        _refuse_nested(wanted)
        units = {name: (module, True) for name, module in wanted.items() if self._size(module)}
        rest = {name: each for name, each in self._leaves("", self._model) if not _inside(name, wanted)}
        return {name: (units | rest)[name] for name in modules if name in units or name in rest}

    def _around(self, name: str, module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
        """Units below a module that is none itself: items of lists, and leaves of what has no lists."""
        if isinstance(module, _LISTS):
            for path, child in _children(name, module):
                yield from self._divide(path, child)
        elif not self._has_list(module):
            yield from self._leaves(name, module)
        else:
            for path, child in _children(name, module):
                yield from self._around(path, child)

    def _divide(self, name: str, module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
        """A unit, or its parts if it is too large."""
        size = self._size(module)
        whole = not _divisible(module) or size <= self._limit_bytes
        if whole and not isinstance(module, _WITHOUT_FORWARD):
            if size:
                yield name, (module, True)
        else:
            for path, child in _children(name, module):
                yield from self._divide(path, child)

    def _leaves(self, name: str, module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
        if not _divisible(module):
            if self._size(module):
                yield name, (module, False)
        else:
            for path, child in _children(name, module):
                yield from self._leaves(path, child)

    def _has_list(self, module: nn.Module) -> bool:
        return any(isinstance(each, _LISTS) and self._size(each) for each in module.modules())

    def _size(self, module: nn.Module) -> int:
        return sum(self._own.get(id(each), 0) for each in module.modules())


def _divisible(module: nn.Module) -> bool:
    """Whether children can be units. torch's own modules reach into theirs, unless they are lists."""
    if isinstance(module, _LISTS):
        return True
    return next(module.children(), None) is not None and not type(module).__module__.startswith("torch.nn.")


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") or not other for other in modules)


def _refuse_nested(modules: Iterable[str]) -> None:
    names = set(modules)
    for name in names:
        outer = next((other for other in names if other != name and (not other or name.startswith(f"{other}."))), None)
        if outer is not None:
            raise InvalidArgumentError(f"units: {name!r} is inside {outer!r}; name one of them")


def _assign(chosen: dict[str, tuple[nn.Module, bool]], weights: Sequence[Weight]) -> list[Unit]:
    """Give each weight to the one unit that has all its places, or to the core.

    Weights that are one tensor of the cache go together, since that tensor comes with one unit.
    """
    unit_of = {id(inner): name for name, (module, _) in chosen.items() for inner in module.modules()}
    owners: dict[str, set[str | None]] = {}
    for weight in weights:
        owners.setdefault(_tensor(weight), set()).update(unit_of.get(id(place.module)) for place in weight.places)
    members: dict[str, list[Weight]] = {name: [] for name in chosen}
    core: list[Weight] = []
    for weight in weights:
        (name, *others) = owners[_tensor(weight)]
        (core if name is None or others else members[name]).append(weight)
    units = [
        Unit(name, module, tuple(members[name]), listed) for name, (module, listed) in chosen.items() if members[name]
    ]
    return [*units, Unit(CORE, None, tuple(core), listed=False)] if core else units


def _tensor(weight: Weight) -> str:
    assert weight.entry is not None
    return weight.entry.name
