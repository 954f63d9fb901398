"""What a case is made of: a model, a loss, records, and weights that a neighbour may send."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from adp2sgd.task import Loss, cross_entropy
from honest import CLASSES, STEPS, VOCABULARY, WIDTH

RECORDS = 160  # of a case
ODD = 1  # the place of the unusual record
Source = Callable[[int], tuple[Tensor, Tensor]]
"""Number of records → inputs and targets."""


def floats(*shape: int, odd: float = 1e5, classes: int = CLASSES) -> Source:
    """Normal values and labels; the odd record is larger by a factor."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        stream = Generator().manual_seed(7)
        inputs = torch.randn(count, *shape, generator=stream)
        inputs[ODD] *= odd
        return inputs, torch.randint(classes, (count,), generator=stream)

    return draw


def regression(*shape: int, odd: float = 1e6) -> Source:
    """Normal values and targets; the odd record's target, and with it its gradient, is larger by a factor."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        stream = Generator().manual_seed(7)
        inputs, targets = (torch.randn(count, *size, generator=stream) for size in (shape, ()))
        targets[ODD] = odd
        return inputs, targets

    return draw


def tokens(classes: int = CLASSES) -> Source:
    """Sequences that end in padding; the odd record repeats one token."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        stream = Generator().manual_seed(7)
        inputs = torch.randint(1, VOCABULARY, (count, STEPS), generator=stream)
        inputs[torch.arange(STEPS) >= torch.randint(1, STEPS + 1, (count, 1), generator=stream)] = 0
        inputs[ODD] = 3
        return inputs, torch.randint(classes, (count,), generator=stream)

    return draw


def special(*values: float) -> Source:
    """Normal values; the odd record holds `values` in turn."""

    def draw(count: int) -> tuple[Tensor, Tensor]:
        inputs, targets = floats(WIDTH, odd=1.0)(count)
        inputs[ODD] = torch.tensor(values).repeat(WIDTH)[:WIDTH]
        return inputs, targets

    return draw


def gapped(count: int) -> tuple[Tensor, Tensor]:
    """A record of NaN among others that hold large values."""
    inputs, targets = floats(WIDTH, odd=1.0)(count)
    inputs[:, 0] *= 1e5
    inputs[ODD] = math.nan
    return inputs, targets


ROWS = floats(WIDTH)
SEQUENCES = floats(STEPS, WIDTH)
IMAGES = floats(2, 5, 5, odd=100.0)
LINES = floats(2, 9, odd=100.0)
TALL = regression(WIDTH)
TOKENS = tokens()
WORDS = tokens(VOCABULARY)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One model, loss and source of records.

    `clipper`: the run's `privacy.clipper`. `sizes`: of batches, beside those that every case meets. `weights`: what a
    hostile neighbour sends after the choice of the clipper, by parameter, in place. `widens`: whether the model runs in
    float64. `stateful`: a step changes the model, so that each is measured on one of its own. `exact`: False where a
    gradient is too large to be squared in float32, and may count as not finite.
    """

    about: str
    model: Callable[[], nn.Module]
    records: Source = ROWS
    loss: Loss = cross_entropy
    expect: str = "guarded"
    clipper: str = "auto"
    clip: float = 0.5
    sizes: tuple[int, ...] = ()
    weights: Callable[[Mapping[str, Tensor]], object] | None = None
    widens: bool = True
    stateful: bool = False
    exact: bool = True

    @property
    def prepare(self) -> Callable[[Tensor], Tensor]:
        return torch.Tensor.float if self.records(2)[0].is_floating_point() else _as_stored


def _as_stored(inputs: Tensor) -> Tensor:
    return inputs
