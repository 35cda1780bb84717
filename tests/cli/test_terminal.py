"""What the same command looks like on a terminal, in a pipe, in a closed pipe, and without its libraries."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitzip_aio.cache import Progress
from splitzip_aio.cli import main, output
from tests.cli.conftest import CommandLine

COMMAND = (sys.executable, "-c", "from splitzip_aio.cli import main; main()")
ROOT = Path(__file__).parent.parent.parent


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return plain | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}


def on_a_terminal(*arguments: str) -> str:
    """All that a command writes where both stdout and stderr are one terminal."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=follower, stdout=follower, stderr=follower, env=environment()
    ) as process:
        os.close(follower)
        written = b""
        while True:
            try:
                piece = os.read(leader, 1 << 16)
            except OSError:  # EIO: the command has closed its end
                break
            if not piece:
                break
            written += piece
    os.close(leader)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_terminal_gets_a_bar(checkpoint: Path, tmp_path: Path) -> None:
    text = on_a_terminal("build", str(checkpoint), str(tmp_path / "cache"))
    assert "━" in text
    assert "build " in text
    assert "\x1b[" in text
    assert "ratio" in text


def test_pipe_gets_plain_lines(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "build", str(checkpoint), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert "━" not in done.stdout + done.stderr
    assert done.stderr.startswith(f"build {tmp_path / 'cache'} ...\n")


def test_long_operations_say_now_and_then_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with output.reporting(as_json=False) as out, out.progress("stir") as progress:
        for second in range(12):
            now = 100.0 + second
            progress(Progress(second * 1_000_000, 12_000_000, "soup"))
    assert capfd.readouterr().err.splitlines() == [
        "stir ...",
        "stir ... 5.0 MB of 12.0 MB",
        "stir ... 10.0 MB of 12.0 MB",
    ]


def test_reader_that_leaves_early_is_no_traceback(built: Path) -> None:
    """As in ``splitzip-aio inspect cache | head -1``."""
    with subprocess.Popen(
        [*COMMAND, "inspect", str(built), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for name in [name for name in sys.modules if name.startswith("splitzip_aio.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as ending:
        main()
    wanted = f"splitzip-aio: the command line needs {library}, of the extra 'cli': pip install rich typer"
    assert ending.value.code == wanted


def test_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine, checkpoint: Path, tmp_path: Path
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("splitzip_aio.build_cache", interrupted)
    done = cli("build", checkpoint, tmp_path / "cache")
    assert done.code != 0
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (268_435_456, "268.4 MB"),
        (5_900_000_000, "5.9 GB"),
        (2 * 10**12, "2.0 TB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert output.format_bytes(count) == text


@pytest.mark.parametrize(("nbytes", "text"), [(1_230_000_000, "0.61 GB/s"), (1_000_000, "0.5 MB/s"), (0, "0.0 MB/s")])
def test_rates_for_people(nbytes: int, text: str) -> None:
    assert output.format_rate(nbytes, 2.0) == text
