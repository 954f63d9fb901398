"""What a pass leaves behind in a model and its loss is put back, so that no record reaches a later one through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

CONTAINERS = (list, dict, set)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def may_keep(module: nn.Module) -> bool:
    """Whether a pass may change the module: layers of torch and of this package do not, unless hooks run with them."""
    parts = list(module.modules())
    plain = all(type(part).__module__.startswith(("torch.nn.", "adp2sgd.")) for part in parts)
    return not plain or any(getattr(part, name, None) for part in parts for name in HOOKS)


@contextmanager
def untouched(module: nn.Module, loss: Callable[..., Any] | None = None) -> Iterator[None]:
    """Guarantee: buffers, parameters and attributes of `module` and `loss` are what they were before.

    Lists, dicts and sets that are attributes are covered, but not what lies deeper in them. Objects that attributes
    refer to, global variables, and writes through `Tensor.data` into parameters are not.
    """
    owners: list[Any] = [*module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [loss])]
    kept = [(vars(owner), _copied(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    parameters = [(parameter, parameter._version, parameter.detach().clone()) for parameter in module.parameters()]
    try:
        yield
    finally:
        for attributes, before in kept:
            _put_back(attributes, before)
        with torch.no_grad():
            for tensor, value in buffers:
                tensor.copy_(value)
            for tensor, version, value in parameters:
                if tensor._version != version:
                    tensor.copy_(value)


def _copied(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of its contents where these may change."""
    return {name: (value, value.copy() if type(value) in CONTAINERS else None) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (value, contents) in before.items():
        if attributes.get(name) is not value:
            attributes[name] = value
        if contents is not None:
            _refill(value, contents)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)
