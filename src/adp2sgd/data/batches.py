"""Which records make a learner's batch at its step t.

A draw is a function of the stream that is handed in, so a seeded run repeats it for any step on its own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from adp2sgd.privacy.streams import Streams


class Batches(Protocol):
    """`expected` is what the summed gradient is divided by: never the size of the batch at hand."""

    expected: float

    def draw(self, step: int) -> Tensor:
        """Rows of the shard for the learner's own step number `step`, counted from 0."""
        ...


class PoissonBatches:
    """Every record is in the batch with probability `rate`, independently of all others and of all other steps.

    Batches may be empty. This is the only sampler whose amplification an accountant counts.
    """

    def __init__(self, records: int, batch_size: int, streams: Streams) -> None:
        self.rate = min(1.0, batch_size / records)
        self.expected = self.rate * records
        self._records = records
        self._streams = streams

    def draw(self, step: int) -> Tensor:
        return self._streams("batch", step).bernoulli(self._records, self.rate)


class ReshuffledBatches:
    """A fresh permutation of the shard every local epoch, cut into batches; the last, incomplete one is dropped.

    As the paper's experiments did. It has no privacy amplification, so private mode never uses it.
    """

    def __init__(self, records: int, batch_size: int, streams: Streams) -> None:
        self._size = min(batch_size, records)
        self.expected = float(self._size)
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
