"""``splitzip-aio bench``: the pipeline beside its own stages, and beside other loaders.

Nothing here prints a speed before the bytes that came with it were compared with the source.
"""

from __future__ import annotations

__all__: list[str] = []
