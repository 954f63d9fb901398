"""A task by its name: a built-in one, or a function of the user's own."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from adp2sgd.config import Config, FromFile
from adp2sgd.errors import WITHHELD, Adp2sgdError, ConfigError, did_you_mean, reason, tellable
from adp2sgd.task import Task
from adp2sgd.tasks.families import FAMILIES, from_files
from adp2sgd.tasks.generated import blobs, digits, quadratic
from adp2sgd.tasks.options import converted

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
    if name.startswith("<"):
        raise ConfigError(
            f'task = "{name}" was a Task object of a Python program; give it again: task=… of simulate, train or '
            "load_model"
        )
    own = ":" in name
    try:
        function, given = (_own(name), {}) if own else _built_in(name)
        arguments = {**given, **options}
        _check_options(name, function, arguments)
        task = function(**arguments if own else converted(function, arguments))
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


def named(config: Config, task: Task | None) -> Config:
    """The configuration as a run records it: a Task object that the caller gives is called <its name>."""
    if task is None:
        return config
    if not isinstance(task, Task):
        raise ConfigError(f"task is a {type(task).__name__}; give an adp2sgd.Task")
    return config.replace(task=f"<{task.name}>", options={})


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
        meant = did_you_mean(family, TASKS)
        raise ConfigError(
            f'task = "{name}" is unknown{meant}; use one of: {", ".join(TASKS)}, or "package.module:function"'
        )
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
    except SyntaxError as error:
        place = f"{Path(error.filename or module).name}, line {error.lineno}"
        raise ConfigError(f'task = "{name}": {place} is not valid Python ({error.msg}); correct it') from None
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
            meant = did_you_mean(key, parameters)
            raise ConfigError(
                f'options.{key} is unknown to task "{name}"{meant}; it takes: {", ".join(parameters) or "none"}'
            )
    for key, parameter in parameters.items():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and parameter.default is parameter.empty and key not in arguments:
            raise ConfigError(f'task "{name}" needs options.{key}; set it')
