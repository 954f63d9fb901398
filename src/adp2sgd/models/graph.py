"""A model as a graph of PyTorch's own operations: saved as JSON, run again without the code that made it.

`capture` takes the graph that `torch.export` finds. It is not kept in `torch.export`'s archive, because reading one
unpickles objects, and a pickle can run any code. Guarantee of `Graph`: it calls nothing but the operations of
`torch.ops.aten` that compute on tensors, and the arithmetic of sizes in `SIZES`; a graph that names anything else is
refused.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd.errors import ConfigError

SIZES: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge", "getitem",
        "and_", "or_", "not_",
    )},
    "sym_max": torch.sym_max, "sym_min": torch.sym_min, "sym_int": torch.sym_int, "sym_float": torch.sym_float,
    "sym_not": torch.sym_not, "ceil": math.ceil, "floor": math.floor,
}  # fmt: skip
NAMES = {function: name for name, function in SIZES.items()}
ATEN = re.compile(r"aten\.(\w+)\.(\w+)")
REFUSED = re.compile(r"from_file|save|load|print|file|_open|set_data|record_stream|pin_memory|share_memory")
ASSERTIONS = ("_assert", "sym_constrain")  # about sizes while tracing; they compute nothing
TYPES: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class CannotCaptureError(Exception):
    """The model has no graph of PyTorch's own operations for batches of any size. The text says why, without values."""


class Graph(nn.Module):
    """Runs the steps of a captured graph on a batch of any size. Its parameters have their names in the model."""

    def __init__(self, steps: Sequence[Mapping[str, Any]], result: Any, tensors: Mapping[str, Tensor]) -> None:
        """`steps` and `result` as `capture` gives them, also after a way through JSON; `tensors` by name."""
        super().__init__()
        self._steps = [(str(step["name"]), _function(str(step["call"])), step) for step in steps]
        self._result = result
        self._places = {name: f"t{number}" for number, name in enumerate(tensors)}
        for name, place in self._places.items():
            self.register_buffer(place, tensors[name])

    def forward(self, *inputs: Tensor) -> Any:
        known: dict[str, Any] = {f"input {number}": part for number, part in enumerate(inputs)}
        known |= {f"tensor {name}": getattr(self, place) for name, place in self._places.items()}
        device = inputs[0].device
        for name, function, step in self._steps:
            arguments = [_value(each, known, device) for each in step["args"]]
            named = {key: _value(each, known, device) for key, each in step["kwargs"].items()}
            known[name] = function(*arguments, **named)
        return _value(self._result, known, device)


class _Positional(nn.Module):
    """The module with its inputs by position, as `torch.export` needs to be told of their sizes."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, *inputs: Tensor) -> Any:
        return self.whole(*inputs)


def capture(module: nn.Module, example: Sequence[Tensor]) -> tuple[list[dict[str, Any]], Any, dict[str, Tensor]]:
    """The steps, the result and the tensors of `module`, in evaluation mode, for inputs like `example` (two rows each).

    Raises CannotCaptureError. The graph's outputs are compared with the module's on a batch of three.
    """
    program = _exported(_Positional(module.eval()), tuple(example))
    tensors = {**program.state_dict, **program.constants}
    found = _steps(program)
    if not all(isinstance(each, Tensor) for each in tensors.values()):
        raise CannotCaptureError("it holds constants that are no tensors")
    used = {name: tensors[name].detach() for name in found[2]}
    _compare(module, Graph(found[0], found[1], used), [torch.cat([part, part[:1]]) for part in example])
    return found[0], found[1], used


def _exported(module: nn.Module, example: tuple[Tensor, ...]) -> Any:
    """Python's way first, which is faster; then by way of its bytecode, which follows `len` of a batch, say."""
    rows = {0: torch.export.Dim("records")}
    for strict in (False, True):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return torch.export.export(module, example, dynamic_shapes=((rows,) * len(example),), strict=strict)
        except Exception as error:
            why = type(error).__name__
    raise CannotCaptureError(f"torch.export cannot trace it for batches of any size ({why})")


