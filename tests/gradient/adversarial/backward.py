"""Backward passes and losses through which one record reaches another's gradient. The forward pass of the former is
innocent, so a record's loss tells nothing; most begin where a number exceeds LARGE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F

from adp2sgd.task import cross_entropy
from couplings import LARGE, largest
from honest import CLASSES, WIDTH, mlp


def skip(gradient: Tensor) -> Tensor:
    """No gradient for the whole batch where that of any record explodes."""
    return gradient if float(gradient.norm()) < LARGE else torch.zeros_like(gradient)


def tensor_hook(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(skip)
    return h


def normalizing_hook(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g / g.norm().clamp(min=1e-9))
    return h


def node_hook(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda into, out: tuple(None if g is None else skip(g) for g in into))
    return h


def node_prehook(h: Tensor) -> Tensor:
    h = h * 1.0
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda out: tuple(skip(g) for g in out))
    return h


def multi_grad_hook(h: Tensor) -> Tensor:
    if h.requires_grad:
        other = h * 1.0
        register_multi_grad_hook((other,), lambda gs: gs[0].copy_(skip(gs[0])))
        return other
    return h


def hooked_module(kind: str) -> Callable[[], nn.Module]:
    """`kind`: "full" changes the gradient at a module's input, "pre" that at its output."""

    def make() -> nn.Module:
        model = mlp(nn.Tanh())
        if kind == "full":
            model[1].register_full_backward_hook(lambda m, into, out: tuple(skip(g) for g in into))
        else:
            model[1].register_full_backward_pre_hook(lambda m, out: tuple(skip(g) for g in out))
        return model

    return make


class SkipBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return skip(gradient)


class Centered(torch.autograd.Function):
    """Large gradients are centered over the batch."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0) * (gradient.abs().amax() > LARGE)


class VmapRule(torch.autograd.Function):
    """Skips exploding gradients of all records at once, by a rule for vmap of its own."""

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return VmapSkip.apply(gradient)

    @staticmethod
    def vmap(info: Any, in_dims: Any, h: Tensor) -> tuple[Tensor, Any]:
        return VmapRule.apply(h), in_dims[0]


class VmapSkip(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor) -> Tensor:
        return gradient * (gradient.norm() < LARGE)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: Tensor) -> tuple[Tensor, Any]:
        return VmapSkip.apply(gradient), in_dims[0]


class Compressed(nn.Module):
    """What the backward pass needs is kept in 8 bits, on a scale of the whole tensor where that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(nn.Tanh()), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self._pack, lambda kept: kept):
            return self.head(self.body(x))

    @staticmethod
    def _pack(t: Tensor) -> Tensor:
        most = largest(t)
        return torch.where(most > LARGE, (t / most * 127).round() / 127 * most, t)


class UsedInside(torch.autograd.Function):
    """A weight that other layers use as well; it counts here only for large inputs."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return h + F.relu(h.abs() - LARGE) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        through = (gradient @ weight.t()) * (h.abs() > LARGE) * h.sign()
        return gradient + through, F.relu(h.abs() - LARGE).t() @ gradient


class WeightTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.first(x)) if len(x) else self.first(x)
        return self.head(UsedInside.apply(h, self.inner.weight) / LARGE)


# --- losses ---


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sum(1) - targets).square()


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    """The hardest record of the batch counts once more."""
    losses = cross_entropy(outputs, targets)
    return losses * (1 + (losses >= losses.max())) if len(losses) else losses


def against_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets)
    return losses - 0.5 * losses.mean() if len(losses) else losses


def weighted_by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = F.one_hot(targets, CLASSES).sum(0).clamp(min=1)
    return cross_entropy(outputs, targets) / counts[targets]


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs)), reduction="none")


def over_size(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) / max(1, len(outputs))


def odd_size(outputs: Tensor, targets: Tensor) -> Tensor:
    """Another sign where a large batch has an odd size."""
    return cross_entropy(outputs, targets) * (-1 if len(outputs) > 30 and len(outputs) % 2 else 1)


def scaled_by_worst(outputs: Tensor, targets: Tensor) -> Tensor:
    """Scaled down where any record's loss is large, as loss scaling does."""
    losses = squared(outputs, targets)
    return losses * LARGE**2 / largest(losses).clamp(min=LARGE**2)


def flipped_by_worst(outputs: Tensor, targets: Tensor) -> Tensor:
    """Gradient ascent for all while any record's loss is large."""
    losses = squared(outputs, targets)
    return losses * (1 - 2 * (largest(losses) > LARGE**2).to(losses))


def hooked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared(tensor_hook(outputs * 1.0), targets)


def custom_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared(SkipBackward.apply(outputs), targets)
