"""How a learner descends, and its learning rate as a function of global progress: the one place for schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from adp2sgd.errors import ConfigError
from adp2sgd.settings import Section, one_of, require

MOST_RATE = 1e30  # beyond it float32 has no numbers for a step
KINDS = ("sgd", "adam", "adamw")
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: (1.0 + math.cos(math.pi * share)) / 2,
}
"""Name → the factor of `lr` at a share of the run after the warm-up, in [0, 1]."""


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
    """The descent of every learner, after the noise. The learning rate is a function of global progress in epochs."""

    WHERE: ClassVar[str] = "optimizer."

    kind: str = "sgd"  # or adam, adamw: as in torch.optim
    lr: float = 0.1
    schedule: str | tuple[tuple[float, float], ...] = ()  # constant, linear, cosine; or (from epoch … on, rate)
    warmup: Warmup = field(default_factory=Warmup)
    decay: float = 1.0  # factor per epoch after the warm-up
    momentum: float = 0.0  # sgd
    betas: tuple[float, float] = (0.9, 0.999)  # adam, adamw
    eps: float = 1e-8  # adam, adamw
    weight_decay: float = 0.0  # adamw: apart from the gradient; else added to it
    ema: float = 0.0  # decay per own step of the average of weights that is evaluated and exported; 0: none

    def _check(self) -> None:
        one_of("optimizer.kind", self.kind, KINDS)
        require(0 < self.lr <= MOST_RATE, "optimizer.lr", self.lr, "use a positive number, like 0.1")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "use a number in [0, 1)")
        require(0 <= self.weight_decay <= MOST_RATE, "optimizer.weight_decay", self.weight_decay, "use 0 or more")
        require(0 < self.decay <= 1, "optimizer.decay", self.decay, "use a number in (0, 1]")
        require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", list(self.betas), "use two numbers in [0, 1)")
        require(0 < self.eps <= 1, "optimizer.eps", self.eps, "use a small positive number, like 1e-8")
        require(0 <= self.ema < 1, "optimizer.ema", self.ema, "use a number in [0, 1), like 0.99")
        if self.momentum and self.kind != "sgd":
            raise ConfigError(f'optimizer.momentum is for kind = "sgd"; with "{self.kind}" set optimizer.betas')
        if isinstance(self.schedule, str):
            one_of("optimizer.schedule", self.schedule, SCHEDULES)
            if self.decay != 1:
                raise ConfigError(f'optimizer.decay and schedule = "{self.schedule}" exclude each other; remove one')
        epochs = [epoch for epoch, _ in self.rates]
        require(
            epochs == sorted(epochs) and all(e >= 0 and 0 < lr <= MOST_RATE for e, lr in self.rates),
            "optimizer.schedule",
            [list(pair) for pair in self.rates],
            "list [epoch, rate] pairs in order of epoch, with positive rates",
        )

    @property
    def rates(self) -> tuple[tuple[float, float], ...]:
        """The pairs of `schedule`: from which epoch on which rate holds. None where it is a name."""
        return () if isinstance(self.schedule, str) else self.schedule

    def rate(self, epoch: float, epochs: float = math.inf) -> float:
        """The learning rate at a global epoch of a run of `epochs`: by the pairs of `schedule` from the first one on,
        before that the warm-up, then a named schedule or a geometric decay."""
        past = [lr for start, lr in self.rates if epoch >= start]
        if past:
            return past[-1]
        if epoch < self.warmup.epochs:
            return self.warmup.from_ + (self.lr - self.warmup.from_) * epoch / self.warmup.epochs
        after = epoch - self.warmup.epochs
        if isinstance(self.schedule, str):
            whole = max(epochs - self.warmup.epochs, 1e-9)
            return self.lr * SCHEDULES[self.schedule](min(1.0, after / whole))
        return self.lr * math.pow(self.decay, after)
