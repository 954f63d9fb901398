"""How good outputs are: metrics by name, or any function of (outputs, targets).

A metric sees the outputs and targets of all held-out records at once. `Mean` marks those that are a mean over targets:
they are summed up batch by batch, so that no outputs need to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.errors import ConfigError
from adp2sgd.losses import Loss

Metric = Callable[[Any, Tensor], float]
"""(outputs, targets) of all held-out records → a number."""


@dataclass(frozen=True)
class Mean:
    """The mean over all targets of what `terms` gives for each."""

    terms: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self.terms(outputs, targets).double().mean())


def chosen(outputs: Tensor, targets: Tensor) -> Tensor:
    """The decision for each target: the class of the largest output; with one output per target, whether it is > 0."""
    if outputs.shape == targets.shape:
        return (outputs > 0).to(targets.dtype)
    if outputs.shape[-1] == 1 and outputs.shape[:-1] == targets.shape:
        return (outputs[..., 0] > 0).to(targets.dtype)
    return outputs.argmax(dim=-1)


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    return chosen(outputs, targets) == targets


def _same_shape(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    targets = targets.to(outputs.dtype)
    return outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else outputs, targets


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs, targets = _same_shape(outputs, targets)
    return (outputs - targets).square()


def _distances(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs, targets = _same_shape(outputs, targets)
    return (outputs - targets).abs()


def balanced_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The mean over the classes of the fraction of their records that is recognized."""
    from sklearn.metrics import recall_score

    return float(recall_score(_flat(targets), _flat(chosen(outputs, targets)), average="macro", zero_division=0.0))


def f1(outputs: Tensor, targets: Tensor) -> float:
    """Of the positive class where there are two; the mean over the classes, or labels, where there are more."""
    from sklearn.metrics import f1_score

    truth, decided = _numpy(targets), _numpy(chosen(outputs, targets))
    two = truth.ndim == 1 and _classes(outputs, targets) == 2
    return float(f1_score(truth, decided, average="binary" if two else "macro", zero_division=0.0))


def auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve. Three classes or more: one against the rest, the mean over the classes."""
    from sklearn.metrics import roc_auc_score

    return _over_labels(roc_auc_score, outputs, targets)


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Area under the precision-recall curve; the mean over classes or labels as for `auc`."""
    from sklearn.metrics import average_precision_score

    return _over_labels(average_precision_score, outputs, targets)


def r2(outputs: Tensor, targets: Tensor) -> float:
    """1 − (mean squared error) / (variance of the targets)."""
    from sklearn.metrics import r2_score

    outputs, targets = _same_shape(outputs, targets)
    return float(r2_score(_numpy(targets), _numpy(outputs)))


METRICS: dict[str, Metric] = {
    "accuracy": Mean(_right),
    "balanced_accuracy": balanced_accuracy,
    "auc": auc,
    "f1": f1,
    "average_precision": average_precision,
    "mse": Mean(_squares),
    "mae": Mean(_distances),
    "r2": r2,
}
Figures = dict[str, float | None]
"""The loss and the metrics by name; None where one could not be computed, or is not finite."""


class Scores:
    """Loss and metrics, summed up batch by batch. Outputs are kept only for metrics that need all of them at once."""

    def __init__(self, loss: Loss | None, metrics: Mapping[str, Metric]) -> None:
        self._loss_of, self._metrics = loss, metrics
        self._means = {name: metric for name, metric in metrics.items() if isinstance(metric, Mean)}
        self._loss, self._records = 0.0, 0
        self._sums = dict.fromkeys(self._means, 0.0)
        self._counts = dict.fromkeys(self._means, 0)
        self._kept: list[tuple[Any, Tensor]] = []

    def add(self, outputs: Any, targets: Tensor) -> None:
        if self._loss_of is not None:
            self._loss += float(self._loss_of(outputs, targets).double().sum())
        self._records += len(targets)
        for name, metric in self._means.items():
            terms = metric.terms(outputs, targets)
            self._sums[name] += float(terms.double().sum())
            self._counts[name] += terms.numel()
        if len(self._means) < len(self._metrics):
            self._kept.append((tree.each(Tensor.cpu, outputs), targets.cpu()))

    def figures(self) -> Figures:
        found: Figures = {} if self._loss_of is None else {"loss": self._loss / self._records}
        if self._kept:
            outputs = tree.joined([each for each, _ in self._kept])
            targets = torch.cat([each for _, each in self._kept])
        for name, metric in self._metrics.items():
            if name in self._means:
                found[name] = self._sums[name] / max(1, self._counts[name])
            else:
                found[name] = float(metric(outputs, targets))
        return found


SMALLER_IS_BETTER = frozenset({"loss", "mse", "mae"})
OF_CLASSES = frozenset({"accuracy", "balanced_accuracy", "auc", "f1", "average_precision"})

Given = str | Metric | Sequence[str | Metric] | Mapping[str, str | Metric]


def metrics_of(given: Given) -> dict[str, Metric]:
    """Names and functions as a dictionary. A function's name is its own; a dictionary gives others."""
    if isinstance(given, Mapping):
        return {name: _metric(each, name) for name, each in given.items()}
    listed = [given] if isinstance(given, str) or callable(given) else list(given)
    found = {_name(each): _metric(each, "metrics") for each in listed}
    if len(found) < len(listed):
        raise ConfigError(f"Task.metrics has two metrics of one name among {sorted(found)}; name them in a dictionary")
    return found


def _name(metric: str | Metric) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def _metric(given: object, where: str) -> Metric:
    if isinstance(given, str):
        if given not in METRICS:
            raise ConfigError(
                f'Task.metrics: "{given}" is unknown; use one of: {", ".join(METRICS)}, or a function (outputs, '
                "targets) → number (the loss is always measured)"
            )
        return METRICS[given]
    if not callable(given):
        raise ConfigError(f"Task.metrics: {where} is a {type(given).__name__}; give a name or a function")
    return given


def _over_labels(score: Callable[..., float], outputs: Tensor, targets: Tensor) -> float:
    """`score` of one ranking, or its mean over the classes or labels that have records on both sides."""
    truth, scores = _numpy(targets), _numpy(outputs)
    if truth.ndim == scores.ndim - 1 and scores.shape[-1] == 1:
        scores = scores[..., 0]
    if truth.shape != scores.shape:  # class indices, and one output per class
        truth, scores = truth.reshape(-1), scores.reshape(-1, scores.shape[-1])
        if scores.shape[-1] == 2:
            return _score(score, truth, scores[:, 1] - scores[:, 0])
        scores = _numpy(torch.from_numpy(scores).softmax(dim=-1))
        truth = truth[:, None] == np.arange(scores.shape[-1])
    if truth.ndim == 1:
        return _score(score, truth, scores)
    both = [k for k in range(truth.shape[1]) if 0 < truth[:, k].sum() < len(truth)]
    return float(np.mean([score(truth[:, k], scores[:, k]) for k in both])) if both else float("nan")


def _score(score: Callable[..., float], truth: Any, scores: Any) -> float:
    return float(score(truth, scores)) if len(np.unique(truth)) == 2 else float("nan")


def _classes(outputs: Tensor, targets: Tensor) -> int:
    return 2 if outputs.shape == targets.shape or outputs.shape[-1] == 1 else int(outputs.shape[-1])


def _numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _flat(tensor: Tensor) -> Any:
    return _numpy(tensor).reshape(-1)
