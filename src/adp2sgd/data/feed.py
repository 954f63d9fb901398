"""A learner's records on their way to the device: resident there where they fit, else fetched ahead of their step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from adp2sgd import tree
from adp2sgd.data.batches import Batches
from adp2sgd.data.indexed import DatasetRecords, start_reading
from adp2sgd.data.records import Records, RecordSet
from adp2sgd.device import move
from adp2sgd.tree import Inputs

SHARE = 0.5  # of the device's free memory: what one learner's records may take


class Feed(Protocol):
    """Batches, and their records as stored, on the device."""

    def draw(self, step: int) -> Tensor:
        """Choose the batch of the learner's own step number `step`; returns its rows."""
        ...

    def take(self) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the batch that was drawn last."""
        ...


def feed(records: RecordSet, batches: Batches, device: torch.device) -> Feed:
    """Resident where the records are in memory and take at most half of the device's free memory."""
    if not isinstance(records, Records):
        return Ahead(records, batches, device)
    size = tree.size(records.inputs) + tree.size(records.targets)
    fits = device.type != "cuda" or size <= SHARE * torch.cuda.mem_get_info(device)[0]
    return Resident(records, batches, device) if fits else Ahead(records, batches, device)


class Resident:
    """All records lie on the device."""

    def __init__(self, records: Records, batches: Batches, device: torch.device) -> None:
        self._records = records.to(device)
        self._batches = batches
        self._rows = torch.empty(0, dtype=torch.int64)

    def draw(self, step: int) -> Tensor:
        self._rows = self._batches.draw(step)
        return self._rows

    def take(self) -> tuple[Inputs, Tensor]:
        rows = move(self._rows, self._records.targets.device)
        return self._records.read(rows)


@dataclass(frozen=True, eq=False, repr=False)
class Arrival:
    """A batch on the device; `complete` marks the end of its copy on the copying stream."""

    inputs: Inputs
    targets: Tensor
    complete: torch.cuda.Event | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """A batch that was drawn and is being fetched."""

    step: int
    rows: Tensor
    arrival: Future[Arrival]


class Ahead:
    """Every batch is drawn before its step: while the learner works on one, a thread gathers the next ones and sends
    them to the device on a stream of its own. Records lie in host memory, or are read from a dataset by index."""

    def __init__(self, records: RecordSet, batches: Batches, device: torch.device) -> None:
        self._records = records
        self._batches = batches
        self._device = device
        self._thread = ThreadPoolExecutor(1, "records")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._orders: list[Order] = []  # of the last drawn step, and of those after it
        self._depth = 1
        if isinstance(records, DatasetRecords) and records.reader.workers:
            self._depth += records.reader.workers  # so that every worker has a batch to read
            start_reading(records)

    def draw(self, step: int) -> Tensor:
        known = {order.step: order for order in self._orders}
        wanted = range(step, step + 1 + self._depth)
        self._orders = [known.get(each) or self._order(each) for each in wanted]
        return self._orders[0].rows

    def take(self) -> tuple[Inputs, Tensor]:
        batch = self._orders[0].arrival.result()
        if batch.complete is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(batch.complete)
            for part in (*tree.tensors(batch.inputs), batch.targets):
                part.record_stream(here)  # else the copying stream could reuse the memory too early
        return batch.inputs, batch.targets

    def _order(self, step: int) -> Order:
        rows = self._batches.draw(step)
        if isinstance(self._records, DatasetRecords):
            read = self._records.fetch(rows)
            return Order(step, rows, self._thread.submit(lambda: self._sent(*read.result())))
        return Order(step, rows, self._thread.submit(self._fetch, rows))

    def _fetch(self, rows: Tensor) -> Arrival:
        assert isinstance(self._records, Records)
        gather = partial(self._gather, rows)
        return self._sent(tree.each(gather, self._records.inputs), gather(self._records.targets))

    def _sent(self, inputs: Inputs, targets: Tensor) -> Arrival:
        if self._stream is None:
            return Arrival(tree.each(lambda part: part.to(self._device), inputs), targets.to(self._device))
        with torch.cuda.stream(self._stream):
            inputs, targets = (tree.each(self._send, part) for part in (inputs, targets))
            return Arrival(inputs, targets, self._stream.record_event())

    def _send(self, part: Tensor) -> Tensor:
        pinned = part if part.is_pinned() else part.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _gather(self, rows: Tensor, source: Tensor) -> Tensor:
        out = torch.empty(len(rows), *source.shape[1:], dtype=source.dtype, pin_memory=self._stream is not None)
        return torch.index_select(source, 0, rows, out=out)
