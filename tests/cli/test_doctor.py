"""doctor: each finding on this machine, and how each shortcoming reads."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

import splitzip_aio
from splitzip_aio.cli import doctor
from splitzip_aio.cli.doctor import Check, examine
from splitzip_aio.codec import cpu
from splitzip_aio.errors import DriverUnavailableError
from splitzip_aio.host_cache.headroom import Headroom
from tests.cli.conftest import CommandLine

NAMES = {"splitzip-aio", "python", "torch", "cuda", "triton", "cpu codec", "memory", "locked memory", "io_uring"}


def finding(name: str, directory: Path) -> Check:
    (found,) = (check for check in examine(directory).checks if check.name.startswith(name))
    return found


def test_looks_at_everything(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert {check.name for check in found.checks} == NAMES | {f"direct I/O in {tmp_path}"}
    assert found.healthy
    for check in found.checks:
        assert check.detail
        assert check.remedy or check.status == "ok"
    assert not list(tmp_path.iterdir())


def test_text_and_json(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = cli("doctor")
    document = cli("doctor", "--json").document
    assert text.code == 0
    assert document["healthy"] is True
    assert {check["name"] for check in document["checks"]} > NAMES
    for check in document["checks"]:
        assert check.keys() == {"name", "status", "detail", "remedy"}
        assert f"{check['status']:<4}  {check['name']}: " in text.out


def test_old_torch_fails(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    done = cli("doctor")
    assert done.code == 1
    assert "fail  torch: 2.7.1+cu126" in done.out
    assert "pip install 'torch>=2.8'" in done.out


def test_no_io_uring_is_a_warning_with_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise DriverUnavailableError("io_uring is disabled by the kernel")

    monkeypatch.setattr(splitzip_aio, "open_driver", refuse)
    found = finding("io_uring", tmp_path)
    assert found.status == "warn"
    assert found.detail == "io_uring is disabled by the kernel"


def test_unwritable_directory_is_a_warning(tmp_path: Path) -> None:
    found = finding("direct I/O", tmp_path / "absent")
    assert found.status == "warn"
    assert "absent" in found.detail


@pytest.mark.parametrize(("left", "status"), [(100 << 20, "warn"), (8 << 30, "ok")])
def test_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int, status: str) -> None:
    for name in ("headroom", "group_headroom"):
        monkeypatch.setattr(doctor, name, lambda: Headroom(left, 9 << 30))
    found = finding("memory", tmp_path)
    assert found.status == status
    assert "(a container) limits this process to 9.7 GB" in found.detail
    monkeypatch.setattr(doctor, "group_headroom", lambda: None)
    assert finding("memory", tmp_path).status == "ok"


@pytest.mark.parametrize(
    ("limit", "user", "status"), [(8 << 20, 1000, "warn"), (8 << 20, 0, "ok"), (1 << 30, 1000, "ok")]
)
def test_locked_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, user: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert finding("locked memory", tmp_path).status == status


def test_missing_triton_is_a_warning_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = {check.name: check for check in examine(tmp_path).checks}
    assert found["triton"].status == "warn"
    assert found["triton"].remedy == "pip install triton"


def test_slow_codec_is_a_warning_with_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "implementation", lambda: "numpy reference")
    monkeypatch.setitem(sys.modules, "numba", None)
    found = finding("cpu codec", tmp_path)
    assert found.status == "warn"
    assert "numba" in found.detail
