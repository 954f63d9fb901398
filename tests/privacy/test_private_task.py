"""A user's own task in private mode: what is refused, what errors tell, and whose random numbers its layers draw."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adp2sgd.config import Privacy
from adp2sgd.data.records import Records
from adp2sgd.engine import simulate, train
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.validate import validate
from adp2sgd.errors import Adp2sgdError, ConfigError, DataError, PrivacyError, RunError
from adp2sgd.gradient import choose
from adp2sgd.gradient.clipper import Clipped
from private_run import PRIVATE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "adp2sgd_test_tasks:batchnorm"}, "BatchNorm"),
        ({"task": "adp2sgd_test_tasks:coupled_loss"}, "record"),
        ({"task": "adp2sgd_test_tasks:fitted"}, "standardization"),
        ({"task": "adp2sgd_test_tasks:standardized_batches"}, "prepare mixes"),
        ({"task": "adp2sgd_test_tasks:no_empty_batches"}, "prepare fails on 0"),
        ({"task": "adp2sgd_test_tasks:mixup"}, "augment mixes"),
        ({"privacy": replace(PRIVATE.privacy, delta=1 / 200)}, "delta"),
        ({"batch_size": 300}, "batch_size = 300"),
        ({"privacy": replace(PRIVATE.privacy, epsilon=1e-9)}, "epsilon"),
    ],
)
def test_what_would_void_the_guarantee_is_refused_in_one_line(
    changes: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tasks(tmp_path, monkeypatch)
    if "task" in changes:
        changes = {**changes, "options": {}}
    with pytest.raises((PrivacyError, Adp2sgdError), match=words) as caught:
        simulate(PRIVATE.replace(**changes))
    assert "\n" not in str(caught.value)


OWN_TASKS = """
import os
import torch
from torch import nn
import adp2sgd
from adp2sgd.task import cross_entropy

stream = torch.Generator().manual_seed(0)
DATA = adp2sgd.Records(torch.randn(800, 6, generator=stream), torch.randint(2, (800,), generator=stream))

def batchnorm() -> adp2sgd.Task:
    return adp2sgd.Task(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), train=DATA, test=DATA)

def coupled_loss() -> adp2sgd.Task:
    loss = lambda outputs, targets: cross_entropy(outputs - outputs.mean(0), targets)
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, loss=loss)

def standardized_batches() -> adp2sgd.Task:
    prepare = lambda x: x - x.mean(0)
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, prepare=prepare)

def no_empty_batches() -> adp2sgd.Task:
    prepare = lambda x: x - 0 * x[0, 0]
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, prepare=prepare)

class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 2)

    def forward(self, x):
        real = self.drop.p > 0 and len(x) > 5  # not of the checks, nor more than the synthetic records of the clipper
        if self.training and real and "ADP2SGD_TEST_DRAWN" in os.environ:
            with open(os.environ["ADP2SGD_TEST_DRAWN"], "a") as file:
                print(os.getpid(), torch.initial_seed(), file=file)
        return self.head(self.drop(x))

def dropout() -> adp2sgd.Task:
    return adp2sgd.Task(model=Dropping, train=DATA, test=DATA)

class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, x):
        frames = x.view(len(x), 3, 2).transpose(0, 1).reshape(3 * len(x), 2)
        return self.head(torch.relu(self.inner(frames)).view(3, len(x), 16).mean(0))

def time_first() -> adp2sgd.Task:
    return adp2sgd.Task(model=TimeFirst, train=DATA, test=DATA)

def wrong_label() -> adp2sgd.Task:
    labels = DATA.targets.clone()
    labels[::9] = 77
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=adp2sgd.Records(DATA.inputs, labels), test=DATA)

def refuses() -> adp2sgd.Task:
    from adp2sgd.errors import DataError
    def prepare(x):
        if len(x) and x.max() > 1e4:
            raise DataError(f"{x.max()} is out of range")
        return x
    inputs = DATA.inputs.clone()
    inputs[::9] = 98765.0
    train = adp2sgd.Records(inputs, DATA.targets)
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=train, test=DATA, prepare=prepare)

class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(16)])

def in_parts() -> adp2sgd.Task:
    return adp2sgd.Task(model=InParts, train=DATA, test=DATA)

def half() -> adp2sgd.Task:
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2).bfloat16(), train=DATA, test=DATA, prepare=torch.Tensor.bfloat16)

def mixup() -> adp2sgd.Task:
    augment = lambda x, generator: x + 0.1 * x[torch.randperm(len(x), generator=generator)]
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, augment=augment)

def fitted() -> adp2sgd.Task:
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, fitted="standardization of x")
"""


def own_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "adp2sgd_test_tasks.py").write_text(OWN_TASKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "adp2sgd_test_tasks", raising=False)


def layers_seeds(folder: Path) -> dict[str, list[str]]:
    """process → what torch's generator was seeded with at each of its steps, in order."""
    found: dict[str, list[str]] = {}
    for line in (folder / "drawn").read_text().splitlines():
        process, seed = line.split()
        found.setdefault(process, []).append(seed)
    return found


