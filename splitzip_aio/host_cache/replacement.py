"""What to keep when not everything fits: a policy for keys that are asked for round after round.

A model's layers come in order, again and again. The least recently used is then what is needed soonest, so LRU, given
room for 99 of 100 layers, finds none of them. The best that can be done in such a loop over N bytes with room for C is
to keep any C of them for good, which finds C/N. So nothing is replaced merely because something else came by.

But the loop may change. What tells is *reuse distance*, as in LIRS (Jiang and Zhang, SIGMETRICS 2002), here in bytes
asked for: a newcomer replaces what was not asked for in clearly more than the distance after which the newcomer itself
came back. In a loop every key comes back after exactly N, and nothing kept is idle for longer, so nothing moves. A loop
that was left is replaced during the third round of the new one.

The distance is the longer of the last two. One alone misleads where each round has another order: a key that came back
early has just been used, and its turn is far away, while what was idle for long is due.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

__all__ = ["Replacement"]

_PATIENCE = 1.5  # how many reuse distances of a newcomer a key may be idle: reads overtake each other a little
_REMEMBERED = 1 << 16  # keys not kept whose last use is remembered; at 16 MiB each, those of a terabyte


@dataclass(slots=True)
class _Kept:
    nbytes: int
    used_at: int


@dataclass(frozen=True, slots=True)
class _Gone:
    """A key that is not kept: its last use, and the distances before that as far as they are known."""

    used_at: int
    distances: tuple[int, ...] = ()

    def again(self, now: int) -> _Gone:
        return _Gone(now, (*self.distances[-1:], now - self.used_at))


class Replacement:
    """Decides which keys are kept in ``capacity_bytes``; the memory itself is someone else's."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._now = 0  # bytes asked for so far
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # the least recently used first
        self._gone: OrderedDict[Hashable, _Gone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def ask(self, key: Hashable, nbytes: int) -> bool:
        """Note that a key is asked for; whether it is kept."""
        self._now += nbytes
        kept = self._kept.get(key)
        if kept is not None:
            kept.used_at = self._now
            self._kept.move_to_end(key)
            return True
        previous = self._gone.pop(key, None)
        self._remember(key, _Gone(self._now) if previous is None else previous.again(self._now))
        return False

    def admit(
        self, key: Hashable, nbytes: int, *, idle: Callable[[Hashable], bool], limit_bytes: int | None = None
    ) -> list[Hashable] | None:
        """Keep a key that was just asked for, if that is worth it.

        Args:
            key: not kept so far.
            nbytes: the room it needs.
            idle: whether a key may go now.
            limit_bytes: use no more room than this, if it is less than the capacity.

        Returns:
            The keys that go for it; None if it is not kept. Until ``settle`` it takes the room of all of them.
        """
        limit = self.capacity_bytes if limit_bytes is None else min(limit_bytes, self.capacity_bytes)
        victims = self._victims(key, self.used_bytes + nbytes - limit, idle)
        if victims is None:
            return None
        freed = sum(self.remove(victim) for victim in victims)
        self._gone.pop(key, None)
        self._kept[key] = _Kept(max(nbytes, freed), self._now)
        self.used_bytes += max(nbytes, freed)
        return victims

    def settle(self, key: Hashable, nbytes: int) -> None:
        """The room of what went for a key is free: the key takes ``nbytes`` from now on."""
        kept = self._kept[key]
        self.used_bytes -= kept.nbytes - nbytes
        kept.nbytes = nbytes

    def remove(self, key: Hashable) -> int:
        """Keep a key no longer; the room it took. Raises KeyError where it was not kept."""
        kept = self._kept.pop(key)
        self.used_bytes -= kept.nbytes
        self._remember(key, _Gone(kept.used_at))
        return kept.nbytes

    def coldest(self) -> Iterator[Hashable]:
        """Kept keys, the least recently used first."""
        return iter(tuple(self._kept))

    def _victims(self, key: Hashable, needed: int, idle: Callable[[Hashable], bool]) -> list[Hashable] | None:
        """Keys to replace by ``key``, of ``needed`` bytes or more; None if there are not enough that are cold."""
        victims: list[Hashable] = []
        if needed <= 0:
            return victims
        distances = self._gone[key].distances if key in self._gone else ()
        if len(distances) < 2:
            return None
        for candidate, kept in self._kept.items():
            if self._now - kept.used_at <= _PATIENCE * max(distances):
                return None
            if idle(candidate):
                victims.append(candidate)
                needed -= kept.nbytes
                if needed <= 0:
                    return victims
        return None

    def _remember(self, key: Hashable, gone: _Gone) -> None:
        self._gone[key] = gone
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
