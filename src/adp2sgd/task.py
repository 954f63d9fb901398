"""Task = model + data + loss + metric. The built-in ones by name; the user's own by "package.module:function"."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from adp2sgd import models
from adp2sgd.config import FromFile
from adp2sgd.data import cifar10, heart, idx, images, kaldi, synthetic, table
from adp2sgd.data.augment import crop_and_flip
from adp2sgd.data.folder import Source
from adp2sgd.data.records import Records
from adp2sgd.errors import WITHHELD, Adp2sgdError, ConfigError, reason, tellable
from adp2sgd.settings import typed

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) → one loss per record."""
Augment = Callable[[Tensor, Generator], Tensor]
"""(prepared batch, generator) → the batch as training sees it."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per record; sequences (outputs [n, frames, classes]) give the mean over their frames."""
    if outputs.dim() == 3:
        losses = nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return losses.mean(dim=1)
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


METRICS = ("accuracy", "loss")


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
    augment: Augment | None = None  # training batches only, after `prepare`
    fitted: str | None = None
    identifier: str | None = None  # what seems to tell whose a record is, where records have no units

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise ConfigError("Task.model must be a function that makes the model; write model=lambda: …")
        if self.metric not in METRICS:
            raise ConfigError(f'Task.metric = "{self.metric}" is unknown; use one of: {", ".join(METRICS)}')

    def __repr__(self) -> str:
        """Without anything that may hold records, such as the arguments of a partial function."""
        return f"Task(train={self.train}, test={self.test}, metric={self.metric!r})"

    def part(self, error: BaseException, otherwise: str) -> str:
        """Which of its functions an error came through: "prepare", "augment", "loss" or "model"; else `otherwise`."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for name in ("prepare", "augment", "loss"):
            if getattr(self, name) is not None and _is_called(getattr(self, name), frames):
                return name
        return "model" if any(frame.f_code is nn.Module._call_impl.__code__ for frame in frames) else otherwise


def _is_called(function: Any, frames: Iterable[types.FrameType]) -> bool:
    """Whether the function, or callable object, is in the stack."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return any(frame.f_code is code if code else frame.f_locals.get("self") is function for frame in frames)


def digits(*, model: str = "mlp", **model_options: Any) -> Task:
    """1,437 + 360 images of handwritten digits, 8 × 8; models mlp, cnn and logistic."""
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


@dataclass(frozen=True, kw_only=True)
class Family:
    """A source of real data and the models that suit it, the first by default."""

    load: Callable[..., Source]
    models: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)  # the source's options where the user sets none
    augment: bool = False  # crop and mirror the training images where the user does not say


FROM_DATA = ("inputs", "channels", "size")  # of a model's options
TABLE_MODELS = ("logistic", "mlp")
IMAGE_MODELS = ("cnn", *(name for name in models.MODELS if name not in ("cnn", "lstm")))
FAMILIES = {
    "cifar10": Family(load=cifar10.load, models=IMAGE_MODELS, augment=True),
    "fashion": Family(load=partial(idx.load, "fashion"), models=IMAGE_MODELS),
    "mnist": Family(load=partial(idx.load, "mnist"), models=IMAGE_MODELS),
    "speech": Family(load=kaldi.load, models=("lstm",), given={"classes": 320}),
    "heart": Family(load=heart.load, models=TABLE_MODELS),
    "table": Family(load=table.load, models=TABLE_MODELS),
    "images": Family(load=images.load, models=IMAGE_MODELS),
}


def from_files(
    name: str,
    /,
    *,
    model: str | None = None,
    only: str | None = None,
    limit: int | None = None,
    augment: bool | None = None,
    **options: Any,
) -> Task:
    """A family of `FAMILIES`. Options that the source's `load` takes go there, all others to the model's constructor.

    `only` trains on one site's records, but holds out all sites'; `limit` keeps at most so many training and as many
    held-out records, evenly spread over the files; `augment` crops and mirrors training images.
    """
    family = FAMILIES[name]
    model = model or family.models[0]
    _check_model(name, model, family.models)
    loads, builds = (inspect.signature(made).parameters for made in (family.load, models.MODELS[model]))
    known = [*(key for key in builds if key not in FROM_DATA), *loads, "only", "limit", "augment"]
    for key in options:
        if key not in known:
            raise ConfigError(f'options.{key} is unknown to task "{name}/{model}"; it takes: {", ".join(known)}')
    source = _load(name, family, {key: options.pop(key) for key in loads.keys() & options.keys()})
    if augment and source.train.inputs.dim() != 4:
        raise ConfigError(f'options.augment = true is for images, and task = "{name}" has none; remove it')
    return Task(
        model=_builder(name, model, {model: _shape(model, source)}, options),
        train=_spread(source.train if only is None else _one_site(source.train, only), limit),
        test=_spread(source.test, limit),
        loss=source.loss or cross_entropy,
        metric=source.metric,
        prepare=source.prepare,
        augment=crop_and_flip if (family.augment if augment is None else augment) else None,
        fitted=source.fitted,
        identifier=source.identifier,
    )


def _load(name: str, family: Family, options: Mapping[str, Any]) -> Source:
    arguments = {**family.given, **options}
    for key, parameter in inspect.signature(family.load).parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise ConfigError(f'task = "{name}" needs options.{key}; set {key} under [options]')
    return family.load(**_converted(family.load, arguments))


