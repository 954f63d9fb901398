"""Code that a backward pass would run beside torch's own, and models that hold none but torch's and this package's."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as everywhere

from adp2sgd.gradient.layers import Tap
from adp2sgd.gradient.recurrent import Direction
from adp2sgd.gradient.rules import UnsupportedError

OWN = ("adp2sgd.", "torch.nn.modules.", "torch.nn.utils.", "torch.nn.functional")
DATA = {dict, OrderedDict, bool, int, float, str, tuple, type(None)}
SAVED = "hooks on saved tensors are not checked"


def refuse_hooks(module: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Guarantee: no module has a backward hook, and no parameter a hook on its gradient; else `UnsupportedError`."""
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        raise UnsupportedError("a backward hook is set for all modules")
    for part in module.modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise UnsupportedError(f"{type(part).__name__} has a backward hook")
    for parameter in parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError("a parameter has a hook on its gradient")


def refuse_foreign(root: Any) -> None:
    """Guarantee: the graph below this node has no backward pass that is written in Python, but for this package's."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction) and getattr(type(node), "_forward_cls", None) not in (Tap, Direction):
            raise UnsupportedError(f"{type(node).__name__} has a backward pass of its own")
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


@contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Hooks on saved tensors (of checkpointing, too) are an `UnsupportedError`."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(SAVED):
            yield
    except RuntimeError as error:
        if SAVED in str(error):
            raise UnsupportedError(SAVED) from error
        raise


def eager() -> AbstractContextManager[Any]:
    """Parts of a model that are compiled run as they are written, so that their calls are seen."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes seconds
        return nullcontext()
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Models of `transformers` use every mask that they are given. Else they would leave one out where no record of the
    batch has padding, so that one record would change the kernels that others are taken by."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is not None and getattr(masking.is_tracing, "__module__", "") != __name__:
        masking.is_tracing = partial(_traced, masking.is_tracing)
        masking.is_tracing.__module__ = __name__
    _PASS.masks, before = True, getattr(_PASS, "masks", False)
    try:
        yield
    finally:
        _PASS.masks = before


_PASS = threading.local()


def _traced(asked: Callable[..., bool], tensor: Any = None) -> bool:
    """What `transformers` asks before it reads the values of a mask; the answer while a graph is traced is "no"."""
    return getattr(_PASS, "masks", False) or asked(tensor)


def known(module: nn.Module, loss: Callable[..., Any]) -> bool:
    """Whether a pass runs code of torch's layers and of this package only: it does the same at every call.

    Then a proof for one batch holds for all. Other code is compared with the program that was proven at every pass.
    """
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return False
    return _own(loss) and all(_plain(part) for part in module.modules())


def _plain(part: nn.Module) -> bool:
    kind: Any = type(part)
    if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ or not _of_package(kind):
        return False
    return all(
        type(value) in DATA or not callable(value) or isinstance(value, (Tensor, nn.Module, type)) or _own(value)
        for value in part.__dict__.values()
    )


def _own(thing: Any) -> bool:
    if isinstance(thing, BuiltinFunctionType):  # torch.relu, say
        return getattr(torch, thing.__name__, None) == thing or getattr(torch._C._nn, thing.__name__, None) == thing
    if isinstance(thing, nn.Module):
        return _plain(thing)
    return isinstance(thing, FunctionType) and _of_package(thing)


@cache
def _of_package(thing: Any) -> bool:
    """Of a class or a function."""
    return str(thing.__module__).startswith(OWN)
