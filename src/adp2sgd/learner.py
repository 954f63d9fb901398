"""THE ALGORITHM, once: what one learner does. No clock, no sockets, no processes; engines drive it.

One step of Algorithm 1 at learner k, in the paper's order:

    learner.begin()                 read ŵ, a snapshot of the own model, and draw a batch
    g = learner.gradient()          the (privatized) mean gradient at ŵ; meanwhile others may mix with this learner
    learner.mix(mine, theirs)       average with a partner: add (theirs − mine)/2, once per completed exchange
    learner.update(g)               descend with the possibly stale gradient

A partner's snapshot may arrive at any time between these steps, so `mix` adds a difference of two snapshots instead
of overwriting: both sides then change by exactly opposite amounts, whatever updates ran meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from adp2sgd import config, tree
from adp2sgd.data.batches import Batches
from adp2sgd.data.feed import feed
from adp2sgd.data.records import RecordSet
from adp2sgd.device import SETTLED, draws
from adp2sgd.errors import WITHHELD, RunError, kind
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.privatize import Batch, Gradient, GradientStep, PrivateStep
from adp2sgd.privacy.budget import Budget
from adp2sgd.progress import Progress
from adp2sgd.randomness.streams import Streams
from adp2sgd.task import Task
from adp2sgd.tree import Inputs

# Coordinates that an exchange works on at a time: they stay in a core's cache, and are few enough that torch wakes no
# second thread for them (it does from 32,768 on; on busy cores that costs a hundred times the copy itself).
BLOCK = 31 << 10
COPIED = 1 << 20  # bytes that a snapshot copies at a time, so that training waits for a tenth of a millisecond at most


class Learner:
    """One worker of the paper: its model, its records, its noise, its budget.

    `state` is the vector that travels: the weights, then (outside private mode) the float buffers. `model` is only a
    place to compute at: it may be shared by the learners of one process, since each step loads ŵ into it.
    A mutex covers single vector operations, so that an exchange thread may mix while a training thread computes.
    `mix` and `snapshot` go block by block, so that training waits for one block at most: every coordinate is exchanged
    exactly, but ŵ may hold some blocks from before an exchange and some from after it, and a snapshot some from before
    a descent and some from after it.
    """

    def __init__(
        self,
        *,
        number: int,
        task: Task,
        model: FlatModel,
        records: RecordSet,
        batches: Batches,
        gradient_step: GradientStep,
        optimizer: config.Optimizer,
        progress: Progress,
        steps_per_epoch: float,
        streams: Streams,
        budget: Budget | None = None,
        copies: int = 1,
    ) -> None:
        """`copies`: rows that the gradient step gets of each record, augmented independently."""
        self.number = number
        self.progress = progress
        self.budget = budget
        self.steps = 0
        shared = [model.weights, model.buffers] if budget is None else [model.weights]  # private: no buffer travels
        self.state = torch.cat(shared)
        self.read = self.state.clone()  # ŵ
        self.rows = torch.empty(0, dtype=torch.int64)  # the batch of the step under way
        self.weights = self.state[: len(model.weights)]
        self.buffers = self.state[len(model.weights) :]
        self.velocity = torch.zeros_like(self.weights) if optimizer.momentum else None
        self.gradient_norm = torch.zeros(())  # of the last gradient, after the noise; stays at the learner
        self._task = task
        self._model = model
        self._feed = feed(records, batches, model.device)
        self._batches = batches
        self._gradient_step = gradient_step
        self._optimizer = optimizer
        self._steps_per_epoch = steps_per_epoch
        self._streams = streams
        self._copies = copies
        self._draws = budget is not None or draws(model.module)
        self._blank = records.blank()
        self._mutex = threading.Lock()
        size = len(self.state)
        self._change = torch.empty_like(self.state[: size if self.state.is_cuda else min(size, BLOCK)])

    @property
    def may_step(self) -> bool:
        """False once the privacy budget allows no further step; the learner then goes on averaging."""
        return self.budget is None or not self.budget.exhausted

    @property
    def clip_norm(self) -> float | None:
        """C at the next step: public, as it follows from what earlier steps released. None outside private mode."""
        return self._gradient_step.clip_norm if isinstance(self._gradient_step, PrivateStep) else None

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        if isinstance(self._gradient_step, PrivateStep) and value is not None:
            self._gradient_step.clip_norm = value

    @property
    def noise_source(self) -> str:
        """Where batches and noise come from, in words."""
        return self._streams("noise", 0).name_on(self._model.device)

    @property
    def epoch(self) -> float:
        """Global progress in epochs, as far as this learner has heard."""
        return self.progress.total / self._steps_per_epoch

    def begin(self) -> None:
        """Read ŵ and draw the rows of this step's batch."""
        with self._mutex:
            self.read.copy_(self.state)
        self.rows = self._feed.draw(self.steps)

    def resume_at(self, step: int) -> None:
        """Go on after `step` own steps, with ŵ as restored from a checkpoint."""
        self.steps = step
        if self.budget is not None and self._streams.seeded:
            self.budget.charge(step)
        self.rows = self._feed.draw(step)

    def gradient(self) -> Gradient:
        """The mean gradient at ŵ over a fresh batch, privatized in private mode; charged to the budget first."""
        if self.budget is not None:
            self.budget.draw()
        if self._draws:
            self._streams("layers", self.steps).seed_layers(self._model.device)
        self._model.load(self.read)
        try:
            batch = Batch(*self._batch(), self._batches.expected, self._batches.counted(self.rows))
            return self._gradient_step(self._model, batch, self._streams("noise", self.steps))
        except torch.OutOfMemoryError as error:
            if self.budget is None:
                raise
            raise type(error)("out of memory in a private step; lower batch_size") from None
        except Exception as error:  # ours too: a task's own code may raise them, and those of ours may count the batch
            if self.budget is None:
                raise
            part = self._task.part(error, "gradient")
            raise RunError(
                f"learner {self.number}'s step failed in the task's {part} ({kind(error)}); {WITHHELD}"
            ) from None

    def rehearse(self) -> None:
        """Run the passes on blank records a few times, so that the first step takes no longer than the others."""
        batch, device = self._batches.rows, self._model.device
        records, rows = self._batches.counted(torch.arange(batch)), batch * self._copies
        inputs, targets = (tree.each(partial(_zeros, rows, device), part) for part in self._blank)
        for _ in range(SETTLED + 2):
            blank = Batch(self._task.prepare(inputs), targets, self._batches.expected, records)
            self._gradient_step.rehearse(self._model, blank)

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """A copy of the state to send, in `out` if given."""
        out = torch.empty_like(self.state) if out is None else out
        if self.state.is_cuda:
            with self._mutex:
                return out.copy_(self.state)
        # numpy copies by memcpy, which is 1.7 times as fast as torch's copy (benchmarks/engine.py)
        target, source = out.view(torch.uint8).numpy(), self.state.view(torch.uint8).numpy()
        for start in range(0, len(source), COPIED):
            with self._mutex:
                np.copyto(target[start : start + COPIED], source[start : start + COPIED])
        return out

    def momentum(self) -> Tensor | None:
        """A copy of the velocity, where there is one."""
        with self._mutex:
            return None if self.velocity is None else self.velocity.clone()

    def mix(self, mine: Tensor, theirs: Tensor, intact: Callable[[], bool] | None = None) -> bool:
        """This learner's half of an exchange of the snapshots `mine` and `theirs`: add (theirs − mine)/2.

        `intact` is asked whenever a block of `theirs` has been read, before it is used; once it says no, the rest of
        the half is left out and the answer is False.
        """
        for here, own, other in zip(*map(self._blocks, (self.state, mine, theirs)), strict=True):
            change = torch.sub(other, own, out=self._change[: len(own)])
            if intact is not None and not intact():
                return False
            with self._mutex:
                here.add_(change, alpha=0.5)
        return True

    def adopt(self, state: Tensor) -> None:
        """Go on from another learner's model, without momentum: the own past is lost."""
        with self._mutex:
            self.state.copy_(state)
            if self.velocity is not None:
                self.velocity.zero_()

    def update(self, gradient: Gradient) -> None:
        """Descend: SGD with weight decay and momentum. All of it comes after the noise, so it costs no privacy."""
        step = gradient.vector
        self.gradient_norm = torch.linalg.vector_norm(step)
        rate = self._optimizer.rate(self.epoch)
        with self._mutex:
            if self._optimizer.weight_decay:
                step.add_(self.weights, alpha=self._optimizer.weight_decay)
            if self.velocity is not None:
                step = self.velocity.mul_(self._optimizer.momentum).add_(step)
            self.weights.add_(step, alpha=-rate)
            if gradient.buffers is not None:
                self.buffers.add_(gradient.buffers)
        self.steps += 1
        self.progress.advance()

    def _batch(self) -> tuple[Inputs, Tensor]:
        stored, targets = self._feed.take()
        inputs = self._task.prepare(stored)
        if self._copies > 1:
            repeat = partial(torch.repeat_interleave, repeats=self._copies, dim=0)
            inputs, targets = tree.each(repeat, inputs), repeat(targets)
        if self._task.augment is not None and len(targets):
            generator = self._streams("augment", self.steps).torch_generator(self._model.device)
            inputs = self._task.augment(inputs, generator)
        return inputs, targets

    def _blocks(self, vector: Tensor) -> tuple[Tensor, ...]:
        blocks: tuple[Tensor, ...] = vector.split(max(1, len(self._change)))
        return blocks


def _zeros(rows: int, device: torch.device, like: Tensor) -> Tensor:
    return like.new_zeros(rows, *like.shape[1:], device=device)
