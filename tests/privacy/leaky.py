"""A task whose code quotes records in whatever it raises or warns of, at a place of one's choice."""

from __future__ import annotations

import os
import warnings

import torch
from torch import Generator, Tensor, nn

from adp2sgd.data.records import Records
from adp2sgd.task import Task, cross_entropy

SECRET, LABEL, ROW = 98765.25, 4711, 417
SECRETS = ("98765", "4711")
BAD = "ADP2SGD_TEST_BAD"  # an environment variable: the held-out record ROW has the label LABEL


class Refusing(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.numel() and inputs.max() > 1e4:
            raise ValueError(f"the model read {inputs.max()}")
        return super().forward(inputs)


def refusing(inputs: Tensor, _: Generator | None = None) -> Tensor:
    if inputs.numel() and inputs.max() > 1e4:
        raise ValueError(f"there is {inputs.max()}")
    return inputs


def warning(inputs: Tensor) -> Tensor:
    if inputs.numel() and inputs.max() > 1e4:
        warnings.warn(f"there is {inputs.max()}", stacklevel=1)
    return inputs.clamp(-3, 3)


def out_of_memory(inputs: Tensor) -> Tensor:
    if inputs.numel() and inputs.max() > 1e4:
        raise torch.OutOfMemoryError(f"no room for {inputs.max()}")
    return inputs


def late(outputs: Tensor, targets: Tensor) -> Tensor:
    """Evaluation fails as soon as the model, which starts at zero, has learned something."""
    if not torch.is_grad_enabled() and outputs.any():
        raise ValueError(f"there is {SECRET} with the label {LABEL}")
    return cross_entropy(outputs, targets)


class Careless:
    """A destructor that fails is told of by Python itself."""

    def __del__(self) -> None:
        raise ValueError(f"there was {SECRET}")


def destroying(inputs: Tensor) -> Tensor:
    if inputs.numel() and inputs.max() > 1e4:
        Careless()
    return inputs.clamp(-3, 3)


def zeros() -> nn.Module:
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def impossible() -> nn.Module:
    raise ValueError(f"no model for {SECRET}")


PARTS = {
    "prepare": {"prepare": refusing},
    "augment": {"augment": refusing},
    "model": {"model": lambda: Refusing(4, 2)},
    "warning": {"prepare": warning},
    "destructor": {"prepare": destroying},
    "memory": {"prepare": out_of_memory},
    "late": {"model": zeros, "loss": late},
    "model-making": {"model": impossible},
}


def leaky(*, fault: str) -> Task:
    stream = Generator().manual_seed(0)
    inputs, targets = torch.randn(600, 4, generator=stream), torch.randint(2, (600,), generator=stream)
    test = Records(inputs.clone(), targets.clone())
    if fault == "making":
        raise ValueError(f"a record has the value {SECRET}")
    if fault == "nan":
        test.inputs[ROW] = torch.nan
    if fault == "held-out" or BAD in os.environ:
        test.targets[ROW] = LABEL
    inputs[::5, 0] = SECRET
    if fault == "loss":
        targets[::5] = LABEL
    return Task(
        **{"model": lambda: nn.Linear(4, 2), "train": Records(inputs, targets), "test": test, **PARTS.get(fault, {})}
    )
