"""What is fuzzed: each parser of something that may come from anywhere, and what must hold whatever it is given."""

from __future__ import annotations

import contextlib
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np

from splitzip_aio.cache import SplitZipShardCache, build_cache
from splitzip_aio.cache.checkpoint import open_checkpoint
from splitzip_aio.cache.header import read_header
from splitzip_aio.cache.journal import JOURNAL_NAME
from splitzip_aio.codec import cpu
from splitzip_aio.codec.headers import SegmentHeaders
from splitzip_aio.codec.payload import parse_header
from splitzip_aio.errors import CacheError, CheckpointError, CorruptDataError, ManifestError, SplitZipError
from splitzip_aio.transport import open_transport
from tests.cache.samples import noise, safetensors_bytes, weights, write_checkpoint, write_sharded
from tests.fuzz import mutations

GOLDEN = Path(__file__).parents[1] / "codec" / "golden"
WHERE = "tensor 'a', packs/x.szp at offset 0"
GUARD = 0xA5
TINY = {
    "blocks.0.a": ("BF16", (20, 30), weights(600)),
    "blocks.1.a": ("F32", (10,), noise(40)),
    "blocks.1.tied": ("BF16", (20, 30), weights(600)),
}


class Target(ABC):
    """A parser. ``check`` returns what was said against its input, or "accepted"; any other error is a finding.

    Args:
        scratch: a directory of its own; nothing outside of it may be opened.
    """

    name: str

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    @abstractmethod
    def seeds(self) -> Iterator[bytes]:
        """Valid inputs."""

    @abstractmethod
    def mutate(self, data: bytes, chance: random.Random) -> bytes:
        """Another input."""

    @abstractmethod
    def check(self, data: bytes) -> str:
        """Parse, and use what was accepted."""


class ManifestTarget(Target):
    """The manifest of a cache whose packs are whole; what opens is verified, loaded and streamed."""

    name = "manifest"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.cache = shutil.copytree(GOLDEN / "cache", scratch / "cache")

    def seeds(self) -> Iterator[bytes]:
        yield (GOLDEN / "cache" / "manifest.json").read_bytes()

    def mutate(self, data: bytes, chance: random.Random) -> bytes:
        return mutations.mutate_manifest(data, chance)

    def check(self, data: bytes) -> str:
        (self.cache / "manifest.json").write_bytes(data)
        try:
            cache = SplitZipShardCache(self.cache)
        except ManifestError as error:
            return str(error)
        with cache:
            report = cache.verify()
            for name in cache.tensors:
                with contextlib.suppress(CorruptDataError):
                    cache.load_bytes(name)
            said = [damage.problem for damage in report.damaged] + [anyio.run(self.stream, cache)]
        return "accepted, then " + "; ".join(sorted(set(said)))

    async def stream(self, cache: SplitZipShardCache) -> str:
        said = []
        try:
            async with open_transport(cache, device="cpu", ring_bytes="64KiB", driver="threads") as transport:
                for layer in transport.layers:
                    try:
                        async with await transport.prefetch(layer) as lease:
                            assert lease.tensors is not None
                    except SplitZipError as error:
                        said.append(type(error).__name__)
        except SplitZipError as error:
            said.append(str(error))
        return "streamed " + " ".join(sorted(set(said)))


