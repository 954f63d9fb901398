"""Batch → gradient that a learner may descend with: plain, with the paper's noise, or private."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from adp2sgd.device import Recorded, laid_out, repeatable
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.engine import Engine
from adp2sgd.privacy.noise import NoiseSource
from adp2sgd.task import Loss


@dataclass(frozen=True, eq=False)
class Gradient:
    """`vector`: the mean gradient, laid out like the weights. `buffers`: by how much the forward pass moved the float
    buffers (outside private mode; None if there are none)."""

    vector: Tensor
    buffers: Tensor | None = None


class GradientStep(Protocol):
    """Turns a batch into a gradient at the model's current weights. Owns `vector` until the next call."""

    def __call__(
        self, model: FlatModel, inputs: Tensor, targets: Tensor, expected: float, noise: NoiseSource
    ) -> Gradient:
        """`expected`: the expected batch size, which the sum is divided by."""
        ...


class PlainStep:
    """The sum of the records' gradients plus N(0, sigma²) per coordinate, divided by the expected batch.

    `sigma = 0` is SGD. `sigma > 0` is the paper's noise: nothing is clipped, so it gives **no** privacy guarantee.
    """

    def __init__(self, loss: Loss, sigma: float = 0.0, autocast: torch.dtype | None = None) -> None:
        """`autocast`: the layers run in this type. One step may serve all learners that share a model."""
        self._loss = loss
        self._sigma = sigma
        self._autocast = autocast
        self._recorded: tuple[FlatModel, Callable[[Tensor, Tensor], None]] | None = None

    def __call__(
        self, model: FlatModel, inputs: Tensor, targets: Tensor, expected: float, noise: NoiseSource
    ) -> Gradient:
        before = model.buffers.clone() if len(model.buffers) else None
        if self._recorded is None or self._recorded[0] is not model:
            work = partial(self._sum, model)
            self._recorded = (model, Recorded(work) if repeatable(model.module) else work)
        model.module.train()
        self._recorded[1](laid_out(inputs), targets)
        if self._sigma:
            noise.add_normal(model.grad, self._sigma)
        return Gradient(model.grad.div_(expected), None if before is None else model.buffers - before)

    def _sum(self, model: FlatModel, inputs: Tensor, targets: Tensor) -> None:
        """The sum of the records' gradients, into `model.grad`."""
        model.grad.zero_()
        if not len(inputs):
            return
        with torch.autocast(inputs.device.type, self._autocast) if self._autocast else nullcontext():
            losses = self._loss(model.module(inputs), targets)
        losses.sum().backward()


class PrivateStep:
    """Per-record gradients clipped to `clip_norm`, summed, plus N(0, (noise_multiplier·clip_norm)²), divided by the
    expected batch.

    Guarantee: one Gaussian mechanism of sensitivity `clip_norm`, whatever the model, the batch and its size. (The
    engine takes a large Poisson batch in pieces; the noise is added once.)
    """

    def __init__(self, engine: Engine, *, clip_norm: float, noise_multiplier: float) -> None:
        self._engine = engine
        self._clip_norm = clip_norm
        self._noise_multiplier = noise_multiplier

    def __call__(
        self, model: FlatModel, inputs: Tensor, targets: Tensor, expected: float, noise: NoiseSource
    ) -> Gradient:
        model.module.train()  # an evaluation may have left it otherwise; the refusals were checked in this mode
        total = self._engine.clipped_sum(inputs, targets, self._clip_norm).total
        noise.add_normal(total, self._noise_multiplier * self._clip_norm)
        return Gradient(total.div_(expected))
