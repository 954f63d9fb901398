"""How good a model is, on the task's held-out records."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adp2sgd.device import laid_out
from adp2sgd.flat import FlatModel
from adp2sgd.task import Task

PIECE = 1000  # records at a time


@dataclass(frozen=True)
class Metrics:
    """Means over the held-out records; `accuracy` (a fraction) is None where the task has no classes."""

    loss: float
    accuracy: float | None


@torch.no_grad()
def evaluate(model: FlatModel, task: Task, state: Tensor, rows: Tensor | None = None) -> Metrics:
    """The model at `state` (weights, then float buffers) on the held-out records, or on some `rows` of them."""
    model.load(state)
    model.module.eval()
    records = task.test if rows is None else task.test.take(rows)
    loss, right, labels = 0.0, 0.0, 0
    for inputs, targets in zip(records.inputs.split(PIECE), records.targets.split(PIECE), strict=True):
        here = targets.to(model.device)
        outputs = model.module(laid_out(task.prepare(inputs.to(model.device))))
        loss += float(task.loss(outputs, here).double().sum())
        if task.metric == "accuracy":
            right += float((outputs.argmax(dim=-1) == here).sum())
            labels += here.numel()
    return Metrics(loss / len(records), right / labels if labels else None)


def average(states: list[Tensor]) -> Tensor:
    """θ: the mean of the learners' states, summed in float64."""
    total = torch.zeros_like(states[0], dtype=torch.float64)
    for state in states:
        total += state
    return (total / len(states)).to(states[0].dtype)


def consensus(states: list[Tensor], mean: Tensor) -> float:
    """The mean squared distance of the learners' models from their average: (1/K) Σ ‖w_k − θ‖²."""
    return sum(float((state - mean).double().square().sum()) for state in states) / len(states)
