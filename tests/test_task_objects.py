"""A task is an object: made in a script, a notebook or on standard input, and given to either engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import adp2sgd
from adp2sgd import Config, ConfigError, DataError, Guarantee, Optimizer, Privacy, Records, Task
from adp2sgd.data.indexed import DatasetRecords, as_records
from adp2sgd.losses import LOSSES
from conftest import ROOT

SECRET = 7_654_321  # a value that no message may hold

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import Dataset
import adp2sgd

class Points(Dataset):
    def __init__(self, count, seed):
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], int(self.x[i].norm() < 1.2)

class Net(nn.Module):  # of this script alone: no module holds it
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    def forward(self, x):
        return self.layers(x)

task = adp2sgd.Task(model=Net, train=Points(400, 0), test=Points(100, 1), name="disc")
config = adp2sgd.Config(learners=2, epochs=10, batch_size=8, seed=0, optimizer=adp2sgd.Optimizer(lr=0.3))
run = adp2sgd.ENGINE(config, "run", task=task)
print(run.task, run.metrics["accuracy"] > 0.7, len(run.learners))
"""
CELLS = """
import code
shell = code.InteractiveInterpreter({"__name__": "__main__"})  # as a notebook: cells, and no file
for cell in open("cells.py").read().split("\\n\\n"):
    shell.runcode(compile(cell, "<cell>", "exec"))
"""


@pytest.mark.parametrize("engine", ["simulate", "train"])
@pytest.mark.parametrize("how", ["script", "standard input", "notebook"])
def test_a_task_of_a_program_without_a_main_guard(how: str, engine: str, tmp_path: Path) -> None:
    text = SCRIPT.replace("ENGINE", engine)
    (tmp_path / "program.py").write_text(text)
    (tmp_path / "cells.py").write_text(text)
    (tmp_path / "notebook.py").write_text(CELLS)
    command = {"script": ["program.py"], "standard input": ["-"], "notebook": ["notebook.py"]}[how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, input=text if command == ["-"] else "",
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "<disc> True 2\n"), done.stderr
    assert 'task = "<disc>"' in (tmp_path / "run/config.toml").read_text()


