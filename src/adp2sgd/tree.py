"""Inputs of a model: a tensor, or a dictionary or tuple of tensors (image and table, tokens and mask).

Row i of every tensor belongs to record i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Any
"""`Tensor | dict[str, Tensor] | tuple[Tensor, ...]`."""


def is_tree(inputs: object) -> bool:
    """Whether this is a tensor, or a dictionary or tuple of tensors that is not empty."""
    if isinstance(inputs, dict):
        return bool(inputs) and all(isinstance(name, str) for name in inputs) and is_tree(tuple(inputs.values()))
    if isinstance(inputs, tuple):
        return bool(inputs) and all(isinstance(part, Tensor) for part in inputs)
    return isinstance(inputs, Tensor)


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


def joined(pieces: Sequence[Inputs], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Inputs:
    """Pieces of one structure as one: their tensors by `torch.cat`, or by `torch.stack` for single records."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return join(list(pieces))
    if isinstance(first, dict):
        return {name: join([piece[name] for piece in pieces]) for name in first}
    return tuple(join(list(parts)) for parts in zip(*pieces, strict=True))


def rows(inputs: Inputs) -> int:
    """How many records there are."""
    return len(tensors(inputs)[0])


def take(inputs: Inputs, which: Tensor | slice) -> Inputs:
    """The records `which`, in that order."""
    return each(lambda part: part[which], inputs)


def split(inputs: Inputs, count: int) -> list[Inputs]:
    """The records in runs of `count`."""
    return [take(inputs, slice(start, start + count)) for start in range(0, rows(inputs), count)]


def size(inputs: Inputs) -> int:
    """Bytes of all tensors."""
    return sum(part.numel() * part.element_size() for part in tensors(inputs))


def described(inputs: Inputs) -> str:
    """Types and shapes in words, never a value."""
    if isinstance(inputs, Tensor):
        return f"{inputs.dtype} {list(inputs.shape)}"
    if isinstance(inputs, dict):
        return "{" + ", ".join(f"{name}: {described(part)}" for name, part in inputs.items()) + "}"
    return "(" + ", ".join(map(described, inputs)) + ")"


def call(module: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """The module's outputs: a dictionary becomes keyword arguments, a tuple positional ones."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)
