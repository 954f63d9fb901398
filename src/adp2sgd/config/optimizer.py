"""How a learner descends, and its learning rate as a function of global progress."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from adp2sgd.settings import Section, require

MOST_RATE = 1e30  # beyond it float32 has no numbers for a step


@dataclass(frozen=True, kw_only=True)
class Warmup(Section):
    """Linear from `from_` (in TOML: from) to `optimizer.lr` over the first `epochs`."""

    WHERE: ClassVar[str] = "optimizer.warmup."

    epochs: float = 0.0
    from_: float = 0.0

    def _check(self) -> None:
        require(self.epochs >= 0, "optimizer.warmup.epochs", self.epochs, "use 0 or more")
        require(0 <= self.from_ <= MOST_RATE, "optimizer.warmup.from", self.from_, "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """SGD. The learning rate is a function of global progress in epochs."""

    WHERE: ClassVar[str] = "optimizer."

    lr: float = 0.1
    schedule: tuple[tuple[float, float], ...] = ()  # (from epoch … on, rate)
    warmup: Warmup = field(default_factory=Warmup)
    decay: float = 1.0  # factor per epoch after the warm-up
    momentum: float = 0.0
    weight_decay: float = 0.0

    def _check(self) -> None:
        require(0 < self.lr <= MOST_RATE, "optimizer.lr", self.lr, "use a positive number, like 0.1")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "use a number in [0, 1)")
        require(0 <= self.weight_decay <= MOST_RATE, "optimizer.weight_decay", self.weight_decay, "use 0 or more")
        require(0 < self.decay <= 1, "optimizer.decay", self.decay, "use a number in (0, 1]")
        epochs = [epoch for epoch, _ in self.schedule]
        require(
            epochs == sorted(epochs) and all(e >= 0 and 0 < lr <= MOST_RATE for e, lr in self.schedule),
            "optimizer.schedule",
            [list(pair) for pair in self.schedule],
            "list [epoch, rate] pairs in order of epoch, with positive rates",
        )

    def rate(self, epoch: float) -> float:
        """The learning rate at a global epoch: steps if `schedule` says so, else warm-up and then geometric decay."""
        past = [lr for start, lr in self.schedule if epoch >= start]
        if past:
            return past[-1]
        if epoch < self.warmup.epochs:
            return self.warmup.from_ + (self.lr - self.warmup.from_) * epoch / self.warmup.epochs
        return self.lr * math.pow(self.decay, epoch - self.warmup.epochs)
