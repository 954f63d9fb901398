"""θ, the average of the learners' models, and how far the models are from it. The one place that computes either."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Mean:
    """A running average in float64. It sums differences from the first model, so equal models average exactly."""

    learners: int = 0
    _first: Tensor = field(default_factory=lambda: torch.empty(0))
    _total: Tensor = field(default_factory=lambda: torch.empty(0))
    _squares: float = 0.0

    def add(self, state: Tensor) -> None:
        """One more learner's model. The first one is kept, not copied: it must not change meanwhile."""
        if not self.learners:
            self._first, self._total = state, torch.zeros_like(state, dtype=torch.float64)
        else:
            change = state.double() - self._first
            self._total += change
            self._squares += float(change.square().sum())
        self.learners += 1

    @property
    def theta(self) -> Tensor:
        return (self._first + self._total / self.learners).to(self._first.dtype)

    @property
    def consensus(self) -> float:
        """The mean squared distance of the models from θ: (1/K) Σ ‖w_k − θ‖²."""
        shift = float((self._total / self.learners).square().sum())
        return max(0.0, self._squares / self.learners - shift)


def mean_of(states: Iterable[Tensor]) -> Mean:
    """The average of these models."""
    mean = Mean()
    for state in states:
        mean.add(state)
    return mean
