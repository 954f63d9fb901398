"""Errors of the user's own code show the user's file and line, and none of ours; --debug shows every traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adp2sgd
from adp2sgd import Config, Task
from adp2sgd.errors import reason
from conftest import ROOT

SECRET = "bed 7654321"
OWN = f'''
import torch
from torch import nn
from adp2sgd import Task

def helper(outputs):
    raise KeyError("{SECRET}")  # no error that a fit could be judged by

def loss(outputs, targets):
    if (targets == 5).any():
        helper(outputs)
    return outputs.sum(dim=1)

def late() -> Task:
    data = torch.randn(50, 3), torch.full((50,), 5.0)
    return Task(model=lambda: nn.Linear(3, 1), train=data, test=data, loss=loss)

def unmade() -> Task:
    raise FileNotFoundError("{SECRET}")
'''
PRIVATE = ["--set", "privacy.mode=private", "--set", "privacy.noise_multiplier=1", "--set", "privacy.delta=1e-3"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def command(place: Path, *line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    settings = ["--set", "learners=1", "--set", "batch_size=8", "--set", "epochs=2", "--quiet", "--out", "run"]
    return subprocess.run(
        [sys.executable, "-P", "-m", "adp2sgd", *line, *settings], cwd=place, env=known, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("own:late", ['own.py", line 11, in loss', 'own.py", line 7, in helper', f"KeyError: '{SECRET}'"]),
        ("own:unmade", ['own.py", line 19, in unmade', f"FileNotFoundError: {SECRET}"]),
    ],
)
def test_an_error_of_the_users_code_shows_the_users_lines_alone(task: str, words: list[str], place: Path) -> None:
    done = command(place, "simulate", "--set", f"task={task}")
    assert done.returncode == 1
    for each in [*words, "adp2sgd: error in your code: "]:
        assert each in done.stderr
    assert "src/adp2sgd" not in done.stderr
    assert "site-packages" not in done.stderr


def test_debug_shows_the_traceback_of_any_error(place: Path) -> None:
    plain = command(place, "simulate", "--set", "task=digits/none")
    assert (plain.returncode, plain.stderr.count("\n")) == (2, 1)
    for done in (
        command(place, "--debug", "simulate", "--set", "task=digits/none"),
        command(place, "simulate", "--set", "task=digits/none", ADP2SGD_DEBUG="1"),
    ):
        assert done.returncode == 2
        assert "Traceback (most recent call last)" in done.stderr
        assert "src/adp2sgd" in done.stderr
        assert plain.stderr in done.stderr  # the line itself stays
    whole = command(place, "--debug", "simulate", "--set", "task=own:late")
    assert "src/adp2sgd" in whole.stderr
    assert "in helper" in whole.stderr


@pytest.mark.parametrize("task", ["own:late", "own:unmade"])
@pytest.mark.parametrize("engine", ["simulate", "train"])
def test_private_mode_withholds_texts_in_debug_too(task: str, engine: str, place: Path) -> None:
    done = command(place, "--debug", engine, "--set", f"task={task}", *PRIVATE, ADP2SGD_DEBUG="1")
    assert done.returncode in (1, 2)
    assert SECRET not in done.stderr + done.stdout
    assert "Traceback" in done.stderr
    assert "own.py, line" in done.stderr


def failing(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(outputs) > 2:
        raise KeyError(SECRET)
    return outputs.sum(dim=1)


def in_library(**environment: Any) -> list[str]:
    """The files of the traceback, between the call and the error."""
    data = torch.randn(50, 3), torch.zeros(50)
    task = Task(model=lambda: nn.Linear(3, 1), train=data, test=data, loss=failing)
    with pytest.raises(KeyError) as caught:
        adp2sgd.simulate(Config(learners=1, epochs=1, batch_size=8, seed=0), task=task)
    return [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_in_a_library_call_the_traceback_leads_from_the_call_to_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADP2SGD_DEBUG", raising=False)
    assert in_library() == ["test_errors.py", "errors.py", "test_errors.py"]
    monkeypatch.setenv("ADP2SGD_DEBUG", "1")
    assert "learner.py" in in_library()


def test_a_reason_names_the_users_line() -> None:
    from adp2sgd.engine.evaluate import evaluate
    from adp2sgd.flat import FlatModel

    data = torch.randn(50, 3), torch.zeros(50)
    task = Task(model=lambda: nn.Linear(3, 1), train=data, test=data, loss=failing)
    model = FlatModel(task.model())
    with pytest.raises(KeyError) as caught:
        evaluate(model, task, model.weights)
    assert "test_errors.py, line " in reason(caught.value, private=False)
    assert SECRET in reason(caught.value, private=False)
    assert SECRET not in reason(caught.value, private=True)
