"""The drop-in for the native shard transport: what the consumer calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from splitzip_aio.cache.entry import Entry
from splitzip_aio.errors import ClosedError
from splitzip_aio.vmm_fast.catalog import Catalog
from splitzip_aio.vmm_fast.consumer import Binding, NativeTransport, Unit
from splitzip_aio.vmm_fast.statistics import VmmFastStatistics
from splitzip_aio.vmm_fast.streamer import Counters, Piece, Streamer
from splitzip_aio.vmm_fast.tokens import completion, current

__all__ = ["SplitZipNativeShardTransport"]

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Ticket:
    """Weights that are on their way before they are wanted.

    ``windows`` is what the native transport looks for in a ticket: should one outlive this transport, it finds none
    there, and takes the ticket for one that has ended.
    """

    pieces: Sequence[Piece]
    native_bindings: Sequence[Binding]
    native_ticket: Any | None
    active: bool = True
    windows: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class _NativePart:
    """A unit reduced to what the native transport has to bring."""

    module_name: str
    tensors: Sequence[Binding]


class SplitZipNativeShardTransport:
    """Stands in for a store's native shard transport, and serves from a cache what the cache has.

    Weights that it does not have go to the native transport unchanged, and so does every call that is not named here.
    Made by ``enable_splitzip_fast_transport``; ``close`` or the end of a ``with`` block gives the store its native
    transport back. May be called from several threads, one at a time.
    """

    def __init__(
        self,
        store: Any,
        inner: NativeTransport,
        streamer: Streamer,
        catalog: Catalog,
        own: ExitStack,
        *,
        unit_bytes: int,
    ) -> None:
        self._store = store
        self._inner = inner
        self._streamer = streamer
        self._catalog = catalog
        self._own = own
        self._lock = threading.RLock()
        self._closed = False
        self._origin = streamer.transport.statistics()
        self._size_bytes = max(int(inner.size_bytes), unit_bytes)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def inner(self) -> NativeTransport:
        """The native transport."""
        return self._inner

    @property
    def size_bytes(self) -> int:
        """The most bytes that the consumer puts into one batch; here a unit, however large, is one."""
        return self._size_bytes

    def upload_batch(self, bindings: Sequence[Binding], native: Any, stream: Any) -> Any:
        """Bring weights to their places in the arena ``native``, on ``stream``.

        Waits for what has not arrived yet. Returns what the consumer makes its compute stream wait for: a
        ``torch.cuda.Event`` recorded on ``stream`` after everything, or the native transport's own token if the cache
        has none of the weights.

        Raises:
            CorruptDataError: stored bytes are wrong. Nothing was signalled ready.
            SourceChangedError: a source file is not what the cache was built from.
            ReadError: the operating system failed a read.
            ClosedError: the transport is closed.
            TransportError: streaming broke down.
        """
        with self._lock:
            self._check_open()
            found, rest = self._split(bindings)
            if not found:
                return self._upload_native(bindings, native, stream)
            return self._upload(self._streamer.pieces(found), rest, None, native, stream)

    def begin_read(self, bindings: Sequence[Binding]) -> Any:
        """Begin to bring weights that will be wanted soon; returns a ticket. Raises as ``upload_batch`` does."""
        with self._lock:
            self._check_open()
            found, rest = self._split(bindings)
            if not found:
                return self._inner.begin_read(bindings)
            ticket = _Ticket(self._streamer.pieces(found), rest, self._inner.begin_read(rest) if rest else None)
            self._streamer.hold(ticket.pieces, ticket)
            return ticket

    def ticket_active(self, ticket: Any) -> bool:
        """Whether ``upload_ticket`` may be called."""
        if not isinstance(ticket, _Ticket):
            return bool(self._inner.ticket_active(ticket))
        return ticket.active and (ticket.native_ticket is None or bool(self._inner.ticket_active(ticket.native_ticket)))

    def upload_ticket(self, ticket: Any, native: Any, stream: Any) -> Any:
        """As ``upload_batch``, for the weights of a ticket, which ends it.

        Raises:
            ClosedError: the ticket has ended, or the transport is closed.
        """
        with self._lock:
            self._check_open()
            if not isinstance(ticket, _Ticket):
                return self._inner.upload_ticket(ticket, native, stream)
            if not ticket.active:
                raise ClosedError("the ticket was used or discarded; begin another, or upload the batch without one")
            ticket.active = False
            try:
                return self._upload(ticket.pieces, ticket.native_bindings, ticket.native_ticket, native, stream)
            finally:
                self._streamer.let_go(ticket)

    def discard_ticket(self, ticket: Any) -> None:
        """End a ticket without using it. Idempotent."""
        with self._lock:
            if not isinstance(ticket, _Ticket):
                self._inner.discard_ticket(ticket)
            elif ticket.active:
                ticket.active = False
                self._streamer.let_go(ticket)
                if ticket.native_ticket is not None:
                    self._inner.discard_ticket(ticket.native_ticket)

    def prepare_sources(self, units: Iterable[Unit]) -> None:
        """Tell the native transport of the units, of which it has to bring only what the cache does not have."""
        parts = [_NativePart(unit.module_name, self._split(unit.tensors)[1]) for unit in units]
        self._inner.prepare_sources([part for part in parts if part.tensors])

    def statistics(self) -> VmmFastStatistics:
        """A snapshot, counted since the last ``reset_stats``.

        Raises:
            ClosedError: the transport is closed.
        """
        with self._lock:
            self._check_open()
            return VmmFastStatistics.between(
                self._origin, self._streamer.transport.statistics(), self._streamer.counters
            )

    def reset_stats(self) -> None:
        """Count from here on, here and in the native transport."""
        with self._lock:
            self._inner.reset_stats()
            if not self._closed:
                self._origin = self._streamer.transport.statistics()
                self._streamer.counters = Counters()

    @property
    def read_seconds(self) -> float:
        """Seconds that uploads took for reading: in the native transport, and waiting here."""
        return float(self._inner.read_seconds) + self._streamer.counters.wait_s

    @property
    def read_bytes(self) -> int:
        """Bytes that uploads brought, as they are when decoded."""
        return int(self._inner.read_bytes) + self._streamer.counters.upload_bytes

    @property
    def slot_waits(self) -> int:
        """How often an upload waited: in the native transport for a slot, here for bytes."""
        return int(self._inner.slot_waits) + self._streamer.counters.waits

    @property
    def slot_wait_seconds(self) -> float:
        """How long those waits took."""
        return float(self._inner.slot_wait_seconds) + self._streamer.counters.wait_s

    @property
    def source_stats(self) -> Mapping[str, int]:
        """What was read from disk, by the native transport and by this one, under the consumer's names."""
        stats = dict(self._inner.source_stats)
        if self._closed:
            return stats
        now, origin = self._streamer.transport.statistics().io, self._origin.io
        stats["read_chunks"] += now.reads - origin.reads
        stats["read_bytes"] += now.bytes_read - origin.bytes_read
        return stats

    @property
    def _batch_timings(self) -> Mapping[str, float]:
        """What the store's ``runtime_stats`` shows as ``native_transport_…``: the native transport's, and ours."""
        timings = dict(getattr(self._inner, "_batch_timings", {}))
        if self._closed:
            return timings
        ours = self.statistics()
        names = ("uploads", "upload_bytes", "native_uploads", "native_bytes", "waits", "wait_s", "demands", "foreseen")
        return timings | {f"splitzip_{name}": getattr(ours, name) for name in (*names, "found_share")}

    def close(self) -> None:
        """Give the store its native transport back, once copies in flight are done, and free everything. Idempotent.

        A store that is itself being closed has given up its upload stream before it closes its transport; then the
        native one is closed too.

        Raises:
            TransportError: streaming had broken down, and nobody has been told.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                with self._own:
                    self._streamer.close()
            finally:
                self._restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not made yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"<SplitZipNativeShardTransport {'closed' if self._closed else self._streamer.transport}>"

    def _restore(self) -> None:
        if self._store._upload_stream is None:
            self._inner.close()
        elif self._store._native_shard_transport is self:
            self._store._native_shard_transport = self._inner
        else:
            logger.warning("the store's transport was replaced after this one was enabled; it stays as it is")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport is closed; the store has its native one back")

    def _split(self, bindings: Sequence[Binding]) -> tuple[list[tuple[Binding, Entry]], list[Binding]]:
        """Those that the cache has, with their entries, and the rest."""
        found: list[tuple[Binding, Entry]] = []
        rest: list[Binding] = []
        for binding in bindings:
            entry = self._catalog.find(binding.file_slice)
            if entry is None or entry.nbytes != binding.nbytes:
                rest.append(binding)
            else:
                found.append((binding, entry))
        return found, rest

    def _upload(
        self,
        pieces: Sequence[Piece],
        native_bindings: Sequence[Binding],
        native_ticket: Any | None,
        native: Any,
        stream: Any,
    ) -> Any:
        """Both parts side by side: ours is asked for, the native one uploaded, then ours; one event stands for both."""
        ahead, token = object(), None
        try:
            if native_bindings:
                self._streamer.hold(pieces, ahead)
                token = self._upload_native(native_bindings, native, stream, ticket=native_ticket)
            self._streamer.upload(pieces, native, stream)
        finally:
            self._streamer.let_go(ahead)
        with current(stream):
            return completion(stream, token)

    def _upload_native(self, bindings: Sequence[Binding], native: Any, stream: Any, *, ticket: Any = None) -> Any:
        if ticket is not None and self._inner.ticket_active(ticket):
            token = self._inner.upload_ticket(ticket, native, stream)
        else:
            token = self._inner.upload_batch(bindings, native, stream)
        self._streamer.counters.native_uploads += len(bindings)
        self._streamer.counters.native_bytes += sum(binding.nbytes for binding in bindings)
        return token
