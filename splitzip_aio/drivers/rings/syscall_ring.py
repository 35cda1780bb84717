"""io_uring over the bare system calls: nothing to compile, any CPU, any kernel from Linux 5.6 on."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import suppress

from splitzip_aio.drivers.rings import kernel
from splitzip_aio.drivers.rings.base import Ring

__all__ = ["SyscallRing"]

_WRAP = 0xFFFFFFFF


class SyscallRing(Ring):
    """Queues written and read through memoryviews of the memory shared with the kernel.

    **Ordering.** Python has no barriers, and needs almost none here. Without SQPOLL the kernel looks at the
    submission queue only inside ``io_uring_enter``, on the thread that called it, which sees its own stores.
    Completions are another matter: a kernel worker posts them from any CPU, entry first, tail second. So the
    tail must be read before the entries that it announces. x86-64 does that anyway; aarch64 may not, and a
    lock given up and taken in between makes it, as both synchronise memory (POSIX, 4.15). No entry is
    overwritten while it is read: the completion queue is twice as long as the submission queue, and the
    driver submits no more until it has collected. So it can never overflow either.

    **Threads.** IORING_SETUP_SINGLE_ISSUER, and DEFER_TASKRUN which requires it, bind a ring to the thread
    that made it. A driver may be opened in one thread and closed, by the garbage collector, in another.
    """

    binding = "system calls"

    def __init__(self, entries: int) -> None:
        """Raises OSError; EINVAL where the kernel is older than 5.6."""
        layout = _setup(entries)
        self.descriptor = layout.descriptor
        try:
            _check_features(layout.features)
            self._memory = _map(layout.descriptor, layout.ring_bytes, 0)
            self._entry_memory = _map(layout.descriptor, kernel.SQE_BYTES * layout.sq_entries, kernel.OFF_SQES)
        except OSError:
            os.close(layout.descriptor)
            raise
        self._entries = memoryview(self._entry_memory)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("I")
        self._sq_mask = layout.sq_entries - 1
        self._cq_mask = layout.cq_entries - 1
        self._sq_tail_at = layout.sq_tail // 4
        self._cq_head_at = layout.cq_head // 4
        self._cq_tail_at = layout.cq_tail // 4
        self._cq_entry = layout.cq_entry
        self._tail = self._head = self._prepared = 0
        self._ordering = threading.Lock()
        self._ordering.acquire()
        first = layout.sq_array // 4
        for index in range(layout.sq_entries):  # place i of the queue is entry i, for good
            self._words[first + index] = index

    def prepare_read(
        self, token: int, target: int, flags: int, address: int, nbytes: int, offset: int, buffer: int | None
    ) -> None:
        """Write a read into the submission queue; see ``Ring.prepare_read``."""
        where = (self._tail & self._sq_mask) * kernel.SQE_BYTES
        if buffer is None:
            kernel.READ_ENTRY.pack_into(
                self._entries, where, kernel.OP_READ, flags, 0, target, offset, address, nbytes, 0, token, 0
            )
        else:
            kernel.READ_ENTRY.pack_into(
                self._entries, where, kernel.OP_READ_FIXED, flags, 0, target, offset, address, nbytes, 0, token, buffer
            )
        self._tail = (self._tail + 1) & _WRAP
        self._prepared += 1

    def submit(self) -> None:
        """Hand what is prepared to the kernel; after an error the rest stays prepared."""
        self._words[self._sq_tail_at] = self._tail
        while self._prepared:
            self._prepared -= kernel.enter(self.descriptor, self._prepared)

    def completions(self) -> list[tuple[int, int]]:
        """Token and result of each read completed since the last call."""
        head, tail = self._head, self._words[self._cq_tail_at]
        if head == tail:
            return []
        self._ordering.release()
        self._ordering.acquire()
        entries, first, mask = self._bytes, self._cq_entry, self._cq_mask
        unpack, size = kernel.COMPLETION.unpack_from, kernel.COMPLETION.size
        found = []
        while head != tail:
            token, result, _ = unpack(entries, first + (head & mask) * size)
            found.append((token, result))
            head = (head + 1) & _WRAP
        self._head = self._words[self._cq_head_at] = head
        return found

    def wait(self) -> None:
        """Submit what is prepared, and block until there is a completion."""
        self._words[self._sq_tail_at] = self._tail
        self._prepared -= kernel.enter(self.descriptor, self._prepared, 1, kernel.ENTER_GETEVENTS)

    def free(self) -> None:
        """Unmap the queues, then close the descriptor."""
        for view in (self._entries, self._words, self._bytes):
            view.release()
        self._entry_memory.close()
        self._memory.close()
        os.close(self.descriptor)


def _setup(entries: int) -> kernel.Layout:
    """COOP_TASKRUN (5.19) spares the event loop an interrupt at each completion: it comes by soon enough."""
    try:
        return kernel.setup(entries, kernel.SETUP_COOP_TASKRUN)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return kernel.setup(entries, 0)


def _check_features(features: int) -> None:
    """RW_CUR_POS came with IORING_OP_READ, in 5.6; SINGLE_MMAP before it."""
    needed = kernel.FEAT_SINGLE_MMAP | kernel.FEAT_RW_CUR_POS
    if features & needed != needed:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _map(descriptor: int, nbytes: int, offset: int) -> mmap.mmap:
    memory = mmap.mmap(
        descriptor,
        nbytes,
        flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=offset,
    )
    # A child process that inherited the queues would consume this process's completions.
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory
