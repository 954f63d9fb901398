"""The tree is the architecture: imports point one way, public names are stated, the README's code runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from conftest import ROOT, adp2sgd

SOURCE = ROOT / "src" / "adp2sgd"
FILES = sorted((ROOT / "src" / "adp2sgd").rglob("*.py"))

LAYERS = {
    "errors": 0,
    "settings": 1,
    "tree": 1,
    "config": 2,
    "device": 3,
    "files": 3,
    "flat": 3,
    "optimizer": 3,
    "shared_vector": 3,
    "progress": 3,
    "identity": 4,
    "randomness": 4,
    "privacy": 5,
    "theory": 6,
    "topology": 7,
    "data": 6,
    "models": 6,
    "losses": 5,
    "metrics": 6,
    "task": 7,
    "tasks": 8,
    "gradient": 8,
    "sampler": 8,
    "withhold": 8,
    "learner": 9,
    "exchange": 10,
    "run_folder": 10,
    "model_folder": 11,
    "callbacks": 4,
    "new_data": 12,
    "engine": 12,
    "report": 13,
    "doctor": 14,
    "cli": 15,
    "__init__": 16,
    "__main__": 17,
}
ENGINE = {  # inside engine/, from what all share to what drives
    "plan": 0,
    "compute": 1,
    "budgets": 1,
    "evaluate": 1,
    "checkpoint": 1,
    "divergence": 1,
    "interrupt": 0,
    "pace": 0,
    "speeds": 0,
    "spending": 0,
    "threads": 0,
    "status": 1,
    "theta": 0,
    "background": 3,
    "extension": 2,
    "site": 2,
    "validate": 2,
    "setup": 3,
    "forecast": 4,
    "worker": 4,
    "result": 4,
    "simulation": 5,
    "processes": 5,
    "peers": 5,
    "__init__": 6,
}


MODULES = {path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", "."): path for path in FILES}


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """The modules of adp2sgd that a file imports, but not for types alone; `top_level`: not those in functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "adp2sgd":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                package = f"{inner}.__init__"
                found.add(inner if inner in MODULES else package if package in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("adp2sgd.")}
    return found


def layer(module: str, depth: int, layers: dict[str, int]) -> tuple[str, int]:
    """The room that a module lies in, and that room's height."""
    parts = module.split(".")
    room = parts[depth] if len(parts) > depth else "__init__"
    assert room in layers, f"give {room} a layer"
    return room, layers[room]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str) -> None:
    room, height = layer(module, 1, LAYERS)
    for other in imports(MODULES[module]):
        beneath, below = layer(other, 1, LAYERS)
        assert below < height or room == beneath, f"{module} must not import {other}"


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("adp2sgd.engine.")))
def test_imports_inside_engine_point_one_way(module: str) -> None:
    """Neither engine knows the other, and what they share knows neither."""
    room, height = layer(module, 2, ENGINE)
    for other in imports(MODULES[module]):
        if other.startswith("adp2sgd.engine."):
            beneath, below = layer(other, 2, ENGINE)
            assert below < height or room == beneath, f"{module} must not import {other}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: imports(path, top_level=True) & MODULES.keys() for name, path in MODULES.items()}
    order = TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_are_short(path: Path) -> None:
    """A file of more than 400 lines is two concepts; a function of more than 45 is two steps."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 45, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_package_never_imports_the_reproduction(path: Path) -> None:
    """Neither by a statement nor by a name in a string: the package is installed without it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "reproduction" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] != "reproduction"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.match(r"reproduction(\.[\w.]+)?(:\w+)?$", node.value)


def test_the_algorithm_knows_no_clock_no_socket_and_no_process() -> None:
    for name in ("learner.py", "exchange/protocol.py"):
        text = (SOURCE / name).read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (time|socket|multiprocessing|subprocess|os)\b", text, re.MULTILINE)


def test_public_names_exist_and_are_stated() -> None:
    import adp2sgd as package

    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert hasattr(package, name)


@pytest.mark.parametrize(
    "command",
    [
        "--version", "simulate --help", "topology ring --learners 8",
        "privacy steps --epsilon 8 --sample-rate .1 --noise-multiplier 2 --delta 1e-5",
        "privacy noise --epsilon 8 --sample-rate .1 --steps 100 --delta 1e-5",
        "privacy epsilon --noise-multiplier 1 --sample-rate .1 --steps 100 --delta 1e-5",
    ],
)  # fmt: skip
def test_commands_that_train_nothing_do_not_wait_for_torch(command: str) -> None:
    program = f"""import sys
sys.argv = {["adp2sgd", *command.split()]}
from adp2sgd.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for kept in re.findall(r"`([a-z]+\.(?:json|toml|safetensors))`", text):
        assert (tmp_path / "runs/first" / kept).is_file(), kept


def test_the_readmes_commands_exist(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = set(re.findall(r"^\$ adp2sgd ([a-z]+)", text, re.MULTILINE))
    assert {"simulate", "topology", "privacy"} <= verbs
    for verb in verbs:
        assert adp2sgd(verb, "--help", cwd=tmp_path).returncode == 0


def test_the_readmes_targets_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readmes_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "reproduction" / "README.md"]
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            generated = link.startswith("reference/")  # by `make docs`, which checks it
            assert generated or (page.parent / link).exists(), f"{page.name}: {link}"
