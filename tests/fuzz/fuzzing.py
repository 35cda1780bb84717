"""Fuzzing of every parser: inputs that are almost right, over and over, and those kept that are judged in a new way.

    python -m tests.fuzz.fuzzing --seconds 10                      every parser, from the corpus on
    python -m tests.fuzz.fuzzing segment --seconds 1800 --keep     one for half an hour; new inputs join the corpus

Run in a process of its own: it limits its memory, and watches which files are opened. A finding ends it with a
traceback, and the input is left in ``crash-NAME`` of the working directory.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from splitzip_aio.codec import cpu
from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
MORE_MEMORY_BYTES = 256 << 20
LONGEST_CHECK_S = 20.0  # of the processor's time: the machine may have other things to do
MOST_KEPT = 80
MOST_KEPT_BYTES = 6000


class Watch:
    """Notes files that are opened outside of one directory while it is on; Python's own modules are let through."""

    def __init__(self, allowed: Path) -> None:
        self.on = False
        self.outside: list[str] = []
        own = (allowed, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2] / "splitzip_aio")
        self._allowed = (*(f"{path}/" for path in own), "/proc/", "/sys/fs/cgroup", "/dev/null")
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on or event != "open" or isinstance(arguments[0], int):
            return
        name = os.fsdecode(arguments[0])  # type: ignore[arg-type]
        if ".." in Path(name).parts or (name.startswith("/") and not f"{name}/".startswith(self._allowed)):
            self.outside.append(name)


class Fuzzer:
    """One parser, its corpus, and the ways in which its inputs were judged so far."""

    def __init__(self, target: Target, watch: Watch, seed: int) -> None:
        self.target = target
        self.watch = watch
        self.chance = random.Random(seed)
        self.inputs: list[bytes] = []
        self.judged: Counter[str] = Counter()
        self.found: list[bytes] = []

    def warm_up(self) -> None:
        """Have everything compiled that the valid inputs need: the compiler opens files, and takes memory."""
        for data in self.target.seeds():
            self.target.check(data)

    def replay(self) -> None:
        """Check the valid inputs, which must be accepted, and the corpus."""
        for data in self.target.seeds():
            said = self.run(data)
            assert said.startswith(("accepted", "built")), said
            self.inputs.append(data)
        for path in sorted((CORPUS / self.target.name).glob("*")):
            self.run(path.read_bytes())
            self.inputs.append(path.read_bytes())

    def step(self) -> None:
        """Check one more input; keep it if it is judged in a new way."""
        data = self.target.mutate(self.chance.choice(self.inputs), self.chance)
        kinds = len(self.judged)
        self.run(data)
        if len(self.judged) > kinds and len(self.inputs) < MOST_KEPT and len(data) <= MOST_KEPT_BYTES:
            self.inputs.append(data)
            self.found.append(data)

    def run(self, data: bytes) -> str:
        """Check one input; any error but those that are meant is a finding."""
        signal.setitimer(signal.ITIMER_PROF, LONGEST_CHECK_S)
        self.watch.on = True
        try:
            said = self.target.check(data)
            assert not self.watch.outside, f"opened {self.watch.outside}"
        except BaseException:
            Path(f"crash-{self.target.name}").write_bytes(data)
            raise
        finally:
            self.watch.on = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.judged[kind_of(said)] += 1
        return said

    def keep(self) -> None:
        """Add what was found to the corpus, named after its content."""
        folder = CORPUS / self.target.name
        folder.mkdir(parents=True, exist_ok=True)
        for data in self.found:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def kind_of(said: str) -> str:
    """A judgement without the names and numbers in it."""
    said = re.sub(r"'(\\.|[^'\\])*'|\"(\\.|[^\"\\])*\"", "'…'", said)
    return re.sub(r"-?[0-9a-f]*[0-9][0-9a-f]*", "#", said)[:160]


def limit_memory() -> None:
    """No more than so much beyond what is in use."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = (int(status["VmData"].split()[0]) << 10) + MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def stuck(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"one input took more than {LONGEST_CHECK_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each parser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="add new inputs to the corpus")
    options = parser.parse_args()
    logging.getLogger("splitzip_aio").setLevel(logging.ERROR)
    signal.signal(signal.SIGPROF, stuck)
    with tempfile.TemporaryDirectory() as directory:
        watch = Watch(Path(directory))
        made = []
        for name in options.targets or TARGETS:
            scratch = Path(directory) / name
            scratch.mkdir()
            made.append(Fuzzer(TARGETS[name](scratch), watch, options.seed))
        cpu.implementation()
        for fuzzer in made:
            fuzzer.warm_up()
        limit_memory()
        for fuzzer in made:
            fuzz(fuzzer, options.seconds, keep=options.keep)


def fuzz(fuzzer: Fuzzer, seconds: float, *, keep: bool) -> None:
    began, count = time.monotonic(), 0
    fuzzer.replay()
    while time.monotonic() - began < seconds:
        fuzzer.step()
        count += 1
    if keep:
        fuzzer.keep()
    accepted = sum(count for said, count in fuzzer.judged.items() if said.startswith(("accepted", "built")))
    took = f"{count:9d} inputs in {time.monotonic() - began:.0f} s"
    ways = f"{accepted} accepted, judged in {len(fuzzer.judged)} ways, no finding"
    print(f"{fuzzer.target.name:10}  {took}, {ways}", flush=True)


if __name__ == "__main__":
    main()
