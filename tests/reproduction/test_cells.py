"""Cells are measured once, survive an interruption, and have names of their own."""

from __future__ import annotations

import os
import signal
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adp2sgd.engine import simulate
from adp2sgd.engine.simulation.simulate import Simulation
from adp2sgd.errors import ConfigError, InterruptedRunError, RunError
from made_records import QUICK, a_cell, times_called
from reproduction import training
from reproduction.cells import Cell, Choice, measured, run_all
from reproduction.studies import STUDIES


def test_a_cell_is_measured_once_and_written_whole(tmp_path: Path) -> None:
    cells = [a_cell("a"), a_cell("b")]
    first = run_all(cells, tmp_path, say=lambda _: None)
    assert (tmp_path / "count").read_text() == "xx"
    assert run_all(cells, tmp_path, say=lambda _: None) == first
    assert (tmp_path / "count").read_text() == "xx"
    assert first[0]["cell"] == {"name": "a", "sigma": 2.0}
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == ["a-sigma2.json", "b-sigma2.json"]
    (tmp_path / "study" / "a-sigma2.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a-sigma2\.json cannot be read"):
        run_all(cells, tmp_path)


def test_cells_run_in_several_processes(tmp_path: Path) -> None:
    choice = replace(QUICK, epochs=1.0, noise=(1.0,))
    cells = STUDIES["table1"].cells(choice)
    said: list[str] = []
    records = run_all(cells, tmp_path, jobs=2, quiet=True, say=said.append)
    assert [record["cell"]["algorithm"] for record in records] == ["sync", "adpsgd"]
    assert len(said) == 2


def interrupted_measure(scratch: Path, quiet: bool) -> dict[str, Any]:
    raise InterruptedRunError("go on with --resume")


def test_what_an_interruption_says_is_true(tmp_path: Path) -> None:
    for resumes, told in ((True, "nothing is lost"), (False, "measures this one anew")):
        cell = Cell(study="study", identity={"name": "a"}, measure=interrupted_measure, resumes=resumes)
        with pytest.raises(InterruptedRunError, match=told):
            measured(cell, tmp_path)
    real, simulated = (STUDIES["case2"].cells(replace(QUICK, processes=on))[0] for on in (True, False))
    assert (real.resumes, simulated.resumes) == (False, True)


def test_two_cells_have_two_names() -> None:
    numbers = [1234567, 1234568, 10**6, 1e-7, 0.1234567, 0.1234568]
    names = [Cell(study="s", identity={"x": n}, measure=times_called).name for n in numbers]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set(string.ascii_letters + string.digits + ".-") for name in names)


def test_a_process_that_dies_or_fails_ends_the_study_with_one_line(tmp_path: Path) -> None:
    for measure, error, words in [(is_killed, RunError, "died"), (is_wrong, ConfigError, "no such thing")]:
        cells = [replace(a_cell("a"), measure=measure), replace(a_cell("b"), measure=measure)]
        with pytest.raises(error, match=words):
            run_all(cells, tmp_path, jobs=2, say=lambda _: None)


def is_killed(scratch: Path, quiet: bool) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def is_wrong(scratch: Path, quiet: bool) -> dict[str, Any]:
    raise ConfigError("there is no such thing; use another")


def test_two_processes_never_measure_the_same_cell(tmp_path: Path) -> None:
    def again(scratch: Path, quiet: bool) -> dict[str, Any]:
        with pytest.raises(RunError, match="another process"):
            measured(a_cell("a"), tmp_path)
        return {"tried": True}

    assert measured(replace(a_cell("a"), measure=again), tmp_path)["tried"]


@pytest.mark.parametrize(
    "change", ["models", "noise", "algorithms", "seeds", "epochs", "momentum", "quick", "private", "processes"]
)
def test_what_a_user_can_ask_for_is_part_of_the_identity(change: str) -> None:
    base = Choice(models=("resnet18",), noise=(1.0,), algorithms=("sync",), epochs=10.0, device="cpu")
    others: dict[str, Any] = {"models": ("vgg19",), "noise": (2.0,), "algorithms": ("adpsgd",), "seeds": (1,)}
    other: Any = (others | {"epochs": 20.0, "momentum": 0.5}).get(change, True)
    cells = [STUDIES["table1"].cells(choice)[0] for choice in (base, replace(base, **{change: other}))]
    assert cells[0].name != cells[1].name


def test_an_interrupted_cell_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = replace(QUICK, epochs=10.0)
    whole = measured(training.cell("table1", "resnet18", "adpsgd", 1.0, 0, choice), tmp_path / "whole")
    starts: list[int] = []
    original = Simulation._keep_schedule

    def breaks(self: Simulation, before: int) -> None:
        starts.append(before)
        original(self, before)
        if len(starts) == 300:
            raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "_keep_schedule", breaks)
    cell = training.cell("table1", "resnet18", "adpsgd", 1.0, 0, choice)
    with pytest.raises(KeyboardInterrupt):
        measured(cell, tmp_path / "broken")
    assert not cell.path(tmp_path / "broken").exists()
    again = measured(cell, tmp_path / "broken")
    assert starts[300] > 0, "the second call began anew"
    assert again["curve"] == whole["curve"]
    assert again["single_learners"] == whole["single_learners"]
    assert not list((tmp_path / "broken" / ".running").rglob("*.safetensors"))


def test_a_cell_whose_recipe_has_changed_since_begins_anew(tmp_path: Path) -> None:
    cell = training.cell("table1", "resnet18", "sync", 1.0, 0, replace(QUICK, epochs=1.0))
    settings = cell.measure.args[0]  # type: ignore[attr-defined]
    before = settings.replace(optimizer=settings.optimizer.replace(lr=0.1))
    other = simulate(before, tmp_path / "r" / ".running" / "table1" / cell.name / "run")  # but no record was written
    assert measured(cell, tmp_path / "r")["loss"] == measured(cell, tmp_path / "whole")["loss"] != other.loss
