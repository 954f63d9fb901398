"""Task = model + data + loss + metric. The built-in ones by name; the user's own by "package.module:function"."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from adp2sgd import models
from adp2sgd.data import synthetic
from adp2sgd.data.records import Records
from adp2sgd.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) → one loss per record."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per record; sequences (outputs [n, frames, classes]) give the mean over their frames."""
    if outputs.dim() == 3:
        losses = nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return losses.mean(dim=1)
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Everything that is to be learned, and nothing about how.

    Under privacy `prepare` must treat records one by one and use public constants only; `fitted` names anything
    that was fitted on private records (and makes private mode refuse the task).
    """

    model: Callable[[], nn.Module]
    train: Records
    test: Records
    loss: Loss = cross_entropy
    metric: str = "accuracy"  # or "loss": a task without classes
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float  # batch as stored → what the model reads
    augment: Callable[[Tensor, Generator], Tensor] | None = None  # training batches only, after `prepare`
    fitted: str | None = None


def digits(*, model: str = "mlp", **model_options: Any) -> Task:
    """1,437 + 360 images of handwritten digits, 8 × 8; models mlp and cnn."""
    train, test = synthetic.digits()
    shapes = {"cnn": {"size": 8, "channels": 1}, "mlp": {"inputs": 64}, "logistic": {"inputs": 64}}
    build = _builder("digits", model, shapes, {"classes": 10, **model_options})
    return Task(model=build, train=train, test=test, prepare=_sixteenths)


def _sixteenths(pixels: Tensor) -> Tensor:
    return pixels / 8 - 1  # stored values are 0 to 16


def blobs(
    *,
    model: str = "logistic",
    records: int = 2000,
    features: int = 20,
    classes: int = 4,
    spread: float = 1.0,
    seed: int = 0,
    **model_options: Any,
) -> Task:
    """Generated Gaussian clouds, one per class, of any size; models logistic and mlp."""
    train, test = synthetic.blobs(records=records, features=features, classes=classes, spread=spread, seed=seed)
    shapes = {"logistic": {"inputs": features}, "mlp": {"inputs": features}}
    return Task(model=_builder("blobs", model, shapes, {"classes": classes, **model_options}), train=train, test=test)


class Point(nn.Module):
    """The model of `quadratic`: a point in space, in float64. Its output is the difference from each input."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.position - inputs


def quadratic(*, records: int = 1000, dimension: int = 10, noise: float = 1.0, seed: int = 0) -> Task:
    """½‖w − a‖² over generated points a: the optimum is their mean, the gradient noise is known. For theory tests."""
    train, test = synthetic.quadratic(records=records, dimension=dimension, noise=noise, seed=seed)
    return Task(
        model=lambda: Point(dimension), train=train, test=test, loss=_half_square, metric="loss", prepare=Tensor.double
    )


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(dim=1)


TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "blobs": blobs, "quadratic": quadratic}


def resolve(name: str, options: Mapping[str, Any]) -> Task:
    """The task `family`, `family/model` or "package.module:function", called with the options."""
    function, given = _own(name) if ":" in name else _built_in(name)
    arguments = {**given, **options}
    _check_options(name, function, arguments)
    task = function(**arguments)
    if not isinstance(task, Task):
        raise ConfigError(f'task = "{name}" gave a {type(task).__name__}; the function must return adp2sgd.Task')
    if not len(task.train) or not len(task.test):
        raise ConfigError(f'task = "{name}" has {len(task.train)} training and {len(task.test)} held-out records')
    return task


def _built_in(name: str) -> tuple[Callable[..., Task], dict[str, Any]]:
    family, slash, model = name.partition("/")
    if family not in TASKS:
        raise ConfigError(f'task = "{name}" is unknown; use one of: {", ".join(TASKS)}, or "package.module:function"')
    return TASKS[family], {"model": model} if slash else {}


def _own(name: str) -> tuple[Callable[..., Task], dict[str, Any]]:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does: the user's module may lie beside the configuration
    try:
        return getattr(importlib.import_module(module), attribute), {}
    except ModuleNotFoundError as error:
        raise ConfigError(f'task = "{name}": no module named {error.name}; check the name and PYTHONPATH') from None
    except AttributeError:
        raise ConfigError(f'task = "{name}": module {module} has no function {attribute}') from None


def _check_options(name: str, function: Callable[..., Task], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return  # what is left goes to the model's constructor, which checks it
    for key in arguments:
        if key not in parameters:
            raise ConfigError(f'options.{key} is unknown to task "{name}"; it takes: {", ".join(parameters) or "none"}')


def _builder(
    family: str, model: str, shapes: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """A constructor for one of the models that suit the family; refuses unknown names and options at once."""
    if model not in shapes:
        raise ConfigError(f'task = "{family}/{model}": {family} has no such model; use one of: {", ".join(shapes)}')
    arguments = {**shapes[model], **options}
    with torch.device("meta"):
        models.build(model, **arguments)
    return lambda: models.build(model, **arguments)
