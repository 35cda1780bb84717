"""Settings of the codec's tests."""

from __future__ import annotations

from hypothesis import settings

# The first example to reach a kernel compiles it, for seconds.
settings.register_profile("compiling", deadline=None)
settings.load_profile("compiling")
