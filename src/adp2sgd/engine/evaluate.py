"""How good a model is, on the task's held-out records."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adp2sgd.device import laid_out
from adp2sgd.errors import WITHHELD, ConfigError, reason
from adp2sgd.flat import FlatModel
from adp2sgd.task import Task

PIECE = 1000  # records at a time


@dataclass(frozen=True)
class Metrics:
    """Means over the held-out records; `accuracy` (a fraction) is None where the task has no classes."""

    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Figures:
    """What a result tells: metrics, or None where they could not be computed."""

    loss: float | None = None
    accuracy: float | None = None


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


class HeldOut:
    """The held-out records of a run. By the time that they are evaluated the training is done and, in private mode,
    paid for: an error costs the figures, never the run. `notes` tells what failed, each thing once."""

    def __init__(self, model: FlatModel, task: Task, *, private: bool) -> None:
        self.notes: list[str] = []
        self._model, self._task, self._private = model, task, private

    def check(self) -> None:
        """Refuse a held-out record that cannot be evaluated, with the initial model: before anything is spent."""
        state = torch.cat([self._model.weights, self._model.buffers])
        try:
            evaluate(self._model, self._task, state)
        except Exception as error:
            why = f" ({WITHHELD})" if self._private else ""
            raise ConfigError(f"{self._told(error, state)}; correct or remove it{why}") from None

    def figures(self, state: Tensor, rows: Tensor | None = None) -> Figures:
        """Never raises: what fails is a note."""
        try:
            found = evaluate(self._model, self._task, state, rows)
        except Exception as error:
            self._note(f"{self._told(error, state)}; the result lacks figures, the model is complete")
            return Figures()
        if not math.isfinite(found.loss):
            self._note("the loss on held-out records is not finite; look for held-out records with such values")
            return Figures(None, found.accuracy)
        return Figures(found.loss, found.accuracy)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _told(self, error: Exception, state: Tensor) -> str:
        """Which record cannot be evaluated, by which function of the task, and why."""
        row, error = self._culprit(error, state)
        what = "held-out records" if row is None else f"held-out record {row} (counted from 0)"
        part, why = self._task.part(error, "metric"), reason(error, private=self._private)
        return f"{what} cannot be evaluated: the task's {part} fails ({why})"

    def _culprit(self, error: Exception, state: Tensor) -> tuple[int | None, Exception]:
        """A record that fails alone, with its error; no record where only larger batches fail."""
        rows = torch.arange(len(self._task.test))
        while len(rows) > 1:
            half = rows[: len(rows) // 2]
            rows = half if self._fails(state, half) else rows[len(half) :]
        alone = self._fails(state, rows)
        return (None, error) if alone is None else (int(rows), alone)

    def _fails(self, state: Tensor, rows: Tensor) -> Exception | None:
        try:
            evaluate(self._model, self._task, state, rows)
        except Exception as error:
            return error
        return None
