"""Which layers the arena holds: admission, joining, eviction. A state machine; nothing here waits.

One layer, from the first demand on::

    WAITING ──room──▶ LOADING ──decoded and checked──▶ RESIDENT ──room needed──▶ GONE
       │                 ├────────wrong bytes, failed read────────────────────────▲
       └─────────────────┴────────everyone who waited was cancelled───────────────┘

Whoever waits for a layer or has a lease on it *holds* it. Layers waiting for room are admitted strictly in order of
arrival, so a large one is not overtaken by small ones for ever; joining a layer that is resident or on its way takes
no room and waits for nobody. What is held is never evicted; of the rest, the least recently used goes first, and only
if that makes room.

Once demands come as foreseen (see ``splitzip_aio.forecast``), the layers that come next are loaded ahead, with
nobody holding them: as far as there is room that nothing needs sooner, and no more bytes at a time than the ring holds.
That never stands in a demand's way: a demand evicts what was read ahead, and if need be gives up what is still on its
way.

A layer that is GONE while reads of it are in flight keeps its range until they are done; a new demand starts anew
elsewhere.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import anyio

from splitzip_aio.abc import Arena, Fence
from splitzip_aio.errors import CorruptDataError, LayerTooLargeError, SplitZipError, TransportError
from splitzip_aio.forecast import Forecast
from splitzip_aio.loading import Load
from splitzip_aio.plan import ExecutionPlan, LayerPlan
from splitzip_aio.telemetry import ResidencyStatistics

__all__ = ["Occupant", "OccupantState", "Residency"]


class OccupantState(enum.Enum):
    """How far a layer is."""

    WAITING = "waiting"
    LOADING = "loading"
    RESIDENT = "resident"
    GONE = "gone"


class Occupant:
    """A layer in the arena, or on its way there.

    Attributes:
        plan: the layer.
        state: how far it is.
        holds: tasks that wait for it and leases on it.
        settled: set once it is RESIDENT, or GONE before it was.
        error: why it is GONE, if it was not evicted or abandoned.
        load: the load that brings or brought it; None while WAITING.
        uses: the ends of its leases, on the streams of whoever had them.
    """

    __slots__ = ("calls", "error", "holds", "load", "plan", "settled", "state", "uses")

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.state = OccupantState.WAITING
        self.holds = 0
        self.settled = anyio.Event()
        self.calls: list[Callable[[], None]] = []
        self.error: SplitZipError | None = None
        self.load: Load | None = None
        self.uses: list[Fence] = []

    def settle(self) -> None:
        """It is RESIDENT or GONE: let those know who wait."""
        self.settled.set()
        calls, self.calls = self.calls, []
        for call in calls:
            call()

    @property
    def placed(self) -> Load:
        """The load of an occupant that has been admitted."""
        assert self.load is not None
        return self.load


class Residency:
    """Decides which layers are in the arena.

    Args:
        arena: where ranges are allocated.
        plan: the layers.
        forecast: the order they are asked for in.
        submit: starts a load that was given its range.
        ahead_bytes: how many bytes of the arena may be loading before nothing more is read ahead.
    """

    def __init__(
        self,
        arena: Arena,
        plan: ExecutionPlan,
        forecast: Forecast,
        submit: Callable[[Load], None],
        *,
        ahead_bytes: int,
    ) -> None:
        self._arena = arena
        self._plan = plan
        self._forecast = forecast
        self._submit = submit
        self._ahead_bytes = ahead_bytes
        self._closed = False
        self._doubtful: set[str] = set()  # failed to load; not read ahead until someone asks for them
        self._occupants: dict[str, Occupant] = {}  # all but GONE ones, the least recently used first
        self._waiting: deque[Occupant] = deque()
        self._draining: set[Load] = set()
        self._demands = self._hits = self._joins = 0
        self._read_ahead = self._loaded = self._abandoned = self._failed = self._corrupt = self._evictions = 0

    def hold(self, name: str) -> Occupant:
        """Hold a layer, asking for it if it is neither resident nor on its way. Each hold needs one ``let_go``.

        Raises:
            UnknownLayerError: no layer of this name.
            LayerTooLargeError: it could not fit an empty arena.
        """
        occupant = self._occupants.get(name)
        if occupant is None:
            occupant = self._ask_for(self._plan.layer(name))
        else:
            self._join(occupant)
        self._demands += 1
        self._forecast.note(name)
        self._load_ahead()
        return occupant

    def let_go(self, occupant: Occupant, *, use: Fence | None = None) -> None:
        """End a hold; ``use`` is where the holder's work on the layer ends, and eviction waits for that."""
        occupant.holds -= 1
        if use is not None:
            occupant.uses = [fence for fence in occupant.uses if not fence.query()] + [use]
        if occupant.holds or occupant.state is OccupantState.GONE:
            return
        if occupant.state is OccupantState.RESIDENT:
            self._touch(occupant)
        elif occupant.state is OccupantState.WAITING:
            self._waiting.remove(occupant)
            self._dismiss(occupant)
        else:
            self._abandon(occupant)
        self._admit()
        self._load_ahead()

    def evict(self) -> None:
        """Let go of every layer that is resident and that nobody holds."""
        for occupant in self._idle():
            self._retire(occupant)
            self._evictions += 1

    def close(self, error: TransportError) -> None:
        """Give up everything: who waits gets ``error``, and reads in flight are left to end."""
        self._waiting.clear()
        self._closed = True
        for occupant in list(self._occupants.values()):
            if occupant.state is OccupantState.RESIDENT:
                use = self._arena.fence() if occupant.holds else None
                self._retire(occupant, use)
            elif occupant.state is OccupantState.LOADING:
                self._abandon(occupant, error)
            else:
                self._dismiss(occupant, error)

    def statistics(self) -> ResidencyStatistics:
        """A snapshot of states and counters."""
        states = [occupant.state for occupant in self._occupants.values()]
        return ResidencyStatistics(
            resident=states.count(OccupantState.RESIDENT),
            leased=sum(
                occupant.state is OccupantState.RESIDENT and occupant.holds > 0 for occupant in self._occupants.values()
            ),
            loading=states.count(OccupantState.LOADING),
            waiting=len(self._waiting),
            draining=len(self._draining),
            demands=self._demands,
            hits=self._hits,
            joins=self._joins,
            misses=self._demands - self._hits - self._joins,
            read_ahead=self._read_ahead,
            loaded=self._loaded,
            abandoned=self._abandoned,
            failed=self._failed,
            corrupt=self._corrupt,
            evictions=self._evictions,
        )

    def _ask_for(self, plan: LayerPlan) -> Occupant:
        capacity = self._arena.statistics().capacity_bytes
        if plan.nbytes > capacity:
            raise LayerTooLargeError(
                f"layer {plan.name!r} needs {plan.nbytes} bytes, and the arena has {capacity}; "
                f"give arena_bytes={plan.nbytes} or more"
            )
        self._doubtful.discard(plan.name)
        occupant = self._occupants[plan.name] = Occupant(plan)
        occupant.holds = 1
        self._waiting.append(occupant)
        self._admit()
        return occupant

    def _join(self, occupant: Occupant) -> None:
        if occupant.state is OccupantState.RESIDENT:
            self._hits += 1
        else:
            self._joins += 1
        if occupant.load is not None:
            occupant.load.urgent = True
        occupant.holds += 1

    def _admit(self) -> None:
        """Start the layers that have waited longest, as far as there is room."""
        while self._waiting:
            occupant = self._waiting[0]
            base = self._make_room(occupant.plan.nbytes, self._idle())
            if base is None:
                self._give_up_ahead(occupant.plan.nbytes)
                return
            self._waiting.popleft()
            self._start(occupant, base, urgent=True)

    def _load_ahead(self) -> None:
        """Start the layers that come next, as far as there is room that nothing needs sooner."""
        if self._closed or self._waiting:
            return
        loading = sum(
            occupant.plan.nbytes for occupant in self._occupants.values() if occupant.state is OccupantState.LOADING
        )
        if loading >= self._ahead_bytes:
            return
        for place, name in enumerate(self._forecast.coming):
            if name in self._occupants or name in self._doubtful:
                continue
            plan = self._plan.layer(name)
            base = self._make_room(plan.nbytes, self._needed_after(place))
            if base is None:
                return
            occupant = self._occupants[name] = Occupant(plan)
            loading += plan.nbytes
            self._read_ahead += 1
            self._start(occupant, base, urgent=False)
            if loading >= self._ahead_bytes:
                return

    def _start(self, occupant: Occupant, base: int, *, urgent: bool) -> None:
        occupant.state = OccupantState.LOADING
        occupant.load = Load(occupant.plan, base, urgent=urgent, settled=partial(self._settled, occupant))
        self._submit(occupant.load)
        occupant.load.start()

    def _idle(self) -> list[Occupant]:
        """Resident layers that nobody holds, the least recently used first."""
        return [
            occupant
            for occupant in self._occupants.values()
            if occupant.state is OccupantState.RESIDENT and not occupant.holds
        ]

    def _needed_after(self, place: int) -> list[Occupant]:
        """Idle layers needed after what comes at ``place``: those not foreseen, then the last one first."""
        places = self._forecast.coming
        far = len(places)
        later = [each for each in self._idle() if places.get(each.plan.name, far) > place]
        return sorted(later, key=lambda each: places.get(each.plan.name, far), reverse=True)

    def _make_room(self, nbytes: int, idle: Sequence[Occupant]) -> int | None:
        """Allocate, evicting from ``idle`` in this order, if and only if that helps."""
        if not self._arena.fits(nbytes):
            if not self._arena.fits(nbytes, freeing=[occupant.placed.base for occupant in idle]):
                return None
            for occupant in idle:
                self._retire(occupant)
                self._evictions += 1
                if self._arena.fits(nbytes):
                    break
        return self._arena.allocate(nbytes)

    def _give_up_ahead(self, nbytes: int) -> None:
        """Abandon loads that nobody waits for, the latest first, if a demand of ``nbytes`` bytes lacks their room."""
        freeing = [occupant.placed.base for occupant in self._idle()] + [load.base for load in self._draining]
        ahead = [
            occupant
            for occupant in self._occupants.values()
            if occupant.state is OccupantState.LOADING and not occupant.holds
        ]
        given_up: list[Occupant] = []
        while ahead and not self._arena.fits(nbytes, freeing=freeing):
            given_up.append(ahead.pop())
            freeing.append(given_up[-1].placed.base)
        if self._arena.fits(nbytes, freeing=freeing):
            for occupant in given_up:
                if occupant.state is OccupantState.LOADING:  # else room for the demand was found in between
                    self._abandon(occupant)

    def _settled(self, occupant: Occupant, load: Load) -> None:
        """Nothing writes to the load's range any more: it is the layer, or free."""
        if occupant.state is OccupantState.GONE:
            self._draining.discard(load)
        elif load.error is None:
            occupant.state = OccupantState.RESIDENT
            self._loaded += 1
            self._touch(occupant)
            occupant.settle()
            if load.plan.reads:  # else this is the middle of starting it
                self._load_ahead()
            return
        else:
            self._failed += 1
            self._corrupt += isinstance(load.error, CorruptDataError)
            self._doubtful.add(occupant.plan.name)
            self._dismiss(occupant, load.error)
        self._arena.free(load.base)
        self._admit()
        self._load_ahead()

    def _touch(self, occupant: Occupant) -> None:
        """Make it the most recently used."""
        self._occupants[occupant.plan.name] = self._occupants.pop(occupant.plan.name)

    def _retire(self, occupant: Occupant, use: Fence | None = None) -> None:
        """RESIDENT ▶ GONE: the range is free once what used it is done."""
        self._dismiss(occupant)
        self._arena.free(occupant.placed.base, after=[*occupant.uses, *([use] if use is not None else [])])

    def _abandon(self, occupant: Occupant, error: SplitZipError | None = None) -> None:
        """LOADING ▶ GONE: the range is free once the last read in flight is done."""
        self._abandoned += 1
        self._draining.add(occupant.placed)
        self._dismiss(occupant, error)
        occupant.placed.cancel()

    def _dismiss(self, occupant: Occupant, error: SplitZipError | None = None) -> None:
        """Any state ▶ GONE, and off the books."""
        del self._occupants[occupant.plan.name]
        occupant.state = OccupantState.GONE
        occupant.error = error
        occupant.settle()
