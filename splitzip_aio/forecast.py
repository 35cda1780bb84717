"""Which layers will be asked for next: learned from which followed which the last time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from splitzip_aio.errors import InvalidArgumentError, UnknownLayerError

__all__ = ["Forecast"]

_RIGHT_TO_TRUST = 2  # demands foreseen, one after another, before what comes next is believed


class Forecast:
    """Remembers, for each layer, the one that was asked for after it the last time.

    A loop over the layers, in whatever order, is so known after one round, and the step from its end to its start with
    the second. A changed order is known after one round of it. A layer that was not left yet is followed by the next
    of the execution order; the end of that by nothing, since a model that is loaded once has no second round.

    Two demands in a row must have been foreseen before anything is foreseen: while the order changes, reading ahead of
    it only takes room and bandwidth from what is asked for.

    Args:
        layers: all layers, in execution order.
        order: the order they will be asked for in, round after round; believed from the first demand on.

    Raises:
        UnknownLayerError: ``order`` names a layer that there is not.
        InvalidArgumentError: it is one name instead of a sequence, or has one twice.
    """

    def __init__(self, layers: Sequence[str], *, order: Sequence[str] | None = None) -> None:
        usual = layers if order is None else _checked(order, layers)
        self._usual = dict(zip(usual, [*usual[1:], *usual[:1]], strict=True))
        self._end = usual[-1] if usual and order is None else None
        self._followed: dict[str, str] = {}
        self._latest: str | None = None
        self._coming: _Coming | None = None
        self._right = 0 if order is None else _RIGHT_TO_TRUST

    def note(self, layer: str) -> None:
        """A layer was asked for; asking for the same again says nothing."""
        previous, self._latest = self._latest, layer
        if previous == layer:
            return
        if self._coming is None or not self._coming.step_to(layer):
            self._coming = None
        if previous is not None:
            foreseen = self._followed.get(previous, self._usual.get(previous))
            self._right = self._right + 1 if foreseen == layer else 0
            self._followed[previous] = layer

    @property
    def coming(self) -> Mapping[str, int]:
        """The layers that come next, the nearest first, each with its place; without the one asked for last."""
        if self._coming is None:
            self._coming = self._foresee()
        return self._coming

    def _foresee(self) -> _Coming:
        if self._latest is None or self._right < _RIGHT_TO_TRUST:
            return _Coming([], closed=False)
        chain = {self._latest: None}
        layer = self._after(self._latest)
        while layer is not None and layer not in chain:
            chain[layer] = None
            layer = self._after(layer)
        return _Coming(list(chain), closed=layer == self._latest)

    def _after(self, layer: str) -> str | None:
        if layer in self._followed:
            return self._followed[layer]
        return self._usual.get(layer) if layer != self._end else None


class _Coming(Mapping[str, int]):
    """The layers that come after the first of ``layers``, each with its place.

    In a round, whose last layer is followed by the first (``closed``), it goes along by a step for each demand: nobody
    has to follow the whole round anew each time.
    """

    def __init__(self, layers: Sequence[str], *, closed: bool) -> None:
        self._layers = layers
        self._indices = {layer: index for index, layer in enumerate(layers)}
        self._closed = closed
        self._at = 0

    def step_to(self, layer: str) -> bool:
        """Go on to ``layer``; False, and of no use any more, if it is not what came next of a round."""
        following = (self._at + 1) % max(len(self._layers), 1)
        if not self._closed or self._layers[following] != layer:
            return False
        self._at = following
        return True

    def __iter__(self) -> Iterator[str]:
        yield from self._layers[self._at + 1 :]
        yield from self._layers[: self._at]

    def __len__(self) -> int:
        return max(len(self._layers) - 1, 0)

    def __getitem__(self, layer: str) -> int:
        ahead = (self._indices[layer] - self._at) % len(self._layers)
        if not ahead:
            raise KeyError(layer)
        return ahead - 1


def _checked(order: Sequence[str], layers: Sequence[str]) -> tuple[str, ...]:
    if isinstance(order, str):
        raise InvalidArgumentError(f"order: expected names of layers, found {order!r}")
    known = set(layers)
    for place, name in enumerate(order):
        if name not in known:
            raise UnknownLayerError(f"order[{place}]: no layer {name!r}")
        if name in order[:place]:
            raise InvalidArgumentError(f"order[{place}]: {name!r} is there twice; name each layer once")
    return tuple(order)
