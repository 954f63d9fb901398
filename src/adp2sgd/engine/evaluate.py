"""How good a model is, on the task's held-out records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.data.indexed import DatasetRecords
from adp2sgd.data.records import RecordSet
from adp2sgd.device import laid_out
from adp2sgd.errors import WITHHELD, ConfigError, reason
from adp2sgd.flat import FlatModel
from adp2sgd.metrics import Figures, Scores
from adp2sgd.task import Task

PIECE = 1000  # records at a time, at most
PIECE_BYTES = 64 << 20  # and at most so much of a dataset that is read by index


def pieces(records: RecordSet, most: int = PIECE) -> Iterator[tuple[Any, Tensor]]:
    """All records in order, some at a time; of a dataset so few that memory is bounded, and one piece ahead."""
    if not isinstance(records, DatasetRecords):
        yield from (records.read(rows) for rows in torch.arange(len(records)).split(most))
        return
    one = sum(tree.size(tree.each(lambda part: part.new_empty(1, *part.shape[1:]), part)) for part in records.blank())
    most = max(1, min(most, PIECE_BYTES // max(1, one)))
    coming = None
    for rows in torch.arange(len(records)).split(most):
        now, coming = coming, records.fetch(rows)
        if now is not None:
            yield now.result()
    if coming is not None:
        yield coming.result()


@torch.no_grad()
def evaluate(
    model: FlatModel,
    task: Task,
    state: Tensor,
    rows: Tensor | None = None,
    *,
    most: int = PIECE,
    stop: Callable[[], bool] = lambda: False,
) -> Figures:
    """The model at `state` (weights, then float buffers) on the held-out records, or on some `rows` of them.

    `most` records are evaluated at a time; `stop` is asked in between, and ends with no figures.
    """
    model.load(state)
    model.module.eval()
    scores = Scores(task.loss, task.metrics)
    for stored, targets in pieces(task.test if rows is None else task.test.take(rows), most):
        if stop():
            return {}
        inputs = task.prepare(tree.each(lambda part: part.to(model.device), stored))
        outputs = tree.call(model.module, tree.each(laid_out, inputs))
        scores.add(outputs, targets.to(model.device))
    return scores.figures()


class HeldOut:
    """The held-out records of a run. They are evaluated when training is done and its privacy spent.
    An error therefore costs the figures, never the run. `notes` lists what failed, without repetition."""

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
            return {}
        for name, value in found.items():
            if value is not None and not math.isfinite(value):
                self._note(f"the {name} on held-out records is not finite; look for held-out records with such values")
        return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}

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
