"""What a binding of io_uring does for the driver, and the registrations that all bindings make alike."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from splitzip_aio.drivers.rings import kernel

__all__ = ["Ring"]


class Ring(ABC):
    """A submission queue and a completion queue, used by one thread at a time.

    Registering goes through the system call in every binding: it is not worth a second way, and liburing's
    Python objects hold on to the memory they are made from. Every method may raise OSError.

    Attributes:
        binding: what to call this binding in statistics.
        descriptor: the ring's file descriptor.
    """

    binding: str
    descriptor: int

    @abstractmethod
    def prepare_read(
        self, token: int, target: int, flags: int, address: int, nbytes: int, offset: int, buffer: int | None
    ) -> None:
        """Write a read into the submission queue, in which the caller knows to be room.

        Args:
            token: returned with the completion; from 0 to the queue's depth, and not in use.
            target: a descriptor, or with ``kernel.SQE_FIXED_FILE`` the index of a registered one.
            flags: ``kernel.SQE_`` flags.
            address: of the memory to read into.
            nbytes: how much to read.
            offset: bytes from the start of the file.
            buffer: index of the registered buffer that the memory is part of; None if it is of none.
        """

    @abstractmethod
    def submit(self) -> None:
        """Hand what is prepared to the kernel; after an error the rest stays prepared."""

    @abstractmethod
    def completions(self) -> list[tuple[int, int]]:
        """Token and result, a negated errno on failure, of each read completed since the last call."""

    @abstractmethod
    def wait(self) -> None:
        """Submit what is prepared, and block until there is a completion."""

    @abstractmethod
    def free(self) -> None:
        """Let go of the queues and the descriptor."""

    def close(self) -> None:
        """Undo the registrations, then let go of the rest. Nothing may be in flight.

        Closing the descriptor undoes them too, but some time later, on a kernel thread: until then the slots
        would stay pinned, their bytes would count towards RLIMIT_MEMLOCK, and the files would be in use.
        """
        for operation in (kernel.UNREGISTER_BUFFERS, kernel.UNREGISTER_FILES):
            with suppress(OSError):  # ENXIO: there were none
                kernel.register(self.descriptor, operation, None, 0)
        self.free()

    def register_buffers(self, buffers: Sequence[tuple[int, int]]) -> None:
        """Pin memory for as long as the ring lives; each buffer is an address and a size in bytes."""
        words = [word for buffer in buffers for word in buffer]
        kernel.register(
            self.descriptor, kernel.REGISTER_BUFFERS, bytearray(struct.pack(f"={len(words)}Q", *words)), len(buffers)
        )

    def register_files(self, count: int) -> None:
        """Make an empty table of files. A table of -1 means what kernels from 5.19 on call sparse."""
        table = bytearray(struct.pack(f"={count}i", *[-1] * count))
        kernel.register(self.descriptor, kernel.REGISTER_FILES, table, count)

    def update_file(self, index: int, descriptor: int) -> None:
        """Put a descriptor into the table of files; -1 takes out what is there."""
        files = bytearray(struct.pack("=i", descriptor))
        view = kernel.address_of(files)
        kernel.register(
            self.descriptor, kernel.REGISTER_FILES_UPDATE, bytearray(struct.pack("=IIQ", index, 0, view)), 1
        )

    def register_event(self) -> int:
        """Have an eventfd signalled at each completion; the caller closes it."""
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            argument = bytearray(struct.pack("=i", event))
            kernel.register(self.descriptor, kernel.REGISTER_EVENTFD, argument, 1)
        except OSError:
            os.close(event)
            raise
        return event
