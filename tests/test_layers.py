"""The import rule, read from the source: a module imports only from layers below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "splitzip_aio"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"memory", "planned", "timeline", "units", "waiting"}),
    frozenset({"abc"}),
    frozenset({"telemetry"}),
    frozenset({"codec", "stages"}),
    frozenset({"cache", "drivers"}),
    frozenset({"arena", "forecast", "packs", "plan", "staging"}),
    frozenset({"host_cache", "mapped"}),
    frozenset({"loading"}),
    frozenset({"dispatch", "prefetch"}),
    frozenset({"transport"}),
    frozenset({"blocking"}),
    frozenset({"materialize"}),
    frozenset({"offloading", "vmm_fast"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
SOURCES = sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    """``codec`` for codec/gpu.py, ``arena`` for arena.py, ``__init__`` for the package itself."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all that a file imports, wherever in the file."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            prefix = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}"


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and unit of what a file imports from this package; ``__init__`` for the package's own names."""
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] == PACKAGE.name:
            yield line, parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


def foreign_imports(path: Path) -> set[str]:
    return {name.split(".")[0] for _, name in imports(path)}


def test_every_unit_has_a_layer() -> None:
    found = {unit_of(path) for path in SOURCES} - {"__init__"}
    assert len(SOURCES) > 1
    assert found <= LEVEL.keys(), f"not placed in a layer: {sorted(found - LEVEL.keys())}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_below(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        return  # the package's own names come from every layer, lazily
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for line, target in own_imports(path)
        if target != unit and not is_below(target, unit)
    ]
    assert not wrong


def is_below(target: str, unit: str) -> bool:
    if target == "__init__":
        return LEVEL[unit] >= LEVEL["cli"]
    return LEVEL[target] < LEVEL[unit]


def test_only_its_binding_imports_liburing() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in SOURCES if "liburing" in foreign_imports(path)}
    assert users == {"drivers/rings/liburing_ring.py"}


def test_drivers_import_no_torch() -> None:
    drivers = [path for path in SOURCES if unit_of(path) == "drivers"]
    assert drivers
    assert not [path for path in drivers if foreign_imports(path) & {"torch", "triton"}]


def test_kernels_and_cache_know_no_event_loop() -> None:
    below = [path for path in SOURCES if unit_of(path) in {"codec", "cache"}]
    assert not [path for path in below if foreign_imports(path) & {"anyio", "asyncio", "trio", "sniffio"}]


LIGHT = """
import sys
import splitzip_aio
loaded = {"torch", "triton", "liburing", "numba", "numpy"} & sys.modules.keys()
assert not loaded, f"importing the package loads {sorted(loaded)}"
"""

MODULES = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = {"triton", "liburing"} & sys.modules.keys()
    assert not loaded, f"importing {name} loads {sorted(loaded)}"
import torch
assert not torch.cuda.is_initialized(), "an import initialised CUDA"
"""


def run_python(script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing_heavy() -> None:
    run_python(LIGHT)


def test_back_ends_are_loaded_only_when_used() -> None:
    """All modules but the back ends themselves, those which import triton or liburing in their first lines."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
    light = [name.removesuffix(".__init__") for name, path in modules.items() if not needs_back_end(path)]
    assert len(light) < len(modules), "no back end was found: this test has lost its subject"
    run_python(MODULES, *light)


def needs_back_end(path: Path) -> bool:
    statements = ast.parse(path.read_text()).body
    top = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    top |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
    return bool({name.split(".")[0] for name in top} & {"triton", "liburing"})
