"""A learner's records on their way to the device: resident there where they fit, else fetched one step ahead."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adp2sgd.data.batches import Batches
from adp2sgd.data.records import Records
from adp2sgd.device import move

SHARE = 0.5  # of the device's free memory: what one learner's records may take


class Feed(Protocol):
    """Batches, and their records as stored, on the device."""

    def draw(self, step: int) -> Tensor:
        """Choose the batch of the learner's own step number `step`; returns its rows."""
        ...

    def take(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the batch that was drawn last."""
        ...


def feed(records: Records, batches: Batches, device: torch.device) -> Feed:
    """Resident where the records take at most half of the device's free memory."""
    size = sum(part.numel() * part.element_size() for part in (records.inputs, records.targets))
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

    def take(self) -> tuple[Tensor, Tensor]:
        rows = move(self._rows, self._records.targets.device)
        return self._records.inputs[rows], self._records.targets[rows]


@dataclass(frozen=True, eq=False, repr=False)
class Arrival:
    """A batch on the device; `complete` marks the end of its copy on the copying stream."""

    inputs: Tensor
    targets: Tensor
    complete: torch.cuda.Event | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """A batch that was drawn and is being fetched."""

    step: int
    rows: Tensor
    arrival: Future[Arrival]


class Ahead:
    """Records stay in host memory, and every batch is drawn one step early: while the learner works on one, a thread
    gathers the next in pinned memory and sends it to the device on a stream of its own."""

    def __init__(self, records: Records, batches: Batches, device: torch.device) -> None:
        self._records = records
        self._batches = batches
        self._device = device
        self._thread = ThreadPoolExecutor(1, "records")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._orders: list[Order] = []  # of the last drawn step, and of the one after it

    def draw(self, step: int) -> Tensor:
        known = [order for order in self._orders if order.step == step]
        now = known[0] if known else self._order(step)
        self._orders = [now, self._order(step + 1)]
        return now.rows

    def take(self) -> tuple[Tensor, Tensor]:
        batch = self._orders[0].arrival.result()
        if batch.complete is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(batch.complete)
            batch.inputs.record_stream(here)  # else the copying stream could reuse the memory too early
            batch.targets.record_stream(here)
        return batch.inputs, batch.targets

    def _order(self, step: int) -> Order:
        rows = self._batches.draw(step)
        return Order(step, rows, self._thread.submit(self._fetch, rows))

    def _fetch(self, rows: Tensor) -> Arrival:
        inputs, targets = self._gather(self._records.inputs, rows), self._gather(self._records.targets, rows)
        if self._stream is None:
            return Arrival(inputs.to(self._device), targets.to(self._device))
        with torch.cuda.stream(self._stream):
            inputs, targets = (part.to(self._device, non_blocking=True) for part in (inputs, targets))
            return Arrival(inputs, targets, self._stream.record_event())

    def _gather(self, source: Tensor, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), *source.shape[1:], dtype=source.dtype, pin_memory=self._stream is not None)
        return torch.index_select(source, 0, rows, out=out)
