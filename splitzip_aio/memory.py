"""Anonymous memory from the kernel: page-aligned, zeroed, and committed only as it is written to."""

from __future__ import annotations

import mmap
from contextlib import suppress

from splitzip_aio.errors import InvalidArgumentError

__all__ = ["map_anonymous"]


def map_anonymous(nbytes: int, *, option: str) -> mmap.mmap:
    """Map ``nbytes`` bytes, in huge pages where the kernel has them.

    Args:
        nbytes: a positive number of bytes.
        option: the option that asked for them, for the error.

    Raises:
        InvalidArgumentError: the kernel refuses so much.
    """
    try:
        # Private, not mmap's default of shared: shared anonymous memory is a file in tmpfs, without huge pages.
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise InvalidArgumentError(f"{option}: the kernel refused {nbytes} bytes ({exc}); give less") from exc
    with suppress(OSError):  # a kernel without huge pages: only a little slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
