"""A process that takes something away from itself, then streams a cache and examines the machine.

``python -m tests.environments.child SPEC`` with a JSON object; prints a JSON object. Modules are imported before
anything is taken away, so that what is tested is not whether Python starts. Without SPEC it reads one a line, and
forks for each, since importing takes longer than all the rest.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import resource
import sys
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import torch

from splitzip_aio.cli import doctor
from splitzip_aio.codec import cpu
from splitzip_aio.drivers import faults, faulty_engine, page_cache, threads, uring
from splitzip_aio.drivers.rings import syscall_ring
from splitzip_aio.errors import SplitZipError
from splitzip_aio.transport import open_transport
from tests.environments.seccomp import Refusal, refuse
from tests.transport.samples import raw

LOADED = (faults, faulty_engine, page_cache, threads, uring, syscall_ring, cpu, torch)


class Said(logging.Handler):
    """What the package warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def restrict(spec: dict[str, Any]) -> None:
    """Take away what the specification names."""
    if spec.get("group") is not None:
        (Path(spec["group"]) / "cgroup.procs").write_text("0\n")
    if spec.get("binds"):
        unshare_mounts()
        for source, target in spec["binds"]:
            bind(Path(source), Path(target))
    for name, limit in spec.get("limits", {}).items():
        kind = getattr(resource, name)
        resource.setrlimit(kind, (limit, limit))
    if spec.get("more_data_bytes") is not None:
        limit = used_data_bytes() + spec["more_data_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if spec.get("user") is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(spec["user"])
        os.setuid(spec["user"])
    if spec.get("refusals"):
        refuse(
            [Refusal(*(tuple(part) if isinstance(part, list) else part for part in row)) for row in spec["refusals"]]
        )


def used_data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmData"].split()[0]) << 10


def unshare_mounts() -> None:
    """Mounts from now on are this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, ctypes.c_ulong(private | recursive), None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def bind(source: Path, target: Path) -> None:
    """Show one file in place of another."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(bytes(source), bytes(target), None, ctypes.c_ulong(1 << 12), None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


async def stream(spec: dict[str, Any]) -> dict[str, Any]:
    """Every layer of a cache, as one digest, and what the transport says of itself."""
    digest = hashlib.sha256()
    async with open_transport(spec["cache"], device="cpu", **spec.get("options", {})) as transport:
        for layer in transport.layers:
            async with await transport.prefetch(layer) as lease:
                for name in sorted(lease.tensors):
                    digest.update(name.encode() + raw(lease.tensors[name]))
        statistics = transport.statistics()
    return {
        "digest": digest.hexdigest(),
        "driver": statistics.io.name,
        "fixed_buffers": statistics.io.fixed_buffers,
        "direct_files": statistics.direct_files,
        "fallbacks": statistics.fallbacks,
        "host_bytes": statistics.host_bytes,
    }


def live(spec: dict[str, Any]) -> None:
    """Do all that the specification says, and print what came of it."""
    if spec.get("user") is not None:  # whom the rest of Python may be out of reach for
        anyio.run(stream, spec | {"options": {"driver": "threads"}}, backend=spec.get("backend", "asyncio"))
    said = Said()
    logging.getLogger("splitzip_aio").addHandler(said)
    restrict(spec)
    found: dict[str, Any] = {}
    try:
        found |= anyio.run(stream, spec, backend=spec.get("backend", "asyncio"))
    except SplitZipError as error:
        found |= {"error": type(error).__name__, "message": str(error)}
    found["said"] = list(said.messages)
    if spec.get("doctor") is not None:
        found["doctor"] = {check.name: asdict(check) for check in doctor.examine(Path(spec["doctor"])).checks}
    print(json.dumps(found), flush=True)


def serve() -> None:
    """Answer each line with a process of its own: its exit status, and what it wrote."""
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = os.fork()
            if process == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                _live_and_leave(json.loads(line))
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            answer = [status]
            for file in (out, err):
                file.seek(0)
                answer.append(file.read())
        print(json.dumps(answer), flush=True)


def _live_and_leave(spec: dict[str, Any]) -> None:
    status = 1
    try:
        live(spec)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, this copy of the server must end here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    cpu.implementation()  # loads compiled code
    if len(sys.argv) > 1:
        live(json.loads(sys.argv[1]))
    else:
        serve()


if __name__ == "__main__":
    main()
