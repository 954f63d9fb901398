"""The options of a built-in task: of which types they are, and which of them its model takes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from adp2sgd import models
from adp2sgd.errors import ConfigError
from adp2sgd.settings import typed


def converted(function: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types that the function declares (TOML has lists, but no tuples); wrong ones are refused."""
    hints = typing.get_type_hints(getattr(function, "func", function))
    named = {p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    return {k: typed(hints[k], v, f"options.{k}") if k in named else v for k, v in arguments.items()}


def check_model(family: str, model: str, known: Iterable[str]) -> None:
    if model not in known:
        raise ConfigError(f'task = "{family}/{model}": {family} has no such model; use one of: {", ".join(known)}')


def builder(
    family: str, model: str, shapes: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """A constructor for one of the models that suit the family; refuses unknown names and options at once."""
    check_model(family, model, shapes)
    arguments = {**shapes[model], **options}
    made = models.BuiltIn(model, arguments)
    with torch.device("meta"):
        made()
    return made
