"""What a table's model is to learn: one of several classes, or a number. With the loss and the metric that fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adp2sgd.data import features
from adp2sgd.data.features import MISSING, Bools, Scaled, Standardized, Value
from adp2sgd.data.tablefile import Column, Format, Where
from adp2sgd.errors import ConfigError, DataError

TARGETS = ("class", "number")
MOST_CLASSES, MOST_DECIMALS = 100, 10  # different values, and different decimals, that are taken for classes unasked


@dataclass(frozen=True, kw_only=True)
class Classes:
    """A label is one of `values`; `weights`, if any, multiply the loss of a record by its class's."""

    column: str
    values: tuple[Value, ...]
    weights: tuple[float, ...] = ()

    def encode(self, column: Column, where: Where, written: Format) -> Tensor:
        """int64 [n]: each label's place among the classes."""
        _refuse_missing(self.column, column, where)
        known = f"the classes {list(self.values)}; correct it or the classes"
        return torch.from_numpy(features.places(self.column, column, self.values, where, written, known))

    def decode(self, outputs: Tensor) -> list[Value]:
        """The class that each row of outputs [n, classes] favours."""
        return [self.values[place] for place in outputs.argmax(dim=-1).tolist()]

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy",)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """None: the cross-entropy that every task has by default."""
        return WeightedCrossEntropy(self.weights) if self.weights else None


@dataclass(frozen=True, kw_only=True)
class Number:
    """A label is a number, scaled as `scale` says."""

    column: str
    scale: Scaled | Standardized

    def encode(self, column: Column, where: Where, written: Format) -> Tensor:
        """float32 [n]."""
        _refuse_missing(self.column, column, where)
        return torch.from_numpy(self.scale.encode(column, where, written)[:, 0].astype(np.float32))

    def decode(self, outputs: Tensor) -> list[float]:
        """The number, in the label's own unit, that each row of outputs [n, 1] stands for."""
        return [self.scale.decode(value) for value in outputs.double().flatten().tolist()]

    @property
    def outputs(self) -> int:
        return 1

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("mae", "r2")

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return squared_error


Target = Classes | Number


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """One squared error per record, of outputs [n, 1] against targets [n]."""
    return (outputs.squeeze(-1) - targets).square()


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """The cross-entropy of each record, times the weight of its class."""

    weights: tuple[float, ...]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        return nn.functional.cross_entropy(outputs, targets, weight=weights, reduction="none")


def to_dict(target: Target) -> dict[str, Any]:
    if isinstance(target, Number):
        return {"kind": "number", "column": target.column, "scale": features.to_dict(target.scale)}
    return {"kind": "class", **asdict(target)}


def from_dict(raw: Mapping[str, Any]) -> Target:
    if raw["kind"] == "class":
        return Classes(column=raw["column"], values=tuple(raw["values"]), weights=tuple(raw["weights"]))
    scale = features.from_dict(raw["scale"])
    assert not isinstance(scale, features.OneHot)
    return Number(column=raw["column"], scale=scale)


def declared_classes(column: str, classes: Sequence[object], weights: object = None) -> Classes:
    """From `options.classes` and `options.class_weights`."""
    values = category_values(f"options.classes = {list(classes)}", classes)
    if len(values) < 2:
        raise ConfigError(f"options.classes = {list(classes)} leaves nothing to tell apart; name two or more")
    return Classes(column=column, values=values, weights=_weights(values, weights))


def category_values(told: str, values: Sequence[object]) -> tuple[Value, ...]:
    """Declared categories or classes; true and false as text, because files hold them as such."""
    plain = tuple(v if isinstance(v, int | float | str) and not isinstance(v, bool) else str(v) for v in values)
    if len({str(value) for value in plain}) < len(plain):
        raise ConfigError(f"{told} names a value twice; give each once")
    return plain


def _weights(values: Sequence[Value], weights: object) -> tuple[float, ...]:
    if weights is None:
        return ()
    names = [str(value) for value in values]
    form = "give a positive number for each class: " + ", ".join(f"{name} = …" for name in names)
    if not isinstance(weights, Mapping) or {str(key) for key in weights} != set(names):
        raise ConfigError(f"options.class_weights = {weights!r} does not fit the classes {names}; {form}")
    given = {str(key): value for key, value in weights.items()}
    for value in given.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"options.class_weights = {weights!r} holds {value!r}; {form}")
    return tuple(float(given[name]) for name in names)


def fitted_classes(name: str, column: Column, where: Where, written: Format, weights: object = None) -> Classes:
    """The labels that occur. Refused where they look like measurements or like names of records."""
    _refuse_missing(name, column, where)
    found = sorted(set(column))
    what = measured(found, written)
    if what:
        raise ConfigError(
            f"label column {name!r} has more than {what}, too many to be taken for classes; if it is a measurement, "
            'set options.target = "number", else declare options.classes'
        )
    if len(found) < 2:
        raise DataError(f"label column {name!r} has the same value in every record; give a column that varies")
    return Classes(column=name, values=tuple(found), weights=_weights(found, weights))


def measured(values: Iterable[str], written: Format) -> str | None:
    """More than what there is of the values, in words, where they look like measurements or names, not like classes."""
    found = set(values)
    if sum(features.decimal(value, written) for value in found) > MOST_DECIMALS:
        return f"{MOST_DECIMALS} different decimals"
    return f"{MOST_CLASSES} values" if len(found) > MOST_CLASSES else None


def number_target(name: str, column: Column, bounds: object, train: Bools, where: Where, written: Format) -> Number:
    """From `options.ranges`, or standardized by the training records where the label has no range there."""
    if bounds is not None:
        return Number(column=name, scale=features.scaled(name, bounds, written))
    _refuse_missing(name, column, where)
    scale = features.fitted(name, column, train, where, written)
    if isinstance(scale, features.OneHot):
        raise DataError(f'column {name!r} holds texts, not numbers; remove options.target = "number"')
    return Number(column=name, scale=scale)


def _refuse_missing(name: str, column: Column, where: Where) -> None:
    for row, value in enumerate(column):
        if value in MISSING:
            raise DataError(f"{where(row)}: column {name!r} lacks a label; drop such records")
