"""What a model keeps between its calls in Python: put back after every pass, so that each pass starts from the same."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Seen = dict[int, tuple[Any, Any, Callable[[Any, Any], None]]]
"""By identity: a thing, what it was, and how to make it that again."""
OPAQUE = (str, bytes, int, float, complex, type(None), nn.Parameter, torch.dtype, torch.device, torch.Size)
CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "adp2sgd", "transformers", "peft"}
"""Packages of whose classes and functions nothing is looked into, but for containers, closures and the attributes of
modules: their code keeps nothing of a record elsewhere."""
LARGEST = 10_000


class Memory:
    """Attributes of models, losses and their classes, and the global variables that their functions name, with the
    lists, dicts, sets, arrays, tensors, closures and other objects that are reached from them; and all buffers.

    Not reached: parameters, variables of other modules, containers of more than `LARGEST` things, generators, and
    objects that keep their state in C.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever the block changes is put back."""
        seen = self._walk()
        try:
            yield
        finally:
            for thing, before, put_back in seen.values():
                put_back(thing, before)

    def _walk(self) -> Seen:
        seen: Seen = {}
        waiting = list(self._roots)
        for root in self._roots:
            waiting += root.buffers() if isinstance(root, nn.Module) else ()  # compiled modules hold theirs elsewhere
        while waiting:
            thing = waiting.pop()
            way = _way(type(thing))  # type: ignore[arg-type]
            if way is not None and id(thing) not in seen:
                seen[id(thing)] = way(thing, waiting)
        return seen


Entry = tuple[Any, Any, Callable[[Any, Any], None]]
Way = Callable[[Any, list[Any]], Entry]


@cache
def _way(kind: type) -> Way | None:
    """How things of this type are kept; None where they cannot change, or are left alone."""
    for base, way in WAYS:
        if issubclass(kind, base):
            return way
    if issubclass(kind, (nn.Module, SimpleNamespace)) or (not _closed(kind) and kind.__dictoffset__):
        return _object
    return _parts if hasattr(kind, "func") or hasattr(kind, "fget") else None


def _closed(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in CLOSED


def _dict(thing: Any, waiting: list[Any]) -> Entry:
    if not thing:
        return thing, thing, _empty
    if len(thing) > LARGEST:
        return thing, None, _nothing
    waiting += thing.values()
    return thing, dict(thing), _refill


def _sequence(thing: Any, waiting: list[Any]) -> Entry:
    if len(thing) > LARGEST:
        return thing, None, _nothing
    waiting += thing
    return thing, list(thing), _relist


def _set(thing: Any, waiting: list[Any]) -> Entry:
    return thing, set(thing), _reset


def _array(thing: Any, waiting: list[Any]) -> Entry:
    return thing, thing.copy(), _rewrite_array


def _cell(thing: CellType, waiting: list[Any]) -> Entry:
    try:
        held = thing.cell_contents
    except ValueError:  # empty yet
        return thing, None, _nothing
    waiting.append(held)
    return thing, held, _refill_cell


def _object(thing: Any, waiting: list[Any]) -> Entry:
    waiting += thing.__dict__.values()
    waiting += _open_classes(type(thing))  # type: ignore[arg-type]
    return thing.__dict__, dict(thing.__dict__), _refill


def _class(thing: type, waiting: list[Any]) -> Entry:
    if _closed(thing):
        return thing, None, _nothing
    own = {name: value for name, value in vars(thing).items() if not name.startswith("__")}
    waiting += own.values()
    return thing, own, _refill_class


@cache
def _open_classes(kind: type) -> tuple[type, ...]:
    return tuple(base for base in kind.__mro__ if not _closed(base))


def _parts(thing: Any, waiting: list[Any]) -> Entry:
    """What does not change itself, but refers to others: tuples, methods, `functools.partial`."""
    if isinstance(thing, tuple):
        waiting += thing
    elif isinstance(thing, MethodType):
        waiting += [thing.__self__, thing.__func__]
    else:
        waiting += [getattr(thing, name) for name in ("func", "args", "keywords", "fget") if hasattr(thing, name)]
    return thing, None, _nothing


def _function(thing: FunctionType, waiting: list[Any]) -> Entry:
    waiting += [*(thing.__closure__ or ()), *(thing.__defaults__ or ()), thing.__kwdefaults__, thing.__dict__]
    if str(thing.__module__).partition(".")[0] in CLOSED:
        return thing, None, _nothing
    space = thing.__globals__
    named = {name: space[name] for name in _names(thing.__code__) if name in space}
    waiting += named.values()
    return thing, named, _refill_globals


@cache
def _names(code: CodeType) -> frozenset[str]:
    """All that a function, and functions within it, may name."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _tensor(thing: Tensor, waiting: list[Any]) -> Entry:
    return thing, thing.detach().clone(), _rewrite


WAYS: tuple[tuple[Any, Way | None], ...] = (
    (OPAQUE, None),
    (Tensor, _tensor),
    (dict, _dict),
    ((list, deque), _sequence),
    (set, _set),
    (np.ndarray, _array),
    (CellType, _cell),
    (type, _class),
    (FunctionType, _function),
    ((tuple, MethodType), _parts),
)


def _nothing(thing: Any, before: Any) -> None:
    pass


def _empty(thing: Any, before: Any) -> None:
    if thing:
        thing.clear()


def _refill(thing: Any, before: Any) -> None:
    if len(thing) != len(before) or any(thing.get(key, before) is not value for key, value in before.items()):
        thing.clear()
        thing.update(before)


def _relist(thing: Any, before: Any) -> None:
    if len(thing) != len(before) or any(a is not b for a, b in zip(thing, before, strict=True)):
        thing.clear()
        thing.extend(before)


def _reset(thing: Any, before: Any) -> None:
    thing.clear()
    thing.update(before)


def _rewrite(thing: Tensor, before: Tensor) -> None:
    # By `data`, which models may have changed it by, too: that leaves no trace in its version.
    if thing.is_cuda or not torch.equal(thing.detach(), before):
        thing.data.copy_(before)


def _rewrite_array(thing: Any, before: Any) -> None:
    thing[...] = before


def _refill_cell(thing: CellType, before: Any) -> None:
    thing.cell_contents = before


def _refill_globals(thing: FunctionType, before: dict[str, Any]) -> None:
    space = thing.__globals__
    for name in _names(thing.__code__):
        if name in before and space.get(name, space) is not before[name]:
            space[name] = before[name]
        elif name not in before and name in space:
            del space[name]


def _refill_class(thing: type, before: dict[str, Any]) -> None:
    now = vars(thing)
    for name in [name for name in now if not name.startswith("__") and name not in before]:
        delattr(thing, name)
    for name, value in before.items():
        if now.get(name, thing) is not value:
            setattr(thing, name, value)
