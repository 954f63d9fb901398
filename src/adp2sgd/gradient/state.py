"""What a model keeps between its calls in Python: put back after every pass, so that each pass starts from the same."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)
OPAQUE = (str, bytes, int, float, complex, type(None), nn.Parameter, torch.dtype, torch.device, torch.Size)
CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "adp2sgd"}
"""Packages of whose classes nothing is looked into, but for containers, closures and layers."""


class Memory:
    """Attributes of models, losses and their classes, with the lists, dicts, sets, arrays, tensors, closures and other
    objects that are reached from them.

    Not reached: parameters, global variables, generators, and objects that keep their state in C.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever the block changes is put back."""
        seen: dict[int, tuple[Any, Any]] = {}
        self._walk(list(self._roots), seen)
        try:
            yield
        finally:
            for thing, before in seen.values():
                if before is not None:
                    _put_back(thing, before)

    def _walk(self, waiting: list[Any], seen: dict[int, tuple[Any, Any]]) -> None:
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, OPAQUE) or id(thing) in seen:
                continue
            if isinstance(thing, Tensor):
                seen[id(thing)] = (thing, self._copied(thing))
                continue
            before, inside = _content(thing)
            seen[id(thing)] = (thing, before)
            waiting += inside

    def _copied(self, tensor: Tensor) -> tuple[int, Tensor]:
        """Its version, and a copy from when it had that one."""
        held, version, values = self._copies.get(id(tensor), (None, 0, tensor))
        if held is not tensor or version != tensor._version:
            values = tensor.detach().clone()
            self._copies[id(tensor)] = (tensor, tensor._version, values)
        return tensor._version, values


def _content(thing: Any) -> tuple[Any, list[Any]]:
    """What to put back, or None; and what it refers to."""
    if isinstance(thing, CONTAINERS):
        return copy.copy(thing), list(thing.values() if isinstance(thing, dict) else thing)
    if isinstance(thing, np.ndarray):
        return thing.copy(), []
    if isinstance(thing, CellType):
        held = [thing.cell_contents] if _filled(thing) else []
        return tuple(held), held
    if isinstance(thing, type):
        own = {} if _closed(thing) else {k: v for k, v in vars(thing).items() if not k.startswith("__")}
        return own, list(own.values())
    if isinstance(thing, (nn.Module, SimpleNamespace)) or (not _closed(type(thing)) and hasattr(thing, "__dict__")):
        return dict(thing.__dict__), [*thing.__dict__.values(), *type(thing).__mro__]
    return None, _parts(thing)


def _parts(thing: Any) -> list[Any]:
    """What an object that does not change itself refers to: tuples, functions, methods, `functools.partial`."""
    if isinstance(thing, tuple):
        return list(thing)
    if isinstance(thing, MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, FunctionType):
        return [*(thing.__closure__ or ()), *(thing.__defaults__ or ()), thing.__kwdefaults__, thing.__dict__]
    return [getattr(thing, name) for name in ("func", "args", "keywords", "fget") if hasattr(thing, name)]


def _closed(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in CLOSED


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _put_back(thing: Any, before: Any) -> None:
    if isinstance(thing, Tensor):
        if thing._version != before[0]:
            thing.detach().copy_(before[1])
    elif isinstance(thing, np.ndarray):
        thing[...] = before
    elif isinstance(thing, CellType):
        if before:
            thing.cell_contents = before[0]
    elif isinstance(thing, type):
        _restore_class(thing, before)
    else:
        _refill(thing if isinstance(thing, CONTAINERS) else thing.__dict__, before)


def _restore_class(kind: type, before: dict[str, Any]) -> None:
    if _closed(kind):
        return
    for name in [name for name in vars(kind) if not name.startswith("__") and name not in before]:
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind).get(name, kind) is not value:
            setattr(kind, name, value)


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        if len(container) != len(before) or any(container.get(k, before) is not v for k, v in before.items()):
            container.clear()
            container.update(before)
    elif isinstance(container, set):
        container.clear()
        container.update(before)
    elif len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
        container.clear()
        container.extend(before)
