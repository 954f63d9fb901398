"""Synthetic batches for probes: a few watched records among others, whose values must not affect them.

A coupling of records often shows only beside particular values: missing ones, marker values, outliers, records that end
early, duplicates. So every kind of record is watched alone and among others of every kind. All values are drawn here,
on the CPU. Of the data only the dtype and the shape of a row are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

SIZE = 21  # large enough that one record can lie 3 standard deviations from the mean
WATCHED = [4, 11, 16, 20]  # mostly late rows: code that limits a count acts on those
WIDEST = 2**16  # values of an integer that are tried
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, ArithmeticError, AttributeError)


@dataclass(frozen=True)
class Kind:
    """Random values, about a third of them `special`. Values and lengths use the first `part` of their range (integers
    are 0 or 1 if it is less than the whole)."""

    special: tuple[float, ...] = ()
    part: float = 1.0


ORDINARY, SHORT = Kind(), Kind(part=0.25)
FLOATS = (ORDINARY, SHORT, Kind((-1, 0, 1, -999, 300, -300)), Kind((math.nan,)))
INTEGERS = (ORDINARY, SHORT, Kind((-1,)), Kind((-100,)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of the dtype and shape of those of `like`: floats between 0 and 1, integers below `top`."""

    like: Tensor
    top: int = 2

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return FLOATS if self.like.is_floating_point() else INTEGERS

    def widened(self, accepts: Callable[[Tensor], object]) -> Rows:
        """With the largest range of integers that `accepts` takes without an error."""
        if self.like.is_floating_point() or self.like.dtype == torch.bool:
            return self

        def fails(top: int) -> bool:
            try:
                accepts(torch.full_like(self.draw(ORDINARY, 1, Generator()), top - 1))
            except FAILURES:
                return True
            return False

        low, high = 2, min(WIDEST, torch.iinfo(self.like.dtype).max + 1)
        if not fails(high):
            return Rows(self.like, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(middle) else (middle, high)
        return Rows(self.like, low)

    def draw(self, kind: Kind, count: int, generator: Generator) -> Tensor:
        shape = (count, *self.like.shape[1:])
        if self.like.is_floating_point():
            rows = kind.part * torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            rows = torch.randint(0, self.top if kind.part == 1 else 2, shape, generator=generator)
        if kind.special:
            special = torch.tensor(kind.special, dtype=rows.dtype)[
                torch.randint(0, len(kind.special), shape, generator=generator)
            ]
            rows = torch.where(torch.rand(shape, generator=generator) < 1 / 3, special, rows)
        if rows.dim() > 1:
            rows[:, math.ceil(kind.part * rows.shape[1]) :] = 0
        return rows.to(self.like.dtype)

    def watched(self, kind: Kind, generator: Generator) -> Tensor:
        """Rows of a kind. Ordinary ones lie in the middle half of their range, so they are neither the largest nor the
        smallest of a batch. Every other row holds a special value."""
        rows = self.draw(kind, len(WATCHED), generator)
        if kind.special:
            rows.view(len(rows), -1)[:, :1] = kind.special[0]
        if kind != ORDINARY:
            return rows
        return 0.25 + rows / 2 if rows.is_floating_point() else self.top // 4 + rows.div(2, rounding_mode="floor")

    def crowd(self, watched: Tensor, kind: Kind, generator: Generator) -> Tensor:
        """The watched rows among rows of a kind, with a copy of one of them unless the others are ordinary."""
        rows = self.draw(kind, SIZE, generator)
        rows[WATCHED] = watched
        if kind != ORDINARY:
            rows[0] = watched[-1]
        return rows