def test_what_is_refused_does_not_depend_on_a_record() -> None:
    setup, seen = prepare(PRIVATE), list[Tensor]()

    def watching(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    given = setup.task.train
    marked = replace(setup.task, prepare=watching, train=Records(torch.full_like(given.inputs, 777.0), given.targets))
    validate(setup.plan, marked, setup.compute.model, [len(rows) for rows in setup.shards])
    assert len(seen) > 1
    assert not any(bool((rows == 777.0).any()) for rows in seen)


def test_learners_share_no_draws_of_their_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked from one process, they once had the same dropout at each step, and a neighbour knew it."""
    own_tasks(tmp_path, monkeypatch)
    monkeypatch.setenv("ADP2SGD_TEST_DRAWN", str(tmp_path / "drawn"))
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:dropout", options={}, learners=2, seed=None, epochs=0.5)
    train(settings, tmp_path / "run")
    drawn = layers_seeds(tmp_path)
    seeds = [seed for process in drawn.values() for seed in process]
    assert len(drawn) == 2
    assert len(seeds) > 8
    assert len(set(seeds)) == len(seeds)


def test_draws_of_layers_repeat_in_a_seeded_run_and_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:dropout", options={}, learners=2, epochs=0.5)
    runs = []
    for number, seed in enumerate((3, 3, None)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.setenv("ADP2SGD_TEST_DRAWN", str(tmp_path / str(number) / "drawn"))
        simulate(settings.replace(seed=seed))
        [drawn] = layers_seeds(tmp_path / str(number)).values()
        assert len(set(drawn)) == len(drawn) > 8  # learners of one process, and steps
        runs.append(drawn)
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


def test_a_neighbours_weights_do_not_choose_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may let no gradient through the layer that the rules would get wrong."""
    own_tasks(tmp_path, monkeypatch)
    made = prepare(PRIVATE.replace(task="adp2sgd_test_tasks:time_first", options={}))
    (tmp_path / "learner").mkdir()
    with pytest.warns(UserWarning, match="Functional"):
        learner = made.learner(0, tmp_path / "learner")
    mine, theirs = learner.snapshot(), learner.snapshot()
    made.compute.model.named_views(theirs)["inner.bias"].fill_(-1e6)
    learner.mix(mine, 2 * theirs - mine)
    learner.begin()
    learner.update(learner.gradient())
    assert isinstance(made.compute.clipper, choose.Automatic)
    assert made.compute.clipper.chosen is made.compute.clipper.functional
    assert learner.budget is not None
    learner.budget.close()


def test_what_fails_in_a_step_is_told_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:wrong_label", options={})
    with pytest.raises(RunError, match="withheld") as caught:
        simulate(settings)
    assert "77" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(ConfigError, match="label 77, but the model has 2 outputs"):
        simulate(settings.replace(privacy=Privacy()))


def test_errors_of_our_own_kind_are_withheld_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's own code may raise them, with values of records."""
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:refuses", options={})
    words = r"step failed in the task's prepare \(DataError at adp2sgd_test_tasks\.py, line \d+\); .* withheld"
    with pytest.raises(RunError, match=words) as caught:
        simulate(settings)
    assert "98765" not in str(caught.value)
    with pytest.raises(DataError, match="98765"):
        simulate(settings.replace(privacy=Privacy()))


def test_no_warning_tells_how_many_records_were_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a model that takes larger batches in parts comes before the first batch, and names no size."""
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:in_parts", options={}, epochs=1.0)
    made = prepare(settings)
    with pytest.warns(UserWarning, match="Functional clipper: the model takes another course"):
        chosen = made.compute.clipper
    assert isinstance(chosen, choose.Automatic)
    assert chosen.chosen is chosen.functional
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1, 17, 33):
            chosen.clipped_sum(torch.zeros(size, 6), torch.zeros(size, dtype=torch.long), 1.0)


def test_parameters_in_half_precision_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:half", options={})
    with pytest.raises(PrivacyError, match=r"weight is torch\.bfloat16.*keep parameters in float32"):
        simulate(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gradients_are_taken_in_training_mode_also_after_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    take = choose.Automatic.clipped_sum

    def watch(self: choose.Automatic, *arguments: Any) -> Clipped:
        modes.append(self.model.module.training)
        return take(self, *arguments)

    monkeypatch.setattr(choose.Automatic, "clipped_sum", watch)
    run = simulate(PRIVATE.replace(evaluate_every=0.2, epochs=1))
    assert len(run.curve) > 3
    assert len(modes) == run.global_steps
    assert all(modes)
