"""A file can name code, but only its caller can have it imported."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adp2sgd import load_model, loads_config
from adp2sgd.config import Config, FromFile, naming
from adp2sgd.engine import simulate
from adp2sgd.engine.status import RunStatus
from adp2sgd.errors import ConfigError
from adp2sgd.run_folder import Folder
from adp2sgd.task import Task
from adp2sgd.tasks import resolve
from command import Command
from conftest import ROOT, adp2sgd

MARK = "was imported"
CODE = f"""
from pathlib import Path
from adp2sgd import Task
from adp2sgd.tasks import resolve

Path("{MARK}").touch()

def blobs(*, records: int = 200) -> Task:
    return resolve("blobs", {{"records": records}})

def undeclared(**options):
    Path("was called").touch()

class Maker:
    def __new__(cls, **options) -> Task:
        Path("was called").touch()
"""
SETTINGS = {"task": "own_code:blobs", "learners": 2, "epochs": 1.0, "batch_size": 20, "seed": 0, "device": "cpu"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a module of the user's own, a configuration that names it, and an interrupted run that does."""
    (tmp_path / "own_code.py").write_text(CODE)
    (tmp_path / "run.toml").write_text(Config(**SETTINGS).to_toml())
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.toml").write_text(Config(**SETTINGS).to_toml())
    (tmp_path / "foreign/model").mkdir()
    (tmp_path / "foreign/model/weights.safetensors").write_bytes(b"")
    (tmp_path / "foreign/model/model.json").write_text('{"encoder": null}')
    (tmp_path / "foreign/simulation.safetensors").write_bytes(b"")
    (tmp_path / "foreign/session.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "simulate run.toml",
        "simulate run.toml --set learners=3",
        "train run.toml",
        "explain run.toml",
        "train --resume foreign",
        "simulate run.toml --trust own_code:undeclared",
        "simulate run.toml --trust os:system",
    ],
)
def test_code_that_a_file_names_is_not_imported(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    code, _, complaint = Command(monkeypatch, capsys)(*line.split())
    assert code == 2
    assert len(complaint.strip().splitlines()) == 1
    if "--trust" in line:
        assert 'has task = "own_code:blobs", not' in complaint
    else:
        assert "--trust own_code:blobs" in complaint
        assert str(place / "own_code.py") in complaint
    assert not (place / MARK).exists()


def test_a_runs_folder_is_no_program(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_model` and the functions of the library, with a configuration that was read."""
    monkeypatch.chdir(place)
    for task in ("own_code:blobs", "os:system", "own_code.deeper:blobs"):
        read = loads_config(f'task = "{task}"\n[options]\ncommand = "touch executed"')
        (place / "foreign/config.toml").write_text(read.to_toml())
        for attempt in (
            partial(load_model, "foreign"),
            partial(simulate, Folder.open("foreign").settings),
            partial(simulate, read.replace(learners=3)),
            partial(resolve, read.task, read.options),
        ):
            with pytest.raises(ConfigError, match=f"named by a file .*--trust {task}"):
                attempt()
    assert not (place / MARK).exists()
    assert not (place / "executed").exists()


@pytest.mark.parametrize(
    "task", ["os:system", "own_code:undeclared", "own_code:Maker", "own_code:Path", "subprocess:run", "builtins:exec"]
)
def test_only_functions_that_are_declared_to_make_a_task_are_called(
    task: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the caller names them."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    with pytest.raises(
        ConfigError, match=r"not declared to make a task; name a function written \"def \w+\(…\) -> Task:"
    ):
        resolve(task, {"command": "touch executed"})
    assert not (place / "was called").exists()
    assert not (place / "executed").exists()


def annotated_by_text() -> adp2sgd.Task:  # type: ignore[name-defined]
    return resolve("blobs", {})


def test_a_declaration_may_be_text() -> None:
    assert isinstance(resolve("test_trust:annotated_by_text", {}), Task)


def test_code_that_the_caller_names_is_imported(place: Path) -> None:
    trust = ("--trust", "own_code:blobs")
    explained = adp2sgd("explain", "run.toml", *trust, cwd=place)
    assert explained.returncode == 0, explained.stderr
    named = adp2sgd("simulate", "--set", "task=own_code:blobs", "--set", "epochs=0.1", "--out", "named", cwd=place)
    assert named.returncode == 0, named.stderr  # on the command line the caller names it too
    assert (place / MARK).exists()


def test_an_interrupted_run_goes_on_only_with_the_callers_word(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(status: RunStatus) -> None:
        if status.global_steps == 8:
            raise KeyboardInterrupt

    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    with pytest.raises(KeyboardInterrupt):
        simulate(Config(**{**SETTINGS, "checkpoint_every": 0.1}), place / "here", on_status=stop)
    (place / MARK).unlink()
    refused = adp2sgd("simulate", "--resume", "here", "--quiet", cwd=place)
    assert refused.returncode == 2
    assert "--trust own_code:blobs" in refused.stderr
    assert not (place / MARK).exists()
    done = adp2sgd("simulate", "--resume", "here", "--quiet", "--trust", "own_code:blobs", cwd=place)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_learners_follow_the_decision_of_the_caller(place: Path) -> None:
    """They read the file in processes of their own."""
    done = adp2sgd("train", "run.toml", "--trust", "own_code:blobs", "--out", "here", "--quiet", cwd=place)
    assert done.returncode == 0, done.stderr
    assert (place / "here/result.json").exists()


def test_the_model_of_an_own_task_is_loaded_with_the_task_that_the_caller_names(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    simulate(Config(**{**SETTINGS, "epochs": 0.1}), place / "here")
    first, second = (load_model("here", task) for task in ("own_code:blobs", resolve("own_code:blobs", {})))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ConfigError, match='has task = "own_code:blobs", not "own_code:other"'):
        load_model("here", "own_code:other")
    with pytest.raises(ConfigError, match="is not that of the task"):
        load_model("here", resolve("digits", {}))


def test_every_copy_remembers_that_a_file_named_the_task() -> None:
    read = loads_config('task = "own_code:blobs"')
    copies: list[Config] = [
        read.replace(learners=3),
        dataclasses.replace(read, learners=3),
        read.with_settings(["learners=3"]),
        copy.deepcopy(read),
        pickle.loads(pickle.dumps(read)),
        naming(read, read.task),
    ]
    assert [type(each.task) for each in copies] == [FromFile] * len(copies)
    named: list[Any] = [
        read.replace(task="own_code:blobs"),
        read.with_settings(["task=own_code:blobs"]),
        naming(read, "own_code:blobs"),
    ]
    assert [type(each.task) for each in named] == [str] * len(named)


@pytest.mark.processes
def test_no_file_in_the_working_directory_takes_the_place_of_a_module(place: Path) -> None:
    """Neither for a task of one's own, nor in the process that learners are forked from."""
    for name in ("colorsys", "torch", "json"):
        (place / f"{name}.py").write_text('from pathlib import Path\nPath("hijacked").touch()\nraise SystemExit(9)\n')
    (place / "own_code.py").write_text(f"import colorsys\n{CODE}")
    line = [sys.executable, "-P", "-m", "adp2sgd", "train", "run.toml", "--trust", "own_code:blobs", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (place / MARK).exists()
    assert not (place / "hijacked").exists()
