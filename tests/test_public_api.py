"""Each public name imports and says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import splitzip_aio

PACKAGE = Path(splitzip_aio.__file__).parent
OPTIONAL = {"splitzip_aio.drivers.rings.liburing_ring": "liburing"}


def module_names() -> list[str]:
    walked = pkgutil.walk_packages(splitzip_aio.__path__, "splitzip_aio.")
    return ["splitzip_aio", *(module.name for module in walked if not module.name.endswith(".__main__"))]


def load(name: str) -> ModuleType:
    if "kernels" in name:
        pytest.importorskip("triton")
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", module_names())
def test_module_is_documented_and_its_names_import(name: str) -> None:
    module = load(name)
    assert module.__doc__
    exported = module.__all__
    assert len(exported) == len(set(exported))
    for public in exported:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"


def test_lazy_names_agree_with_what_type_checkers_see() -> None:
    """The TYPE_CHECKING imports, ``__all__`` and the lazy table are three views of one list."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("splitzip_aio.")
        for alias in node.names
    }
    assert seen.keys() | {"__version__"} == set(splitzip_aio.__all__)
    for name, module in seen.items():
        assert getattr(splitzip_aio, name) is getattr(importlib.import_module(module), name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        splitzip_aio.no_such_name  # noqa: B018


def test_star_import_brings_all_names() -> None:
    script = "from splitzip_aio import *; print(build_cache.__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("splitzip_aio.cache")
