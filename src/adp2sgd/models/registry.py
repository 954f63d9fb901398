"""All models by name, and what each one costs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd.errors import ConfigError
from adp2sgd.models.efficientnet import efficientnet_b0
from adp2sgd.models.googlenet import googlenet
from adp2sgd.models.lstm import lstm
from adp2sgd.models.mobilenet import mobilenet, mobilenet_v2
from adp2sgd.models.resnet import resnet18
from adp2sgd.models.resnext import resnext29
from adp2sgd.models.senet import senet18
from adp2sgd.models.shufflenet import shufflenet
from adp2sgd.models.small import cnn, logistic, mlp
from adp2sgd.models.vgg import vgg19
from adp2sgd.models.wide_resnet import StandardizedConv, wrn16_4
from adp2sgd.settings import require, typed

MODELS: dict[str, Callable[..., nn.Module]] = {
    "shufflenet": shufflenet,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
    "mobilenet": mobilenet,
    "googlenet": googlenet,
    "resnext29": resnext29,
    "resnet18": resnet18,
    "senet18": senet18,
    "vgg19": vgg19,
    "lstm": lstm,
    "wrn16_4": wrn16_4,
    "cnn": cnn,
    "mlp": mlp,
    "logistic": logistic,
}

IMAGE = (3, 32, 32)
REFERENCE_INPUTS: dict[str, tuple[int, ...]] = {"lstm": (21, 260), "cnn": (1, 8, 8), "mlp": (64,), "logistic": (13,)}
REFERENCE_OPTIONS: dict[str, dict[str, int]] = {
    "mlp": {"inputs": 64, "classes": 10},
    "logistic": {"inputs": 13, "classes": 2},
}


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model's cost: `mib` of float32 weights, `multiply_adds` in one forward pass of one input of `input_shape`."""

    name: str
    parameters: int
    mib: float
    multiply_adds: int
    input_shape: tuple[int, ...]


def build(name: str, /, **options: Any) -> nn.Module:
    """The model of that name. Unknown names and options, and impossible sizes, raise `ConfigError`."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is unknown; use one of {', '.join(MODELS)}")
    known, hints = inspect.signature(MODELS[name]).parameters, typing.get_type_hints(MODELS[name])
    for option in options:
        if option not in known:
            raise ConfigError(f"model {name} has no option {option!r}; use one of {', '.join(known)}")
    options = {option: _checked(name, option, hints[option], value) for option, value in options.items()}
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"model {name} needs {' and '.join(missing)}; set it as a model option")
    return MODELS[name](**options)


@dataclass(frozen=True)
class BuiltIn:
    """Makes the model `name` with these options: a constructor that can be written to a file."""

    name: str
    options: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        return build(self.name, **self.options)


def catalogue() -> list[ModelInfo]:
    """All models with their default options; `mlp` and `logistic` at the sizes above."""
    return [describe(name, **REFERENCE_OPTIONS.get(name, {})) for name in MODELS]


def describe(name: str, **options: Any) -> ModelInfo:
    """The cost of `build(name, **options)` for one input of the model's reference shape."""
    with torch.device("meta"):  # no time and no random numbers are spent on initial values
        module = build(name, **options)
    # Zeros on the CPU, because a forward pass on "meta" loads the compiler first and takes longer.
    zeros = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in module.state_dict().items()}
    module.load_state_dict(zeros, assign=True)
    shape = REFERENCE_INPUTS.get(name, IMAGE)
    parameters = sum(p.numel() for p in module.parameters())
    return ModelInfo(
        name=name,
        parameters=parameters,
        mib=parameters * 4 / 2**20,
        multiply_adds=multiply_adds(module, shape),
        input_shape=shape,
    )


def multiply_adds(module: nn.Module, input_shape: Sequence[int]) -> int:
    """Multiplications in the linear, convolutional and LSTM layers for one input of `input_shape` (no batch axis)."""
    counts: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, nn.LSTM):
            counts.append(inputs[0].shape[1] * sum(p.numel() for p in layer.parameters() if p.dim() == 2))
        else:  # every number in the output is the product of one row of the weight matrix and as many inputs
            weight = layer.weight
            assert isinstance(weight, Tensor)
            counts.append(output.numel() * weight[0].numel())

    counted = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, StandardizedConv)
    handles = [layer.register_forward_hook(count) for layer in module.modules() if isinstance(layer, counted)]
    was_training, device = module.training, next(module.parameters()).device
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(1, *input_shape, device=device))
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    return sum(counts)


def _checked(model: str, option: str, hint: Any, value: object) -> Any:
    """The option's value in its type; every number is a size or a count."""
    key = f"model {model}: {option}"
    found = typed(hint, value, key)
    for number in found if isinstance(found, tuple) else (found,):
        whole = isinstance(number, int) and not isinstance(number, bool)
        require(not whole or number >= 1, key, value, "use whole numbers of at least 1")
    return found
