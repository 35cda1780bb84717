"""Which units stay on the device for good, and how much room the others take turns in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitzip_aio.errors import InvalidArgumentError
from splitzip_aio.offloading.execution_units import Unit

__all__ = ["Division", "divide"]

_SMALL = 64  # a unit of less than this part of the budget costs more to bring than to keep


@dataclass(frozen=True, slots=True)
class Division:
    """Units that stay, units that take turns in the order of the model, and the bytes of an arena for those."""

    resident: tuple[Unit, ...]
    rotating: tuple[Unit, ...]
    window_bytes: int


def divide(units: Sequence[Unit], budget_bytes: int) -> Division:
    """Keep what the model needs in all its parts and what is small, then a prefix of the rest.

    Room for the two largest of those that take turns is set aside, so that one is brought while another is used. In a
    pass that goes round, a prefix that stays is read once, whereas the least recently used units would be read each
    time.

    Raises:
        InvalidArgumentError: the budget has no room for two units at once beside what must stay.
    """
    sizes = {unit.name: unit.nbytes for unit in units}
    must_stay = [unit for unit in units if unit.module is None]
    rotating = [unit for unit in units if unit.module is not None]
    used = sum(sizes[unit.name] for unit in must_stay)
    least = used + _window(rotating, sizes)
    if least > budget_bytes:
        largest = max(units, key=lambda unit: sizes[unit.name])
        raise InvalidArgumentError(
            f"resident_bytes: {budget_bytes} is too little: {used} bytes belong to no unit and stay, and the two "
            f"largest units need room at the same time; give {least} or more, or smaller units with units=[...] (the "
            f"largest is {largest.name!r}, {sizes[largest.name]} bytes)"
        )
    resident = list(must_stay)
    for unit in sorted(rotating, key=lambda unit: _preference(unit, sizes, budget_bytes)):
        rest = [each for each in rotating if each is not unit]
        if used + sizes[unit.name] + _window(rest, sizes) > budget_bytes:
            continue
        resident.append(unit)
        rotating = rest
        used += sizes[unit.name]
    window_bytes = min(budget_bytes - used, sum(sizes[unit.name] for unit in rotating))
    return Division(tuple(resident), tuple(rotating), window_bytes)


def _preference(unit: Unit, sizes: dict[str, int], budget_bytes: int) -> tuple[bool, bool]:
    """Small units first, then leaves around the lists, then the lists' items in their order (sorting is stable)."""
    return sizes[unit.name] * _SMALL > budget_bytes, unit.listed


def _window(rotating: Sequence[Unit], sizes: dict[str, int]) -> int:
    """Bytes of the two largest."""
    return sum(sorted((sizes[unit.name] for unit in rotating), reverse=True)[:2])
