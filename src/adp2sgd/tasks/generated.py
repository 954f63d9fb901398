"""Tasks that need no files: handwritten digits, Gaussian clouds, a quadratic function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adp2sgd.data import synthetic
from adp2sgd.data.preparation import Affine
from adp2sgd.task import Task
from adp2sgd.tasks.options import builder


def digits(*, model: str = "mlp", **model_options: Any) -> Task:
    """1,437 + 360 images of handwritten digits, 8 × 8; models mlp, cnn and logistic."""
    train, test = synthetic.digits()
    shapes = {"cnn": {"size": 8, "channels": 1}, "mlp": {"inputs": 64}, "logistic": {"inputs": 64}}
    build = builder("digits", model, shapes, {"classes": 10, **model_options})
    return Task(model=build, train=train, test=test, prepare=Affine(8.0, -1.0))  # stored values are 0 to 16


def blobs(
    *,
    model: str = "logistic",
    records: int = 2000,
    features: int = 20,
    classes: int = 4,
    spread: float = 1.0,
    seed: int = 0,
    **model_options: Any,
) -> Task:
    """Generated Gaussian clouds, one per class, of any size; models logistic and mlp."""
    train, test = synthetic.blobs(records=records, features=features, classes=classes, spread=spread, seed=seed)
    shapes = {"logistic": {"inputs": features}, "mlp": {"inputs": features}}
    return Task(model=builder("blobs", model, shapes, {"classes": classes, **model_options}), train=train, test=test)


class Point(nn.Module):
    """The model of `quadratic`: a point in space, in float64. Its output is the difference from each input."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.position - inputs


def quadratic(*, records: int = 1000, dimension: int = 10, noise: float = 1.0, seed: int = 0) -> Task:
    """½‖w − a‖² over generated points a: the optimum is their mean, the gradient noise is known. For theory tests."""
    train, test = synthetic.quadratic(records=records, dimension=dimension, noise=noise, seed=seed)
    return Task(model=lambda: Point(dimension), train=train, test=test, loss=_half_square, prepare=Tensor.double)


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(dim=1)
