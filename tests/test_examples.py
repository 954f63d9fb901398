"""Every example runs as it is written, is short, and is linked from the documentation."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

EXAMPLES = ROOT / "examples"
SHORT = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "repeat_visits.py")
SAYS = {  # what an example prints at its end, and the least that its figures must be
    "image_and_table": (r"'accuracy': ([\d.]+)", 0.7),
    "image_folder": (r"accuracy ([\d.]+)%", 80),
    "multi_label": (r"'auc': ([\d.]+)", 0.9),
    "notebook": (r"AUC ([\d.]+)", 0.9),
    "regression": (r"'r2': ([\d.]+)", 0.7),
    "survival": (r"'concordance': ([\d.]+)", 0.7),
    "transformer": (r"accuracy ([\d.]+)%", 90),
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    pattern, least = SAYS[name]
    found = re.search(pattern, capsys.readouterr().out)
    assert found
    assert float(found[1]) >= least


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory as Linux tells it")
def test_a_data_set_of_three_times_the_memory_limit_is_learned_below_the_limit(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "larger_than_memory.py")], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) MiB of records, limit (\d+) MiB, peak (\d+) MiB: .*'accuracy': 1.0", done.stdout)
    assert found, done.stdout
    records, limit, peak = map(int, found.groups())
    assert records >= 3 * limit - 4
    assert peak < limit


@pytest.mark.integration
def test_a_table_goes_from_init_to_predict(tmp_path: Path) -> None:
    """The commands of a new user, as processes, with the training table deleted before the predictions."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "table.py")], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "guarantee: ε = 3 at δ = 0.0001 per record" in done.stdout
    rows = (tmp_path / "predicted.csv").read_text(encoding="utf-8").splitlines()[1:]
    truth = (tmp_path / "new.csv").read_text(encoding="utf-8").splitlines()[1:]
    right = [row.split(",")[1] == record.split(",")[-1] for row, record in zip(rows, truth, strict=True)]
    assert sum(right) / len(right) > 0.75
    accuracy = re.search(r"accuracy +([\d.]+)$", done.stdout, re.MULTILINE)
    assert accuracy
    assert float(accuracy[1]) == pytest.approx(sum(right) / len(right), abs=1e-3)


def test_examples_are_short_and_linked() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    for path in SHORT:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 40, path.name
        assert f"examples/{path.name}" in pages, path.name
    assert {path.stem for path in SHORT} == {*SAYS, "larger_than_memory", "own_task", "table"}


def test_the_python_of_the_page_about_data_runs() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    [block] = [each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "simulate(" in each]
    known: dict[str, object] = {}
    exec(compile(block, "data.md", "exec"), known)
    assert known["run"].metrics["accuracy"] > 0.5  # type: ignore[attr-defined]
