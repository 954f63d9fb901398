"""Which records make a learner's batch at its step t.

A draw is a function of the stream that is handed in, so a seeded run repeats it for any step on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adp2sgd.randomness.streams import Streams
from adp2sgd.tree import Inputs


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """What a step reads. `expected`: the expected number of records, which the sum is divided by. `records`: only the
    first so many records count, and the others fill up a private step of fixed work."""

    inputs: Inputs
    targets: Tensor
    expected: float
    records: int | None = None


class Batches(Protocol):
    """`expected` is what the summed gradient is divided by: never the size of the batch at hand. `rows`: how many rows
    a batch has; the expected number where that varies."""

    expected: float
    rows: int

    def draw(self, step: int) -> Tensor:
        """Rows of the shard for the learner's own step number `step`, counted from 0."""
        ...

    def counted(self, rows: Tensor) -> int | None:
        """How many of these rows, the first ones, are records; None where all are."""
        ...


class PoissonBatches:
    """Every record is in the batch with probability `rate`, independently of all others and of all other steps.

    Batches may be empty. This is the only sampler whose amplification an accountant counts.
    With `fixed_rows` every batch has that many rows: records beyond them are left out, and number `records`, which is
    no record, fills up the others. The work of a draw then does not depend on what is drawn.
    """

    def __init__(
        self, records: int, batch_size: int, streams: Streams, fixed_rows: int | None = None, *,
        declared: int | None = None,
    ) -> None:  # fmt: skip
        """`declared`: a public number that rate and divisor follow from, in place of the number of records."""
        counted = records if declared is None else declared
        self.rate = min(1.0, batch_size / counted)
        self.expected = self.rate * counted
        self.rows = round(self.expected) if fixed_rows is None else fixed_rows
        self.fixed = fixed_rows is not None
        self._records = records
        self._streams = streams

    def draw(self, step: int) -> Tensor:
        stream = self._streams("batch", step)
        if not self.fixed:
            return stream.bernoulli(self._records, self.rate)
        return _packed(stream.members(self._records, self.rate), self.rows)

    def counted(self, rows: Tensor) -> int | None:
        return int((rows < self._records).sum()) if self.fixed else None


def _packed(members: Tensor, size: int) -> Tensor:
    """The first `size` members' numbers in ascending order, filled up with len(members), by the same operations
    whoever the members are."""
    place = torch.where(members, members.cumsum(0) - 1, size).clamp(max=size)  # those left out share the last place
    packed = torch.full((size + 1,), len(members))
    return packed.scatter_(0, place, torch.arange(len(members)))[:size]


class ReshuffledBatches:
    """A fresh permutation of the shard every local epoch, cut into batches; the last, incomplete one is dropped.

    As the paper's experiments did. It has no privacy amplification, so private mode never uses it.
    """

    def __init__(self, records: int, batch_size: int, streams: Streams) -> None:
        self._size = min(batch_size, records)
        self.expected = float(self._size)
        self.rows = self._size
        self._records = records
        self._streams = streams
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def draw(self, step: int) -> Tensor:
        per_epoch = self._records // self._size
        epoch, position = divmod(step, per_epoch)
        if epoch != self._epoch:
            self._order = self._streams("epoch", epoch).permutation(self._records)
            self._epoch = epoch
        return self._order[position * self._size : (position + 1) * self._size]

    def counted(self, rows: Tensor) -> int | None:
        return None