def _steps(program: Any) -> tuple[list[dict[str, Any]], Any, list[str]]:
    """Steps, result, and the names of the tensors that they use."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    places: dict[str, str] = {}
    steps, inputs, used = list[dict[str, Any]](), 0, list[str]()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if specs[node.name].kind.name == "USER_INPUT":
                places[node.name] = f"input {inputs}"
                inputs += 1
            else:
                places[node.name] = f"tensor {specs[node.name].target}"
                used.append(specs[node.name].target)
        elif node.op == "call_function":
            name = _name(node.target)
            if name.partition(".")[2].startswith(ASSERTIONS):
                continue
            places[node.name] = node.name
            arguments = [_written(each, places) for each in node.args]
            named = {key: _written(each, places) for key, each in node.kwargs.items()}
            steps.append({"name": node.name, "call": name, "args": arguments, "kwargs": named})
        elif node.op == "output":
            outputs = [_written(each, places) for each in node.args[0]][-len(program.graph_signature.user_outputs) :]
            return steps, outputs[0] if len(outputs) == 1 else outputs, used
        else:
            raise CannotCaptureError(f"it has a step of kind {node.op}")
    raise CannotCaptureError("it has no output")


def _name(target: Any) -> str:
    name = NAMES.get(target) if not isinstance(target, torch._ops.OpOverload) else str(target)
    if name is None or (name not in SIZES and not _allowed(name)):
        raise CannotCaptureError(
            f"it uses {getattr(target, '__name__', target)}, which is no operation of PyTorch's own"
        )
    return name


def _allowed(name: str) -> bool:
    found = ATEN.fullmatch(name)
    return found is not None and not REFUSED.search(found[1]) and not found[1].startswith("__")


def _function(name: str) -> Callable[..., Any]:
    """The operation of that name; refuses all others."""
    if name in SIZES:
        return SIZES[name]
    if not _allowed(name):
        raise ConfigError(
            f'the model\'s graph names "{name}", which is no operation that a model may use; do not trust it'
        )
    _, operation, overload = name.split(".")
    try:
        found: Callable[..., Any] = getattr(getattr(torch.ops.aten, operation), overload)
    except AttributeError:
        raise ConfigError(
            f'the model\'s graph uses "{name}", which this PyTorch does not have; use a newer one'
        ) from None
    return found


def _written(value: Any, places: Mapping[str, str]) -> Any:
    """An argument as JSON: plain values stay, everything else is {"kind": value}."""
    if isinstance(value, torch.fx.Node):
        return {"step": places[value.name]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list | tuple | torch.fx.immutable_collections.immutable_list):
        return [_written(each, places) for each in value]
    if isinstance(value, torch.device):
        return {"device": "inputs"}
    for kind, type_ in TYPES.items():
        if isinstance(value, type_):
            return {kind: str(value).removeprefix("torch.")}
    raise CannotCaptureError(f"a step has an argument of type {type(value).__name__}")


def _value(written: Any, known: Mapping[str, Any], device: torch.device) -> Any:
    if isinstance(written, list):
        return [_value(each, known, device) for each in written]
    if not isinstance(written, Mapping):
        return written
    [(kind, value)] = written.items()
    if kind == "step":
        return known[value]
    if kind == "float":
        return float(value)
    if kind == "device":
        return device
    found = getattr(torch, str(value), None) if kind in TYPES else None
    if found is None or not isinstance(found, TYPES[kind]):
        raise ConfigError(f'the model\'s graph has an argument "{kind}" of unknown meaning; it is damaged or newer')
    return found


def _compare(module: nn.Module, graph: Graph, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        expected, found = module(*inputs), graph(*inputs)
    pairs = [(expected, found)] if isinstance(expected, Tensor) else list(zip(expected, found, strict=True))
    if not all(torch.allclose(one, other, atol=1e-5, equal_nan=True) for one, other in pairs):
        raise CannotCaptureError("its graph computes something else; does it draw random numbers or keep state?")