class SegmentTarget(Target):
    """A segment: judged alone as among others, decoded between guards, verified."""

    name = "segment"

    def seeds(self) -> Iterator[bytes]:
        for path in sorted(GOLDEN.glob("*.segment")):
            yield path.read_bytes()

    def mutate(self, data: bytes, chance: random.Random) -> bytes:
        return mutations.mutate_segment(data, chance)

    def check(self, data: bytes) -> str:
        alone, among = self.judge(data), self.judge_among_others(data)
        assert alone == among, f"alone: {alone}; among others: {among}"
        with contextlib.suppress(CorruptDataError):
            cpu.verify_segment(np.frombuffer(data, np.uint8), where=WHERE)
        if alone != "accepted":
            return alone
        size = parse_header(data, where=WHERE).decoded_bytes
        assert size <= 2 * len(data), f"{len(data)} bytes promise {size}"
        return self.decode(data, size)

    def judge(self, data: bytes) -> str:
        try:
            parse_header(data, where=WHERE)
        except CorruptDataError as error:
            return str(error)
        return "accepted"

    def judge_among_others(self, data: bytes) -> str:
        try:
            SegmentHeaders.parse(data, [0], [len(data)], where=lambda _: WHERE)
        except CorruptDataError as error:
            return str(error)
        return "accepted"

    def decode(self, data: bytes, size: int) -> str:
        memory = np.full(size + 128, GUARD, np.uint8)
        try:
            cpu.decode_segment(data, memory[64 : 64 + size], where=WHERE)
        except CorruptDataError as error:
            return f"accepted, then {error}"
        finally:
            assert (memory[:64] == GUARD).all(), "written before the output"
            assert (memory[64 + size :] == GUARD).all(), "written behind the output"
        return "accepted and decoded"


class CheckpointTarget(Target):
    """The header of a safetensors file."""

    name = "checkpoint"

    def seeds(self) -> Iterator[bytes]:
        yield safetensors_bytes(TINY, {"format": "pt"})
        yield safetensors_bytes({"a": ("F4", (2,), b"x"), "b": ("I64", (), bytes(8)), "c": ("U8", (0, 3), b"")})

    def mutate(self, data: bytes, chance: random.Random) -> bytes:
        return mutations.mutate_checkpoint(data, chance)

    def check(self, data: bytes) -> str:
        path = self.scratch / "model.safetensors"
        path.write_bytes(data)
        try:
            header = read_header(path)
        except CheckpointError as error:
            return str(error)
        for tensor in header.tensors:
            assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data), tensor
        return f"accepted, {len(header.tensors)} tensors"


class IndexTarget(Target):
    """The index of a sharded checkpoint: names of files that must not lead anywhere else."""

    name = "index"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        names = list(TINY)
        self.directory = write_sharded(scratch / "sharded", [{name: TINY[name]} for name in names])
        self.path = self.directory / "model.safetensors.index.json"
        self.seed = self.path.read_bytes()

    def seeds(self) -> Iterator[bytes]:
        yield self.seed

    def mutate(self, data: bytes, chance: random.Random) -> bytes:
        content = mutations.parsed(data)
        if content is None or chance.random() < 0.2:
            return mutations.mutate_bytes(data, chance)
        return mutations.dumped(mutations.mutate_json(content, chance))

    def check(self, data: bytes) -> str:
        self.path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(self.directory)
        except CheckpointError as error:
            return str(error)
        for file in checkpoint.files:
            assert file.path.parent == self.directory, file.path
        return f"accepted, {len(checkpoint.files)} files"


class JournalTarget(Target):
    """The journal of a killed build, which another build goes on from."""

    name = "journal"

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.source = write_checkpoint(scratch / "tiny.safetensors", TINY)
        self.out = scratch / "out"
        self.killed = scratch / "killed"
        copies = []

        def keep(_: object) -> None:
            copies.append(shutil.copytree(self.out, self.killed, dirs_exist_ok=True))

        build_cache(self.source, self.out, segment_elements=300, progress=keep)
        self.seed = (self.killed / JOURNAL_NAME).read_bytes()

    def seeds(self) -> Iterator[bytes]:
        yield self.seed

    def mutate(self, data: bytes, chance: random.Random) -> bytes:
        return mutations.mutate_lines(data, chance)

    def check(self, data: bytes) -> str:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.killed, self.out)
        (self.out / JOURNAL_NAME).write_bytes(data)
        try:
            report = build_cache(self.source, self.out, segment_elements=300)
        except CacheError as error:
            return str(error)
        with SplitZipShardCache(self.out) as cache:
            assert cache.verify().ok
        return f"built, {report.resumed} resumed"


TARGETS = {
    target.name: target for target in (ManifestTarget, SegmentTarget, CheckpointTarget, IndexTarget, JournalTarget)
}
