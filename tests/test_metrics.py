"""Metrics by name are scikit-learn's; any function is one; all are in curve, result, learners and sites."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from torch import Tensor, nn

import adp2sgd
from adp2sgd import Config, ConfigError, Optimizer, Privacy, Records, Task
from adp2sgd.metrics import METRICS, Scores, metrics_of

STREAM = torch.Generator().manual_seed(0)
SCORES3 = torch.randn(40, 3, generator=STREAM)
LABELS3 = torch.randint(0, 3, (40,), generator=STREAM)
SCORES2, LABELS2 = SCORES3[:, :2], LABELS3 % 2
MANY = (torch.randn(40, 4, generator=STREAM) > 0).float()  # several labels per record
NUMBERS, TRUTH = SCORES3[:, :1], SCORES3[:, 0] + 0.3 * SCORES3[:, 1]


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "expected"),
    [
        ("accuracy", SCORES3, LABELS3, reference.accuracy_score(LABELS3, SCORES3.argmax(1))),
        ("balanced_accuracy", SCORES3, LABELS3, reference.balanced_accuracy_score(LABELS3, SCORES3.argmax(1))),
        ("f1", SCORES2, LABELS2, reference.f1_score(LABELS2, SCORES2.argmax(1))),
        ("f1", SCORES3, LABELS3, reference.f1_score(LABELS3, SCORES3.argmax(1), average="macro")),
        ("auc", SCORES2, LABELS2, reference.roc_auc_score(LABELS2, SCORES2.softmax(1)[:, 1])),
        ("auc", SCORES3, LABELS3, reference.roc_auc_score(LABELS3, SCORES3.softmax(1), multi_class="ovr")),
        ("average_precision", SCORES2, LABELS2, reference.average_precision_score(LABELS2, SCORES2.softmax(1)[:, 1])),
        ("mse", NUMBERS, TRUTH, reference.mean_squared_error(TRUTH, NUMBERS[:, 0])),
        ("mae", NUMBERS, TRUTH, reference.mean_absolute_error(TRUTH, NUMBERS[:, 0])),
        ("r2", NUMBERS, TRUTH, reference.r2_score(TRUTH, NUMBERS[:, 0])),
        ("accuracy", SCORES3[:, 0], (LABELS3 > 0).float(), ((SCORES3[:, 0] > 0) == (LABELS3 > 0)).float().mean()),
        ("accuracy", SCORES3.repeat(1, 2)[:, :4], MANY, ((SCORES3.repeat(1, 2)[:, :4] > 0) == MANY).float().mean()),
        ("f1", MANY.roll(1, 0) - 0.5, MANY, reference.f1_score(MANY, MANY.roll(1, 0), average="macro")),
        ("auc", SCORES3.repeat(1, 2)[:, :4], MANY, reference.roc_auc_score(MANY, SCORES3.repeat(1, 2)[:, :4])),
    ],
)
def test_metrics_by_name_are_scikit_learns(name: str, outputs: Tensor, targets: Tensor, expected: float) -> None:
    assert METRICS[name](outputs, targets) == pytest.approx(float(expected), abs=1e-6)
    scores = Scores(None, {name: METRICS[name]})
    for rows in torch.arange(len(targets)).split(7):  # batch by batch it is the same
        scores.add(outputs[rows], targets[rows])
    assert scores.figures()[name] == pytest.approx(float(expected), abs=1e-6)


def test_one_class_alone_has_no_ranking() -> None:
    assert math.isnan(METRICS["auc"](SCORES2, torch.zeros(40, dtype=torch.long)))


def test_names_of_metrics() -> None:
    def brier(outputs: Tensor, targets: Tensor) -> float:
        return 0.0

    assert list(metrics_of(["auc", brier])) == ["auc", "brier"]
    assert list(metrics_of({"mine": brier, "area": "auc"})) == ["mine", "area"]
    with pytest.raises(ConfigError, match="two metrics of one name"):
        metrics_of([brier, brier])


def worst(outputs: Tensor, targets: Tensor) -> float:
    """A metric of one's own, which needs all records at once."""
    return float(nn.functional.cross_entropy(outputs, targets, reduction="none").max())


def task(**parts: Any) -> Task:
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    targets, sites = (inputs[:, 0] > 0).long(), torch.arange(200) % 2
    records = Records(inputs, targets, sites, ("north", "south"))
    given = {"metrics": ["auc", "accuracy", worst], **parts}
    return Task(model=lambda: nn.Linear(3, 2), train=records, test=records.take(torch.arange(80)), **given)


CONFIG = Config(learners=2, epochs=2, batch_size=10, seed=0, optimizer=Optimizer(lr=0.3))
NAMES = ["loss", "auc", "accuracy", "worst"]


@pytest.mark.parametrize("engine", ["simulate", "train"])
def test_all_metrics_are_in_curve_result_learners_and_sites(engine: str, tmp_path: Path) -> None:
    run = getattr(adp2sgd, engine)(CONFIG, tmp_path / "run", task=task())
    assert list(run.metrics) == NAMES
    assert run.monitor == "auc"
    assert all(list(point.metrics) == NAMES for point in run.curve)
    assert all(list(each.metrics) == NAMES for each in run.learners)
    assert run.metrics["auc"] > 0.9
    assert run.metrics["worst"] > run.loss
    for site in ("north", "south"):
        assert set(run.sites[site]) == {*NAMES, "records"}
    kept = json.loads((tmp_path / "run/result.json").read_text())
    assert kept["metrics"] == pytest.approx(run.metrics)
    assert adp2sgd.read_result(tmp_path / "run").metrics == run.metrics
    assert (run.accuracy, run.loss) == (run.metrics["accuracy"], run.metrics["loss"])


def test_a_metric_that_fails_costs_the_figures_and_not_the_run() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise ValueError("bed 7654321")

    run = adp2sgd.simulate(CONFIG, task=task(metrics=broken))
    assert run.metrics == {}
    assert any("metric fails" in note for note in run.notes)
    private = CONFIG.replace(privacy=Privacy(mode="private", noise_multiplier=1.0, delta=1e-3))
    with pytest.raises(ConfigError, match=r"the task's metric fails \(ValueError at test_metrics.py") as caught:
        adp2sgd.simulate(private, task=task(metrics=broken))  # before anything is spent
    assert "7654321" not in str(caught.value)


def test_a_metric_that_is_no_number_is_none_with_a_note() -> None:
    def absent(outputs: Tensor, targets: Tensor) -> Any:
        return np.float64("nan")

    run = adp2sgd.simulate(CONFIG, task=task(metrics=absent))
    assert run.metrics["absent"] is None
    assert any("absent on held-out records is not finite" in note for note in run.notes)
