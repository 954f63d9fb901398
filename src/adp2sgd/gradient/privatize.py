"""Batch → gradient that a learner may descend with: plain, with the paper's noise, or private."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adp2sgd import tree
from adp2sgd.data.batches import Batch
from adp2sgd.device import CapturedGraphs, laid_out, repeatable
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.clipper import Clipper
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.task import Loss
from adp2sgd.tree import Inputs

SLOPE = 0.1
"""So wide, as a part of the clip norm, is the passage from "below" to "above" in the count of norms."""
SPAN = 1e6
"""The clip norm stays within this factor of where it started."""
MOST_CHANGE = 1.0
"""Of the clip norm's logarithm in one step, whatever the count's noise."""


@dataclass(frozen=True, eq=False)
class Gradient:
    """`vector`: the mean gradient, laid out like the weights. `buffers`: by how much the forward pass moved the float
    buffers (outside private mode; None if there are none)."""

    vector: Tensor
    buffers: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Summed:
    """The sum of a batch's gradients before the noise: it goes nowhere but into `noise`. `norms`: of the records'
    gradients, where they are clipped. `buffers`: as in `Gradient`."""

    total: Tensor
    norms: Tensor | None = None
    buffers: Tensor | None = None


class GradientStep(Protocol):
    """Turns a batch into a gradient at the model's current weights: `clip`, then `noise`."""

    def clip(self, model: FlatModel, batch: Batch) -> Summed:
        """The sum of the records' gradients, each clipped where the step is private. Overwritten by the next call."""
        ...

    def noise(self, model: FlatModel, summed: Summed, batch: Batch, source: NoiseSource) -> Gradient:
        """The sum plus noise, divided by the expected size of the batch. Overwritten by the next call."""
        ...


class PlainStep:
    """The sum of the records' gradients plus N(0, sigma²) per coordinate, divided by the expected batch.

    `sigma = 0` is SGD. `sigma > 0` is the paper's noise: nothing is clipped, so it gives **no** privacy guarantee.
    """

    def __init__(
        self, loss: Loss, sigma: float = 0.0, autocast: torch.dtype | None = None, *,
        network: Callable[[nn.Module], Callable[..., Any]] = lambda module: module,
    ) -> None:  # fmt: skip
        """`autocast`: the layers run in this type; `network`: what is made of the module to run it (say, compiled).
        One step may serve all learners that share a model."""
        self._loss = loss
        self._network = network
        self._sigma = sigma
        self._autocast = autocast
        self._captured: tuple[FlatModel, Callable[[Inputs, Tensor], None]] | None = None

    def clip(self, model: FlatModel, batch: Batch) -> Summed:
        """Nothing is clipped. The sum lies in `model.grad`."""
        if self._captured is None or self._captured[0] is not model:
            work = partial(self._sum, model, self._network(model.module))
            captured = isinstance(batch.inputs, Tensor) and repeatable(model.module, self._loss)
            self._captured = (model, CapturedGraphs(work) if captured else work)
        before = model.buffers.clone() if len(model.buffers) else None
        model.module.train()
        self._captured[1](tree.each(laid_out, batch.inputs), batch.targets)
        return Summed(model.grad, buffers=None if before is None else model.buffers - before)

    def noise(self, model: FlatModel, summed: Summed, batch: Batch, source: NoiseSource) -> Gradient:
        total = summed.total
        if self._sigma and total.is_cuda:  # it promises nothing, so the fast normals in float32 will do
            generator = source.torch_generator(model.device)
            total.add_(torch.randn(len(total), device=model.device, generator=generator), alpha=self._sigma)
        elif self._sigma:
            source.add_normal(total, self._sigma)
        return Gradient(total.div_(batch.expected), summed.buffers)

    def _sum(self, model: FlatModel, network: Callable[..., Any], inputs: Inputs, targets: Tensor) -> None:
        """The sum of the records' gradients, into `model.grad`."""
        model.grad.zero_()
        if not len(targets):
            return
        with torch.autocast(targets.device.type, self._autocast) if self._autocast else nullcontext():
            losses = self._loss(tree.call(network, inputs), targets)
        losses.sum().backward()


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How a learner's clip norm follows the `quantile` of its records' gradient norms, from a noised count of them.

    `count_noise`: the standard deviation of the noise on that count, to which a record adds at most 1/2 in absolute
    value. The clip norm stays within a factor `SPAN` of its `start`.
    """

    quantile: float
    rate: float
    count_noise: float
    start: float

    def next(self, clip_norm: float, norms: Tensor, expected: float, noise: NoiseSource) -> float:
        """The clip norm after a step that clipped to `clip_norm`. Sees the norms only through the noised count."""
        count = balance(norms, clip_norm).view(1).cpu()
        noise.add_normal(count, self.count_noise)
        share = 0.5 + count.item() / expected
        change = min(max(self.rate * (self.quantile - share), -MOST_CHANGE), MOST_CHANGE)
        return min(max(clip_norm * math.exp(change), self.start / SPAN), self.start * SPAN)


def balance(norms: Tensor, clip_norm: float) -> Tensor:
    """Σ ±1/2 over records: + for a norm below `clip_norm`, − above it and where it is infinite; in float64.

    Guarantee: one record more or less moves it by at most 1/2. A norm's last bit depends on the size of the batch, and
    a neighbour may send weights that put all norms at `clip_norm`; hence no jump there, but a slope `SLOPE` wide.
    """
    return ((1 - norms.double() / clip_norm) / SLOPE).clamp(-0.5, 0.5).sum()


class PrivateStep:
    """Per-record gradients clipped to `clip_norm`, summed, plus N(0, (noise_multiplier·clip_norm)²), divided by the
    expected batch. With `adaptation` the step then moves `clip_norm`, which is public and one learner's own.

    Guarantee: one Gaussian mechanism of sensitivity `clip_norm`, whatever the model, the batch and its size. (The
    clipper takes a large Poisson batch in pieces; the noise is added once.) With `adaptation` the noised count belongs
    to it: both together are one Gaussian of noise multiplier `with_count(noise_multiplier, count_noise)`.
    """

    def __init__(
        self, clipper: Clipper, *, clip_norm: float, noise_multiplier: float, adaptation: Adaptation | None = None
    ) -> None:
        self.clip_norm = clip_norm
        self._clipper = clipper
        self._noise_multiplier = noise_multiplier
        self._adaptation = adaptation

    def clip(self, model: FlatModel, batch: Batch) -> Summed:
        model.module.train()  # an evaluation may have left it otherwise; the refusals were checked in this mode
        found = self._clipper.clipped_sum(batch.inputs, batch.targets, self.clip_norm, batch.records)
        if batch.records is None:
            return Summed(found.total, found.norms)
        # What fills up the batch is counted neither above nor below the clip norm.
        counted = torch.arange(len(found.norms), device=found.norms.device) < batch.records
        return Summed(found.total, torch.where(counted, found.norms.double(), self.clip_norm))

    def noise(self, model: FlatModel, summed: Summed, batch: Batch, source: NoiseSource) -> Gradient:
        scale = self._noise_multiplier * self.clip_norm
        source.add_normal(summed.total, scale, out=model.grad, divisor=batch.expected)
        if self._adaptation is not None and summed.norms is not None:
            self.clip_norm = self._adaptation.next(self.clip_norm, summed.norms, batch.expected, source)
        return Gradient(model.grad)
