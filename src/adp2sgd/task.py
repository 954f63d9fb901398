"""Task = model + data + loss + metrics: everything that is to be learned, and nothing about how.

Built-in tasks have names (`adp2sgd.tasks`). One of your own is a `Task` that you give to `simulate` or `train` as
`task=…`, or a function that returns one, named as "package.module:function".
"""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Generator, nn

from adp2sgd.data.encoder import Encoder
from adp2sgd.data.image_encoder import ImageEncoder
from adp2sgd.data.indexed import Reader, as_records
from adp2sgd.data.preparation import floats
from adp2sgd.data.records import RecordSet
from adp2sgd.errors import ConfigError, DataError, OtherProcessError
from adp2sgd.losses import Loss, cross_entropy, loss_of
from adp2sgd.metrics import SMALLER_IS_BETTER, Given, Metric, metrics_of
from adp2sgd.tree import Inputs

__all__ = ["Augment", "Loss", "Task", "cross_entropy"]

Augment = Callable[[Inputs, Generator], Inputs]
"""(prepared batch, generator) → the batch as training sees it."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class Task:
    """What is to be learned.

    Under privacy `prepare`, and a dataset's `__getitem__`, must treat records one by one and use public constants only;
    `fitted` names anything that was fitted on private records (and makes private mode refuse the task).
    """

    model: Callable[[], nn.Module]
    train: RecordSet
    test: RecordSet
    loss: Loss
    metrics: dict[str, Metric]  # beside the loss, which is always measured
    monitor: str  # the one of them that decides, or "loss"; with "-" before it where smaller is better
    prepare: Callable[[Inputs], Inputs]  # batch as stored → what the model reads
    augment: Augment | None  # training batches only, after `prepare`
    fitted: str | None
    encoder: Encoder | ImageEncoder | None  # turns new rows or images into inputs, for the finished model
    identifier: str | None  # what seems to tell whose a record is, where records have no units
    name: str

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
        train: Any,
        test: Any,
        loss: Loss | str = cross_entropy,
        metrics: Given | None = None,
        monitor: str | None = None,
        prepare: Callable[[Any], Any] = floats,
        augment: Callable[[Any, Generator], Any] | None = None,
        fitted: str | None = None,
        encoder: Encoder | ImageEncoder | None = None,
        identifier: str | None = None,
        name: str = "own",
    ) -> None:
        """`model` makes the module. `train` and `test` are what `as_records` takes: tensors (inputs, targets), a
        map-style Dataset, a Hugging Face Dataset, or Records.

        `loss` gives one number per record, or names one of `LOSSES`. `metrics` are names of `METRICS` or functions
        (outputs, targets) → number; without them, accuracy where the loss is cross_entropy. `monitor` is the metric
        that decides, by default the first. `name` stands for this task in a run's record.
        """
        if isinstance(model, nn.Module) or not callable(model):
            raise ConfigError("Task.model must be a function that makes the model; write model=lambda: …")
        chosen = loss_of(loss)
        if metrics is None:
            metrics = ("accuracy",) if chosen is cross_entropy else ()
        measured = metrics_of(metrics)
        monitor = monitor or next(iter(measured), "loss")
        monitor = f"-{monitor}" if monitor in SMALLER_IS_BETTER else monitor
        if monitor.removeprefix("-") not in (*measured, "loss"):
            known = ", ".join((*measured, "loss"))
            raise ConfigError(f'Task.monitor = "{monitor}" is none of its metrics; use one of: {known}')
        for part, function in (("prepare", prepare), ("augment", augment)):
            if function is not None and not callable(function):
                raise ConfigError(f"Task.{part} is a {type(function).__name__}; give a function of a batch of inputs")
        values = {
            "model": model, "train": _records("train", train), "test": _records("test", test), "loss": chosen,
            "metrics": measured, "monitor": monitor, "prepare": prepare, "augment": augment, "fitted": fitted,
            "encoder": encoder, "identifier": identifier, "name": name,
        }  # fmt: skip
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        """Without anything that may hold records, such as the arguments of a partial function."""
        return f"Task(train={self.train}, test={self.test}, metrics={list(self.metrics)})"

    def part(self, error: BaseException, otherwise: str) -> str:
        """Which of its functions an error came through: "dataset", "prepare", "augment", "loss", "metric" or "model";
        else `otherwise`."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, OtherProcessError) or any(frame.f_code is Reader.read.__code__ for frame in frames):
            return "dataset"
        for name in ("prepare", "augment", "loss"):
            if getattr(self, name) is not None and _is_called(getattr(self, name), frames):
                return name
        if any(_is_called(metric, frames) for metric in self.metrics.values()):
            return "metric"
        return "model" if any(frame.f_code is nn.Module._call_impl.__code__ for frame in frames) else otherwise


def _records(part: str, data: Any) -> RecordSet:
    try:
        return as_records(data)
    except DataError as error:
        raise DataError(f"Task.{part}: {error}") from None


def _is_called(function: Any, frames: Iterable[types.FrameType]) -> bool:
    """Whether the function, or callable object, is in the stack."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return any(frame.f_code is code if code else frame.f_locals.get("self") is function for frame in frames)