class Items(Dataset[Any]):
    """Items as given."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


X = torch.arange(12.0).view(6, 2)
Y = torch.tensor([0, 1, 0, 1, 0, 1])


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})


@pytest.mark.parametrize(
    "data",
    [
        lambda: (X, Y),
        lambda: (X.numpy(), Y.numpy()),
        lambda: TensorDataset(X, Y),
        lambda: Records(X, Y),
        lambda: Items(*zip(X, Y, strict=True)),
        lambda: Items(*({"x": x.numpy(), "label": int(y)} for x, y in zip(X, Y, strict=True))),
        lambda: [(x.tolist(), int(y)) for x, y in zip(X, Y, strict=True)],
        hugging_face,
    ],
)
def test_every_kind_of_data_gives_the_same_records(data: Any) -> None:
    records = as_records(data())
    inputs, targets = records.read(torch.tensor([4, 1]))
    assert torch.equal(inputs, X[[4, 1]])
    assert torch.equal(targets, Y[[4, 1]])
    assert targets.dtype == torch.int64
    part = records.take(torch.tensor([5, 2, 0]))
    assert len(part) == 3
    assert torch.equal(part.read(torch.tensor([0, 2]))[0], X[[5, 0]])
    inputs, targets = records.blank()
    assert (inputs.shape, targets.shape, inputs.dtype) == ((0, 2), (0,), torch.float32)
    assert "11" not in repr(records)


def test_inputs_may_be_dictionaries_and_tuples() -> None:
    tokens, mask = torch.arange(6).view(3, 2), torch.ones(3, 2, dtype=torch.bool)
    for data in (
        ({"tokens": tokens, "mask": mask}, Y[:3]),
        Items(*({"tokens": t, "mask": m, "target": int(y)} for t, m, y in zip(tokens, mask, Y[:3], strict=True))),
    ):
        inputs, _ = as_records(data).read(torch.tensor([2, 0]))
        assert torch.equal(inputs["tokens"], tokens[[2, 0]])
        assert inputs["mask"].dtype == torch.bool
    for data in (TensorDataset(tokens, mask, Y[:3]), Items(*zip(tokens, mask, Y[:3], strict=True))):
        inputs, _ = as_records(data).read(torch.tensor([1]))
        assert isinstance(inputs, tuple)
        assert torch.equal(inputs[0], tokens[[1]])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Endless:
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), SECRET


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Stream(), "cannot be read by index|has no length"),
        (Endless(), "Endless has no length"),
        (Items(), "holds no record"),
        (torch.full((3, 2), SECRET), "type Tensor cannot be read by index"),
        ({"x": SECRET}, "type dict cannot be read by index"),
        (SECRET, "type int"),
        (Items(SECRET, SECRET), r"record 0 of the dataset is a int; give \(inputs, target\)"),
        (Items({"x": SECRET, "diagnosis": SECRET}), "dictionary without target or label or labels; name its target"),
        (Items((str(SECRET), 1)), "input of record 0 .* is a str that is no tensor"),
        (Items((torch.zeros(2), {"a": SECRET})), "target of record 0 .* is a dict"),
        ((torch.full((3, 2), SECRET), torch.zeros(4)), "3 inputs but 4 targets"),
        (([str(SECRET)], torch.zeros(1)), "is a list that is no tensor"),
    ],
)
def test_a_wrong_object_is_one_line_that_prints_no_data(wrong: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        Task(model=lambda: nn.Linear(2, 2), train=wrong, test=(X, Y))
    told = str(caught.value)
    assert told.startswith("Task.train: ")
    assert "\n" not in told
    assert str(SECRET) not in told


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"loss": "hinge"}, '"hinge" is unknown; use one of: cross_entropy, mse'),
        ({"loss": 3}, "Task.loss is a int"),
        ({"metrics": "recall"}, '"recall" is unknown'),
        ({"metrics": [3]}, "is a int; give a name or a function"),
        ({"monitor": "auc"}, '"auc" is none of its metrics; use one of: accuracy, loss'),
        ({"prepare": torch.full((2,), SECRET)}, "Task.prepare is a Tensor"),
        ({"model": nn.Linear(2, 2)}, "function that makes the model"),
    ],
)
def test_wrong_parts_of_a_task_are_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Task(**{"model": lambda: nn.Linear(2, 2), "train": (X, Y), "test": (X, Y), **wrong})
    assert "\n" not in str(caught.value)
    assert str(SECRET) not in str(caught.value)


def test_records_that_differ_in_shape_are_named_without_values() -> None:
    ragged = Items((torch.zeros(2), 0), (torch.full((3,), float(SECRET)), 1))
    with pytest.raises(DataError, match=r"records 0, 1 of the dataset differ in shape.*pad or crop") as caught:
        as_records(ragged).read(torch.arange(2))
    assert str(SECRET) not in str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_name_are_torchs(name: str) -> None:
    stream = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 3, generator=stream)
    if name == "cross_entropy":
        targets: torch.Tensor = torch.tensor([0, 1, 2, 1, 0])
        expected = nn.functional.cross_entropy(outputs, targets, reduction="none")
    else:
        targets = torch.rand(5, 3, generator=stream)
        modules = {
            "mse": nn.MSELoss, "l1": nn.L1Loss, "huber": nn.HuberLoss, "smooth_l1": nn.SmoothL1Loss,
            "bce_with_logits": nn.BCEWithLogitsLoss,
        }  # fmt: skip
        expected = modules[name](reduction="none")(outputs, targets).mean(dim=1)
        one = LOSSES[name](outputs[:, :1], targets[:, 0])  # targets without the axis of the one output
        assert torch.equal(one, modules[name](reduction="none")(outputs[:, 0], targets[:, 0]))
        with pytest.raises(ConfigError, match=r"targets of shape \(5,\) do not fit outputs of shape \(5, 3\)"):
            LOSSES[name](outputs, targets[:, 0])
    assert torch.equal(LOSSES[name](outputs, targets), expected)


def test_a_guarantee_is_one_type_and_survives_its_file(tmp_path: Path) -> None:
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 2, generator=stream)
    task = Task(model=lambda: nn.Linear(2, 2), train=(inputs, (inputs[:, 0] > 0).long()), test=(X, Y))
    config = Config(learners=2, epochs=1, batch_size=10, seed=0, optimizer=Optimizer(lr=0.1))
    private = config.replace(privacy=Privacy(mode="private", epsilon=3.0, delta=1e-3))
    run = adp2sgd.simulate(private, tmp_path / "run", task=task)
    assert isinstance(run.guarantee, Guarantee)
    assert run.guarantee.epsilon <= 3
    assert "valid where no record lies at two learners" in str(run.guarantee)
    assert adp2sgd.read_result(tmp_path / "run") == run
    assert adp2sgd.simulate(config, task=task).guarantee is None


def test_the_run_of_an_object_is_resumed_with_the_object(tmp_path: Path) -> None:
    task = Task(model=lambda: nn.Linear(2, 2), train=(X, Y), test=(X, Y))

    def stop(status: adp2sgd.RunStatus) -> None:
        if status.global_steps >= 6:
            raise KeyboardInterrupt

    config = Config(learners=1, epochs=4, batch_size=2, seed=0, checkpoint_every=1)
    whole = adp2sgd.simulate(config, task=task)
    with pytest.raises(KeyboardInterrupt):
        adp2sgd.simulate(config, tmp_path / "run", task=task, on_status=stop)
    with pytest.raises(ConfigError, match='task = "<own>" was a Task object'):
        adp2sgd.simulate(adp2sgd.load_config(tmp_path / "run/config.toml"), tmp_path / "run", resume=True)
    again = adp2sgd.simulate(config, tmp_path / "run", task=task, resume=True)
    assert again.metrics == whole.metrics
    with pytest.raises(ConfigError, match=r"task is a Linear; give an adp2sgd\.Task"):
        adp2sgd.simulate(config, task=nn.Linear(2, 2))  # type: ignore[arg-type]


def test_public_privacy_functions_agree() -> None:
    noise = adp2sgd.noise_for(epsilon=3, delta=1e-5, sample_rate=0.02, steps=500)
    assert adp2sgd.epsilon(noise_multiplier=noise, sample_rate=0.02, steps=500, delta=1e-5) == pytest.approx(
        3, rel=0.01
    )
    assert isinstance(as_records(Items((np.zeros(2), 1))), DatasetRecords)
