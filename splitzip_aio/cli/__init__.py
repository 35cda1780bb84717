"""The ``splitzip-aio`` command: build, inspect, verify, load, demo, bench, doctor."""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("rich", "typer")


def main() -> None:
    """Run the command line; the process exits with 0, 1 (failed) or 2 (wrong usage)."""
    try:
        from splitzip_aio.cli.app import app
    except ModuleNotFoundError as exc:
        if exc.name not in _EXTRA:
            raise
        sys.exit(f"splitzip-aio: the command line needs {exc.name}, of the extra 'cli': pip install rich typer")
    app(prog_name="splitzip-aio")