def _shape(model: str, source: Source) -> dict[str, int]:
    """Those of the model's arguments that the data fixes."""
    shape = source.train.inputs.shape[1:]  # [features], [frames, features] or [channels, height, width]
    fixed = {"classes": source.classes, "inputs": shape[-1] if len(shape) == 2 else shape.numel()}
    if len(shape) == 3:
        fixed |= {"channels": shape[0], "size": shape[1]}
    known = inspect.signature(models.MODELS[model]).parameters
    if len(shape) == 3 and "size" in known and shape[1] != shape[2]:
        fix = f"set options.size = [{shape[1]}, {shape[1]}]"
        raise ConfigError(f"{model} reads square images, not {shape[1]} × {shape[2]}; {fix}")
    return {key: value for key, value in fixed.items() if key in known}


def _one_site(records: Records, site: str) -> Records:
    if records.sites is None or site not in records.site_names:
        known = ", ".join(records.site_names) or "this data has none"
        raise ConfigError(f'options.only = "{site}" is not a site of the data; sites: {known}')
    return records.take(torch.nonzero(records.sites == records.site_names.index(site)).flatten())


def _spread(records: Records, limit: int | None) -> Records:
    if limit is None or limit >= len(records):
        return records
    if limit < 1:
        raise ConfigError(f"options.limit = {limit} leaves no record; use at least 1")
    return records.take(torch.arange(limit) * len(records) // limit)


TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "blobs": blobs,
    "quadratic": quadratic,
    **{name: partial(from_files, name) for name in FAMILIES},
}


def resolve(name: str, options: Mapping[str, Any], *, private: bool = False) -> Task:
    """The task `family`, `family/model` or "package.module:function", called with the options.

    Guarantee: no code is imported for a name that a file gives, and no function is called that is not declared to
    return a Task. `private`: what fails is told without values of records.
    """
    own = ":" in name
    try:
        function, given = (_own(name), {}) if own else _built_in(name)
        arguments = {**given, **options}
        _check_options(name, function, arguments)
        task = function(**arguments if own else _converted(function, arguments))
    except Exception as error:
        refusal = _refusal(name, error, own=own, private=private)
        if refusal is None:
            raise
        raise refusal from None
    if not isinstance(task, Task):
        raise ConfigError(f'task = "{name}" gave a {type(task).__name__}; the function must return adp2sgd.Task')
    if not len(task.train) or not len(task.test):
        raise ConfigError(f'task = "{name}" has {len(task.train)} training and {len(task.test)} held-out records')
    return task


def _refusal(name: str, error: Exception, *, own: bool, private: bool) -> ConfigError | None:
    """What is told instead of an error while a task is made; None where the error itself may be seen."""
    why = reason(error, private=private)
    if own and private and not tellable(error):
        return ConfigError(f'task = "{name}" cannot be made ({why}); {WITHHELD}')
    if own or not isinstance(error, ValueError | TypeError | RuntimeError) or isinstance(error, Adp2sgdError):
        return None
    return ConfigError(f'task = "{name}" cannot be made with its options ({why}); correct [options]')


def _built_in(name: str) -> tuple[Callable[..., Task], dict[str, Any]]:
    family, slash, model = name.partition("/")
    if family not in TASKS:
        raise ConfigError(f'task = "{name}" is unknown; use one of: {", ".join(TASKS)}, or "package.module:function"')
    return TASKS[family], {"model": model} if slash else {}


def _own(name: str) -> Callable[..., Task]:
    """The function that the caller names; it must be declared to return a Task. A module is also looked for in the
    working directory, last: no file there takes the place of an installed module."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f'task = "{name}" names no function; write "package.module:function"')
    here = str(Path.cwd())
    if isinstance(name, FromFile):
        found = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [*sys.path, here])
        raise ConfigError(
            f'task = "{name}" is named by a file and would import {found.origin if found else module}; if you trust '
            f'that code, name it yourself: --trust {name}, or task="{name}" in Python (Config.replace, load_model)'
        )
    if here not in sys.path:
        sys.path.append(here)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f'task = "{name}": no module named {error.name}; check the name and PYTHONPATH') from None
    if not hasattr(loaded, attribute):
        raise ConfigError(f'task = "{name}": module {module} has no function {attribute}')
    function: Callable[..., Task] = getattr(loaded, attribute)
    if not inspect.isfunction(function) or not _makes_task(function):
        raise ConfigError(
            f'task = "{name}" is a {type(function).__name__} that is not declared to make a task; name a function '
            f'written "def {attribute}(…) -> Task:"'
        )
    return function


def _makes_task(function: Callable[..., object]) -> bool:
    """By its annotation, which is not evaluated where it is a string."""
    declared = inspect.signature(function).return_annotation
    return declared is Task or (isinstance(declared, str) and declared.strip("'\"").rpartition(".")[2] == "Task")


def _check_options(name: str, function: Callable[..., Task], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return  # what is left goes to the model's constructor, which checks it
    for key in arguments:
        if key not in parameters:
            raise ConfigError(f'options.{key} is unknown to task "{name}"; it takes: {", ".join(parameters) or "none"}')
    for key, parameter in parameters.items():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and parameter.default is parameter.empty and key not in arguments:
            raise ConfigError(f'task "{name}" needs options.{key}; set it')


def _converted(function: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types that the function declares (TOML has lists, but no tuples); wrong ones are refused."""
    hints = typing.get_type_hints(getattr(function, "func", function))
    named = {p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    return {k: typed(hints[k], v, f"options.{k}") if k in named else v for k, v in arguments.items()}


def _check_model(family: str, model: str, known: Iterable[str]) -> None:
    if model not in known:
        raise ConfigError(f'task = "{family}/{model}": {family} has no such model; use one of: {", ".join(known)}')


def _builder(
    family: str, model: str, shapes: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """A constructor for one of the models that suit the family; refuses unknown names and options at once."""
    _check_model(family, model, shapes)
    arguments = {**shapes[model], **options}
    with torch.device("meta"):
        models.build(model, **arguments)
    return lambda: models.build(model, **arguments)
