"""Screens of 80 × 24 and 200 × 50 characters, in a real terminal: nothing is cut off."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data_files import write_table
from terminal import Terminal

pytestmark = pytest.mark.integration  # real terminals

SIZES = [(80, 24), (200, 50)]
RUN = """
task = "table/logistic"
learners = 3
batch_size = 8
[options]
path = "t.csv"
label = "ill"
classes = ["n", "y"]
site = "clinic"
ranges = {age = [0, 100]}
[privacy]
mode = "private"
epsilon = 3
delta = 1e-4
"""
SITES = ("aachen-university-hospital", "bern", "cluj")


def whole(screen: str) -> str:
    """The screen, with no mark of something cut off and no word of a table broken in two."""
    assert "…" not in screen
    assert "..." not in screen.replace("COMMAND [ARGS]...", "")
    return screen


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    ages = [20 + i % 60 for i in range(360)]
    columns = {"age": ages, "clinic": [SITES[i % 3] for i in range(360)], "ill": ["ny"[age > 50] for age in ages]}
    write_table(tmp_path / "t.csv", columns)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_help_and_tables_are_complete(columns: int, lines: int, run_file: Path) -> None:
    terminal = Terminal(columns, lines, run_file.parent)
    shown = whole(terminal.run("-h"))
    for verb in ("init", "check", "simulate", "train", "privacy"):
        assert re.search(rf"^  {verb} +[A-Z].*\.$", shown, re.MULTILINE), verb
    assert "Example: adp2sgd train" in whole(terminal.run("train", "-h"))
    shown = whole(terminal.run("topology", "random-regular"))
    assert re.search(r"^rho_bar +\d", shown, re.MULTILINE)
    shown = whole(terminal.run("check", "run.toml"))
    assert re.search(rf"^{SITES[0]} +\d+ +3 +[\d.]+ +\d+$", shown, re.MULTILINE)
    assert "bytes per exchange" in shown
    shown = terminal.run("simulate", "--set", "learnes=3")
    assert terminal.code == 2
    assert '(did you mean "learners"?)' in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("engine", "columns", "lines"), [("simulate", 80, 24), ("simulate", 200, 50), ("train", 80, 24)]
)
def test_a_run_shows_every_learner_with_its_budget_and_the_time_left(
    engine: str, columns: int, lines: int, run_file: Path
) -> None:
    """Some seconds of a run, long enough for every learner's ε to be on the screen, and its result."""

    def complete(frame: list[str]) -> bool:
        rows = [rf"^{name} +training .* \d\.\d\d of \d\.\d\d$" for name in SITES]
        bar = r"━.* \d+% · about \d+ (s|min) left"
        return all(re.search(row, "\n".join(frame), re.MULTILINE) for row in [*rows, bar])

    terminal = Terminal(columns, lines, run_file.parent)
    pace = ("epochs=20", "speeds.pad=true", "speeds.step_s=0.05") if engine == "train" else ("epochs=60",)
    shown = whole(terminal.run(engine, "run.toml", *(part for each in pace for part in ("--set", each))))
    assert terminal.code == 0, shown
    assert any(map(complete, terminal.frames)), "\n".join(terminal.frames[-3])
    assert any("table/logistic adpsgd, 3 learners" in frame[0] for frame in terminal.frames)
    assert "preparing data, model and checks" not in shown
    for name in SITES:
        assert re.search(rf"^{name} +[\d,]+ .* \d\.\d\d of \d\.\d\d$", shown, re.MULTILINE), shown
    assert "guarantee: ε = 3 at δ = 0.0001 per record" in " ".join(shown.split())
