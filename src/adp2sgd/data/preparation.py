"""What turns stored inputs into what a model reads, as data: saved with a model and read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.data.images import Normalize
from adp2sgd.errors import ConfigError
from adp2sgd.tree import Inputs

Prepare = Callable[[Inputs], Inputs]


def floats(inputs: Inputs) -> Inputs:
    """Floating-point numbers and bytes become float32; other integers, such as tokens, stay as they are."""

    def floating(part: Tensor) -> Tensor:
        return part.float() if part.is_floating_point() or part.dtype == torch.uint8 else part

    return tree.each(floating, inputs)


@dataclass(frozen=True)
class Affine:
    """x / divisor + shift."""

    divisor: float
    shift: float

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs / self.divisor + self.shift


def written(prepare: Prepare) -> dict[str, Any] | None:
    """`prepare` as plain values; None where it is a function of the user's own."""
    if prepare in (floats, torch.Tensor.float, torch.Tensor.double):
        return {"kind": getattr(prepare, "__name__", "float")}
    if isinstance(prepare, Normalize):
        return {"kind": "normalize", "mean": list(prepare.mean), "std": list(prepare.std)}
    if isinstance(prepare, Affine):
        return {"kind": "affine", "divisor": prepare.divisor, "shift": prepare.shift}
    return None


def read(raw: Mapping[str, Any]) -> Prepare:
    """What `written` gave, also after a way through JSON."""
    plain: dict[str, Prepare] = {"floats": floats, "float": torch.Tensor.float, "double": torch.Tensor.double}
    kind = raw.get("kind")
    if kind in plain:
        return plain[str(kind)]
    if kind == "normalize":
        return Normalize(tuple(map(float, raw["mean"])), tuple(map(float, raw["std"])))
    if kind == "affine":
        return Affine(float(raw["divisor"]), float(raw["shift"]))
    raise ConfigError(f'the model prepares its inputs by "{kind}", which this version does not know; update adp2sgd')
