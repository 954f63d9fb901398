"""What is imported is declared in pyproject.toml, and what is declared is imported; where it is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "scikit-learn": "sklearn",
    "pillow": "PIL",
    "mlflow-skinny": "mlflow",
}  # distribution → module, where "-" → "_" does not give it
PROVIDED = {"triton": "torch"}  # a part of torch's builds for GPUs; its module is imported where there is one
OWN = {"adp2sgd", "reproduction"}


@dataclass(frozen=True)
class Import:
    """`late`: run when a function is called, or never (for types alone)."""

    module: str
    late: bool
    place: str


def third_party(folder: Path) -> Iterator[Import]:
    """Every import of a module that is neither ours nor in the standard library."""
    for path in sorted(folder.rglob("*.py")):
        for node, late in statements(ast.parse(path.read_text(encoding="utf-8")), False):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - OWN - sys.stdlib_module_names:
                yield Import(name, late, f"{path.relative_to(ROOT)}:{node.lineno}")


def statements(node: ast.AST, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements below a node, and whether each is late."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from statements(child, late or function or types)


def modules(requirements: list[str]) -> set[str]:
    """The modules that these requirements install; an extra of our own is left out."""
    names = [re.match(r"[\w.-]+", each)[0].lower() for each in requirements]  # type: ignore[index]
    return {MODULES.get(name, name.replace("-", "_")) for name in names} - OWN


REQUIRED = modules(PROJECT["dependencies"])
EXTRAS = {name: modules(listed) for name, listed in PROJECT["optional-dependencies"].items()}


@pytest.mark.parametrize("folder", ["src", "reproduction"])
def test_what_is_imported_is_declared(folder: str) -> None:
    found = list(third_party(ROOT / folder))
    assert found
    for each in found:
        module = PROVIDED.get(each.module, each.module)
        extras = set().union(*EXTRAS.values()) if each.late else set()
        assert module in REQUIRED | extras, f"{each.place} imports {each.module}; declare it in pyproject.toml"


def test_what_is_declared_is_imported() -> None:
    package = {each.module for each in third_party(ROOT / "src")}
    assert not REQUIRED - package, "no module of the package imports it; remove it from dependencies"
    study = {each.module for each in third_party(ROOT / "reproduction")}
    for name, listed in EXTRAS.items():
        assert name == "dev" or not listed - package - study, f"nothing imports it; remove it from the extra {name}"


def test_an_import_is_found_wherever_it_stands() -> None:
    source = """import a.b
if TYPE_CHECKING:
    import c
def f():
    class G:
        from d.e import x
try:
    import g
finally:
    pass"""
    found = [(ast.unparse(node), late) for node, late in statements(ast.parse(source), False)]
    assert found == [("import a.b", False), ("import c", True), ("from d.e import x", True), ("import g", False)]


def test_importing_the_package_loads_nothing_but_torch_and_numpy() -> None:
    """Everything else is imported where it is used, so that training starts fast. `adp2sgd` alone loads neither."""
    program = """import sys
import adp2sgd
assert not {"torch", "numpy"} & set(sys.modules)
import numpy, torch
before = set(sys.modules)
for name in adp2sgd.__all__:
    getattr(adp2sgd, name)
print(*{name.partition(".")[0] for name in set(sys.modules) - before})"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    declared = REQUIRED.union(*EXTRAS.values())
    assert not set(done.stdout.split()) & declared - {"torch", "numpy"}
