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

from adp2sgd import tree
from adp2sgd.tree import Inputs

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


@dataclass(frozen=True, eq=False)
class Trees:
    """Rows for every tensor of `like`: a tensor, or a dictionary or tuple of tensors. Kinds are numbered, and the first
    is the ordinary one."""

    like: Inputs
    parts: tuple[Rows, ...]
    kinds = range(len(FLOATS))

    @classmethod
    def of(cls, like: Inputs) -> Trees:
        blank = tree.each(lambda part: part[:0].cpu(), like)
        return cls(blank, tuple(Rows(part) for part in tree.tensors(blank)))

    def widened(self, accepts: Callable[[Inputs], object]) -> Trees:
        """See `Rows.widened`; one tensor after the other."""
        found = self
        for at, rows in enumerate(self.parts):

            def alone(values: Tensor, at: int = at, found: Trees = found) -> object:
                drawn = tree.tensors(found.draw(0, 1, Generator()))
                given = iter([*drawn[:at], values, *drawn[at + 1 :]])
                return accepts(tree.each(lambda _: next(given), self.like))

            found = Trees(self.like, (*found.parts[:at], rows.widened(alone), *self.parts[at + 1 :]))
        return found

    def draw(self, kind: int, count: int, generator: Generator) -> Inputs:
        return self._each(lambda rows, _: rows.draw(rows.kinds[kind], count, generator), self.like)

    def watched(self, kind: int, generator: Generator) -> Inputs:
        return self._each(lambda rows, _: rows.watched(rows.kinds[kind], generator), self.like)

    def crowd(self, watched: Inputs, kind: int, generator: Generator) -> Inputs:
        return self._each(lambda rows, part: rows.crowd(part, rows.kinds[kind], generator), watched)

    def _each(self, function: Callable[[Rows, Tensor], Tensor], given: Inputs) -> Inputs:
        parts = iter(self.parts)
        return tree.each(lambda part: function(next(parts), part), given)
