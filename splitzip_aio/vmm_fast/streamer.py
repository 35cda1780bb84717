"""Weights from the cache into the consumer's memory.

One group at a time is waited for, copied on the consumer's stream to where the consumer wants it, and given back. What
comes next is brought by the transport's own reading ahead, which follows the order of these demands.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from splitzip_aio.blocking import BlockingLease, BlockingTransport, PendingLease
from splitzip_aio.cache.entry import Entry
from splitzip_aio.vmm_fast.catalog import Groups
from splitzip_aio.vmm_fast.consumer import Binding
from splitzip_aio.vmm_fast.rounds import FirstRound
from splitzip_aio.vmm_fast.tokens import current
from splitzip_aio.vmm_fast.views import ArenaView

__all__ = ["Counters", "Piece", "Streamer"]

_AHEAD_OF_NEXT_ROUND = 3  # as many demands as it takes the forecast to trust a new order
_NEXT_ROUND = object()


@dataclass(frozen=True, slots=True)
class Piece:
    """What is wanted of a group.

    Attributes:
        group: its name.
        nbytes: bytes that it takes in the transport's arena.
        wanted: the bindings to bring, each with its entry in the cache.
    """

    group: str
    nbytes: int
    wanted: list[tuple[Binding, Entry]] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What was uploaded; see ``VmmFastStatistics``."""

    uploads: int = 0
    upload_bytes: int = 0
    waits: int = 0
    wait_s: float = 0.0
    native_uploads: int = 0
    native_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """A group that was asked for before it is needed, and who asked."""

    pending: PendingLease
    nbytes: int
    owner: object


class _Run(NamedTuple):
    """Bytes to copy: where they are in a group, where they go in the consumer's arena, and how many."""

    source: int
    target: int
    nbytes: int


