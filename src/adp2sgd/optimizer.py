"""The descent: torch's own update rules on one vector, and an exponential average of what they give.

All of it comes after the noise, so it costs no privacy. The state is local: it is never exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from adp2sgd import config

EMA = "ema"
EMA_STEPS = "ema_steps"


class Optimizer:
    """`state` holds the tensors that steps carry over, by name."""

    def __init__(self, settings: config.Optimizer, weights: Tensor, epochs: float = math.inf) -> None:
        """`epochs`: of the whole run, for schedules that end with it."""
        self.state: dict[str, Tensor] = {}
        self._settings = settings
        self._epochs = epochs
        if settings.kind != "sgd":
            self.state = {"first_moment": torch.zeros_like(weights), "second_moment": torch.zeros_like(weights)}
            self.state["steps"] = torch.zeros(())
        elif settings.momentum:
            self.state = {"velocity": torch.zeros_like(weights)}

    def track(self, model: Tensor) -> None:
        """Keep an exponential average of `model`, which is longer than the weights where buffers travel too."""
        if self._settings.ema:
            self.state |= {EMA: model.clone(), EMA_STEPS: torch.zeros(())}

    def descend(self, weights: Tensor, gradient: Tensor, epoch: float) -> None:
        """One step at a global epoch, in place."""
        settings, state = self._settings, self.state
        rate = settings.rate(epoch, self._epochs)
        if settings.kind == "sgd":
            sgd(
                [weights], [gradient], [state.get("velocity")], foreach=False, fused=False, lr=rate, maximize=False,
                weight_decay=settings.weight_decay, momentum=settings.momentum, dampening=0.0, nesterov=False,
            )  # fmt: skip
            return
        adam(
            [weights], [gradient], [state["first_moment"]], [state["second_moment"]], [], [state["steps"]],
            foreach=False, fused=False, amsgrad=False, maximize=False, beta1=settings.betas[0], beta2=settings.betas[1],
            lr=rate, weight_decay=settings.weight_decay, eps=settings.eps,
            decoupled_weight_decay=settings.kind == "adamw",
        )  # fmt: skip

    def average(self, model: Tensor) -> None:
        """Move the exponential average towards `model`. Its first steps decay faster: they remember the start less."""
        if EMA not in self.state:
            return
        steps = self.state[EMA_STEPS].add_(1).item()
        self.state[EMA].lerp_(model, 1 - min(self._settings.ema, steps / (steps + 9)))

    def evaluated(self, model: Tensor) -> Tensor:
        """The exponential average if there is one, else `model` itself."""
        return self.state.get(EMA, model)

    def copy(self) -> dict[str, Tensor]:
        """A copy of the state, for a checkpoint."""
        return {name: value.clone() for name, value in self.state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over the state of a checkpoint; where it has none, the state stays as it is."""
        for name, value in self.state.items():
            if name in state:
                value.copy_(state[name])

    def reset(self, model: Tensor) -> None:
        """As before the first step, at `model`."""
        for name, value in self.state.items():
            value.copy_(model) if name == EMA else value.zero_()
