"""The descent: torch's own update rules on one vector, and the learning rate as a function of global progress.

All of it comes after the noise, so it costs no privacy. The state is local: it is never exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from adp2sgd import config


class Optimizer:
    """`state` holds the vectors that steps carry over, by name; they are as long as the weights."""

    def __init__(self, settings: config.Optimizer, weights: Tensor) -> None:
        self.state: dict[str, Tensor] = {"velocity": torch.zeros_like(weights)} if settings.momentum else {}
        self._settings = settings

    def rate(self, epoch: float) -> float:
        """The learning rate at a global epoch."""
        return self._settings.rate(epoch)

    def descend(self, weights: Tensor, gradient: Tensor, rate: float) -> None:
        """One step, in place."""
        settings = self._settings
        sgd(
            [weights], [gradient], [self.state.get("velocity")], foreach=False, fused=False, lr=rate, maximize=False,
            weight_decay=settings.weight_decay, momentum=settings.momentum, dampening=0.0, nesterov=False,
        )  # fmt: skip

    def copy(self) -> dict[str, Tensor]:
        """A copy of the state, for a checkpoint."""
        return {name: value.clone() for name, value in self.state.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the state of a checkpoint."""
        for name, value in self.state.items():
            value.copy_(state[name])

    def reset(self) -> None:
        """As before the first step."""
        for value in self.state.values():
            value.zero_()
