"""Losses by name: torch's, with one number per record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from adp2sgd.errors import ConfigError

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) → one loss per record."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of class indices; a sequence (outputs [n, frames, classes]) gives the mean over its frames."""
    if outputs.dim() == 3:
        losses = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return losses.mean(dim=1)
    return functional.cross_entropy(outputs, targets, reduction="none")


def _mean(function: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of torch's `function` over all numbers of a record."""
    targets = targets.to(outputs.dtype)
    if targets.dim() == outputs.dim() - 1 and outputs.shape[-1] == 1:
        targets = targets.unsqueeze(-1)  # one output per record, and targets without that axis
    if targets.shape != outputs.shape:
        raise ConfigError(
            f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}; give both "
            "the same shape"
        )
    losses = function(outputs, targets, reduction="none")
    return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mse": partial(_mean, functional.mse_loss),
    "l1": partial(_mean, functional.l1_loss),
    "huber": partial(_mean, functional.huber_loss),
    "smooth_l1": partial(_mean, functional.smooth_l1_loss),
    "bce_with_logits": partial(_mean, functional.binary_cross_entropy_with_logits),
}


def loss_of(given: Loss | str) -> Loss:
    """The loss itself, or the one of that name."""
    if isinstance(given, str):
        if given not in LOSSES:
            raise ConfigError(
                f'Task.loss = "{given}" is unknown; use one of: {", ".join(LOSSES)}, or a function of your own that '
                "gives one number per record"
            )
        return LOSSES[given]
    if not callable(given):
        raise ConfigError(
            f"Task.loss is a {type(given).__name__}; give a function (outputs, targets) → one number per record, or "
            f"one of: {', '.join(LOSSES)}"
        )
    return given
