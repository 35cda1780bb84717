"""Streaming: layers of a cache, on demand, decoded into an arena.

::

    async with open_transport("cache/", device="cuda:0") as transport:
        for layer in transport.layers:
            async with await transport.prefetch(layer) as lease:
                run(lease.tensors)

Three tasks live as long as a transport: prefetcher, dispatcher, and one that watches over both and tears down. They are
shielded from the cancellation of the code around them, and end when the transport is closed and what was in flight has
landed; so at no time does a buffer go away that the kernel or the GPU still writes to. Should one of them fail where it
must not, everyone who waits gets a TransportError, and so does the ``async with`` around the transport.
"""

from __future__ import annotations

from splitzip_aio.transport.lease import Lease
from splitzip_aio.transport.opening import open_transport
from splitzip_aio.transport.stream import Transport

__all__ = ["Lease", "Transport", "open_transport"]
