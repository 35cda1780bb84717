"""Every error this package raises on purpose, as one tree.

::

    SplitZipError
    ├── UnsupportedError (NotImplementedError)   a valid request this machine, build or format cannot serve
    │   └── DriverUnavailableError               an I/O back end that cannot run here, and why
    ├── InvalidArgumentError (ValueError)        an option out of range, or options that contradict each other
    ├── CheckpointError                          a source checkpoint is damaged or malformed
    ├── CacheError                               a cache cannot be used or made
    │   ├── CacheNotFoundError                   no complete cache at this path
    │   ├── CacheExistsError                     refusing to replace what is already there
    │   ├── CacheBusyError                       another builder holds the directory
    │   ├── ManifestError                        the manifest is damaged, foreign or hostile
    │   ├── SourceChangedError                   a source no longer matches its fingerprint
    │   └── CorruptDataError                     stored bytes are wrong: truncated, flipped or inconsistent
    ├── ReadError (OSError)                      the operating system failed a read
    ├── TransportError                           streaming
    │   ├── ClosedError                          used after close
    │   ├── BusyError                            a ``*_nowait`` call would have had to wait
    │   ├── UnknownLayerError (KeyError)         no layer of this name
    │   ├── LayerTooLargeError                   a layer cannot fit the arena or the staging ring
    │   ├── LeaseReleasedError                   a lease used after its release
    │   └── WrongEventLoopError                  used from another event loop than the one that opened it

Cancellation is not an error here: the event loop's own exception passes through unchanged.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "CacheBusyError",
    "CacheError",
    "CacheExistsError",
    "CacheNotFoundError",
    "CheckpointError",
    "ClosedError",
    "CorruptDataError",
    "DriverUnavailableError",
    "InvalidArgumentError",
    "LayerTooLargeError",
    "LeaseReleasedError",
    "ManifestError",
    "ReadError",
    "SourceChangedError",
    "SplitZipError",
    "TransportError",
    "UnknownLayerError",
    "UnsupportedError",
    "WrongEventLoopError",
]


class SplitZipError(Exception):
    """Base of every error raised on purpose by splitzip_aio."""


class UnsupportedError(SplitZipError, NotImplementedError):
    """A valid request that this machine, build or format cannot serve."""


class DriverUnavailableError(UnsupportedError):
    """An I/O back end cannot run here; the message says why and what would."""


class InvalidArgumentError(SplitZipError, ValueError):
    """An option is out of range, or options contradict each other."""


class CheckpointError(SplitZipError):
    """A source checkpoint is damaged or malformed."""


class CacheError(SplitZipError):
    """A cache cannot be used or made."""


class CacheNotFoundError(CacheError):
    """There is no complete cache at this path."""


class CacheExistsError(CacheError):
    """The output path holds something that would be replaced."""


class CacheBusyError(CacheError):
    """Another builder holds the output directory."""


class ManifestError(CacheError):
    """The manifest is damaged, of another format, or hostile."""


class SourceChangedError(CacheError):
    """A source checkpoint no longer matches the fingerprint taken when the cache was built."""


class CorruptDataError(CacheError):
    """Stored bytes are wrong: truncated, flipped or inconsistent."""


class ReadError(SplitZipError, OSError):
    """The operating system failed a read; ``errno`` and ``filename`` are set where known."""


class TransportError(SplitZipError):
    """Streaming could not go on as asked."""


class ClosedError(TransportError):
    """Used after close."""


class BusyError(TransportError):
    """A ``*_nowait`` call would have had to wait."""


class UnknownLayerError(TransportError, KeyError):
    """No layer of this name."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class LayerTooLargeError(TransportError):
    """A layer cannot fit the arena, or one of its segments cannot fit a staging slot."""


class LeaseReleasedError(TransportError):
    """A lease was used after its release."""


class WrongEventLoopError(TransportError):
    """Used from another event loop than the one that opened it."""
