"""A learner's batches: drawn, fetched, and made into what the model reads."""

from __future__ import annotations

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.data.batches import Batch, Batches
from adp2sgd.data.feed import feed
from adp2sgd.data.records import RecordSet
from adp2sgd.randomness.streams import Streams
from adp2sgd.task import Task


class Sampler:
    """Draws the rows of a batch, then gives their records: prepared, repeated `copies` times, augmented."""

    def __init__(
        self,
        task: Task,
        records: RecordSet,
        batches: Batches,
        streams: Streams,
        device: torch.device,
        *,
        copies: int = 1,
    ) -> None:
        """`copies`: rows that a batch holds of each record, augmented independently."""
        self.task = task
        self.batches = batches
        self.rows = torch.empty(0, dtype=torch.int64)  # of the batch that was drawn last
        self._feed = feed(records, batches, device)
        self._streams = streams
        self._device = device
        self._copies = copies
        self._step = 0
        self._blank = records.blank()

    def draw(self, step: int) -> Tensor:
        """Choose the batch of the learner's own step number `step`; returns its rows."""
        self._step = step
        self.rows = self._feed.draw(step)
        return self.rows

    def batch(self) -> Batch:
        """The batch that was drawn last."""
        stored, targets = self._feed.take()
        inputs = self.task.prepare(stored)
        if self._copies > 1:
            inputs = tree.each(self._repeated, inputs)
            targets = self._repeated(targets)
        if self.task.augment is not None and tree.rows(inputs):
            inputs = self.task.augment(inputs, self._streams("augment", self._step).torch_generator(self._device))
        return Batch(inputs, targets, self.batches.expected, self.batches.counted(self.rows))

    def blank(self) -> Batch:
        """Zeros in the shape of a batch."""
        rows = self.batches.rows
        inputs, targets = self._blank
        inputs = tree.each(lambda part: self._zeros(part, rows * self._copies), inputs)
        targets = self._zeros(targets, rows * self._copies)
        return Batch(
            self.task.prepare(inputs), targets, self.batches.expected, self.batches.counted(torch.arange(rows))
        )

    def _repeated(self, part: Tensor) -> Tensor:
        return part.repeat_interleave(self._copies, dim=0)

    def _zeros(self, part: Tensor, rows: int) -> Tensor:
        return part.new_zeros(rows, *part.shape[1:], device=self._device)