class Streamer:
    """Uploads pieces, and asks for some before they are needed.

    Args:
        transport: an open transport with the rule ``groups.layer_of``; is closed with this.
        groups: the groups.
        view: where to copy to.
    """

    def __init__(self, transport: BlockingTransport, groups: Groups, view: ArenaView) -> None:
        self.counters = Counters()
        self.transport = transport
        self._groups = groups
        self._view = view
        self._places = {group: place for place, group in enumerate(groups.sizes)}
        self._arena_bytes = transport.statistics().arena.capacity_bytes
        self._held: dict[str, _Held] = {}
        self._round: FirstRound | None = FirstRound(groups.sizes)
        self._stream: Any | None = None

    def pieces(self, found: Iterable[tuple[Binding, Entry]]) -> list[Piece]:
        """What is wanted of each group, groups in the order of use."""
        pieces: dict[str, Piece] = {}
        for binding, entry in found:
            group = self._groups.layer_of(entry.name)
            if group not in pieces:
                pieces[group] = Piece(group, self._groups.bytes_of(entry))
            pieces[group].wanted.append((binding, entry))
        last = len(self._places)
        return sorted(pieces.values(), key=lambda piece: self._places.get(piece.group, last))

    def upload(self, pieces: Sequence[Piece], native: Any, stream: Any) -> None:
        """Copy pieces to their places in ``native`` on ``stream``; waits for what has not arrived.

        Raises what ``BlockingTransport.prefetch`` raises; of the piece that failed nothing was copied then.
        """
        self._stream = stream
        if not any(piece.group in self._held for piece in pieces):
            self.let_go(_NEXT_ROUND)  # something else came next
        following: PendingLease | None = None
        try:
            with current(stream):
                for place, piece in enumerate(pieces):
                    pending = following or self._ask_for(piece)
                    following = self._ask_ahead(pieces[place + 1 : place + 2], piece)
                    self._copy(self._await(pending, piece), piece, native)
        finally:
            if following is not None:
                following.cancel()
        self._look_into_next_round(pieces, native)

    def hold(self, pieces: Iterable[Piece], owner: object) -> None:
        """Ask for pieces that are needed later, and hold them for ``owner``, as far as the arena has room beside."""
        spare = self._arena_bytes - self._groups.largest_bytes - sum(each.nbytes for each in self._held.values())
        for piece in pieces:
            spare -= piece.nbytes
            if spare < 0:
                return
            if piece.group not in self._held:
                self._held[piece.group] = _Held(self.transport.begin(piece.group), piece.nbytes, owner)

    def let_go(self, owner: object) -> None:
        """End what is held for ``owner``."""
        for group in [group for group, held in self._held.items() if held.owner is owner]:
            self._held.pop(group).pending.cancel()

    def close(self) -> None:
        """Close the transport, once the copies are done. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.synchronize()
        for held in self._held.values():
            held.pending.cancel()
        self._held.clear()
        self._round = None
        self.transport.close()

    def _ask_for(self, piece: Piece) -> PendingLease:
        held = self._held.pop(piece.group, None)
        return self.transport.begin(piece.group) if held is None else held.pending

    def _ask_ahead(self, coming: Sequence[Piece], current_piece: Piece) -> PendingLease | None:
        """Ask for the next piece before the current one is waited for, unless that could keep its room from it."""
        for piece in coming:
            if self._leaves_room([piece.nbytes], current_piece.nbytes):
                return self._ask_for(piece)
        return None

    def _await(self, pending: PendingLease, piece: Piece) -> BlockingLease:
        if pending.done:
            return pending.wait()
        while self._held and not self._leaves_room([], piece.nbytes):
            self._held.popitem()[1].pending.cancel()  # the last is needed last
        self.counters.waits += 1
        start = time.perf_counter()
        try:
            return pending.wait()
        finally:
            self.counters.wait_s += time.perf_counter() - start

    def _leaves_room(self, others: Sequence[int], wanted: int) -> bool:
        """Whether ``wanted`` bytes can be had in one piece, wherever what is held and ``others`` lie.

        A demand waits until the arena has room in one piece. What nobody holds makes way, but one that waits while its
        own caller holds other groups could wait for ever. Where ``n`` groups of ``H`` bytes are held in an arena of
        ``A``, the rest is in at most ``n + 1`` pieces, so one has ``(A - H) / (n + 1)`` bytes or more.
        """
        held = [*others, *(each.nbytes for each in self._held.values())]
        return (self._arena_bytes - sum(held)) // (len(held) + 1) >= wanted

    def _copy(self, lease: BlockingLease, piece: Piece, native: Any) -> None:
        """Copy a group's weights on the current stream, and give it back once they are."""
        try:
            lease.wait()
            for run in _runs(piece.wanted, lease.offsets):
                lease.copy_to(self._view(native, run.target, run.nbytes), run.source)
        finally:
            lease.release()
        self.counters.uploads += len(piece.wanted)
        self.counters.upload_bytes += sum(binding.nbytes for binding, _ in piece.wanted)

    def _look_into_next_round(self, pieces: Sequence[Piece], native: Any) -> None:
        """Once each group was used, ask for the first ones of the next round: those that the arena did not keep.

        How a round follows another cannot be known before it did; from then on the forecast does.
        """
        if self._round is None:
            return
        for piece in pieces:
            self._round.note(piece.group, [(native, binding) for binding, _ in piece.wanted])
        if self._round.complete:
            self.hold(self._first_of(self._round.lost()), _NEXT_ROUND)
            self._round = None

    def _first_of(self, groups: Iterator[str]) -> Iterator[Piece]:
        for _, group in zip(range(_AHEAD_OF_NEXT_ROUND), groups, strict=False):
            yield Piece(group, self._groups.sizes[group])


def _runs(wanted: Iterable[tuple[Binding, Entry]], offsets: Mapping[str, int]) -> list[_Run]:
    """What to copy for weights of a group: those that follow each other in both places at once.

    The consumer arranges weights as they were saved, and so does the group, so that a group is often a single run.
    """
    runs: list[_Run] = []
    for source, target, nbytes in sorted((offsets[entry.name], each.offset, each.nbytes) for each, entry in wanted):
        before = runs[-1] if runs else _Run(-1, -1, 0)
        if (before.source + before.nbytes, before.target + before.nbytes) == (source, target):
            runs[-1] = before._replace(nbytes=before.nbytes + nbytes)
        else:
            runs.append(_Run(source, target, nbytes))
    return runs
