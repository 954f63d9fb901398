"""The tree is the architecture: imports point one way, public names are stated, the README's code runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, adp2sgd

SOURCE = ROOT / "src" / "adp2sgd"

LAYERS = {
    "errors": 0,
    "config": 1,
    "device": 1,
    "files": 1,
    "flat": 1,
    "progress": 1,
    "privacy": 2,
    "theory": 3,
    "topology": 4,
    "data": 3,
    "models": 3,
    "task": 4,
    "gradient": 5,
    "learner": 6,
    "exchange": 7,
    "record": 7,
    "engine": 8,
    "view": 9,
    "demo": 10,
    "cli_privacy": 10,
    "cli": 11,
    "__init__": 11,
    "__main__": 12,
}


def imports(path: Path) -> set[str]:
    """The parts of adp2sgd that a file imports, at its top level or inside a function, but not for types alone."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "adp2sgd":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("adp2sgd.")}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert own in LAYERS, f"give {own} a layer"
    for other in imports(path) - {own}:
        assert LAYERS[other] < LAYERS[own], f"{own} must not import {other}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
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
from adp2sgd.cli import main
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
            assert (page.parent / link).exists(), f"{page.name}: {link}"
