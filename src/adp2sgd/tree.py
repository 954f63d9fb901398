"""Inputs of a model: a tensor, or a dictionary or tuple of tensors (image and table, tokens and mask).

Row i of every tensor belongs to record i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Inputs = Any
"""`Tensor | dict[str, Tensor] | tuple[Tensor, ...]`."""


def tensors(inputs: Inputs) -> list[Tensor]:
    """All tensors, in a fixed order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def each(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same structure with `function` applied to every tensor."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(part) for name, part in inputs.items()}
    return tuple(function(part) for part in inputs)


def rows(inputs: Inputs) -> int:
    """How many records there are."""
    return len(tensors(inputs)[0])


def take(inputs: Inputs, which: Tensor | slice) -> Inputs:
    """The records `which`, in that order."""
    return each(lambda part: part[which], inputs)


def call(module: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """The module's outputs: a dictionary becomes keyword arguments, a tuple positional ones."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)
