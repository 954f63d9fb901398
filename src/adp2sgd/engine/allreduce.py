"""SYNC with real processes: every learner steps, then `torch.distributed` averages the models of all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adp2sgd.engine.speeds import round_seconds
from adp2sgd.engine.worker import Worker
from adp2sgd.errors import LedgerError
from adp2sgd.progress import Count, Key, from_rows, to_rows


class StrandedError(Exception):
    """The connection to another learner broke within an all-reduce."""


class SyncWorker(Worker):
    """One learner of SYNC. One whose budget is spent takes part with unchanged weights.

    A round's small all-reduce carries everybody's step count and wish to end, so that all end after the same round.
    A lost learner ends the run: the supervisor says so, and the others wait for its word and keep the last round's
    model. When it goes on, all take the newest model that any of them has kept.
    """

    without_checkpoint = "found no checkpoint of its own and takes the newest of the others', or the initial model"
    _counts: dict[Key, Count]
    _velocity: Tensor | None = None  # before the step under way
    _newest: int  # the learner whose model all begin with

    def assemble(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        world = self.config.learners
        on_gpu = self.setup.device.type == "cuda" and torch.cuda.device_count() >= world
        store = TCPStore("127.0.0.1", self.order["port"], is_master=False)
        self._publish()  # the own model with its own counts, until all have the newest
        self._tell_earlier(store)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=self.place.learner, world_size=world
        )

    def train(self) -> None:
        try:
            _together(distributed.broadcast, self.learner.state, self._newest)
            self._publish()
            while self._round():
                pass
        except StrandedError as error:  # the supervisor knows who was lost
            self.notes.append(f"left alone in an all-reduce ({str(error).splitlines()[0][:80]})")
            self.state = "stranded"
            if self.learner.velocity is not None and self._velocity is not None:  # the round is undone
                self.learner.velocity.copy_(self._velocity)
            self.exchanger.over.wait()
        finally:
            distributed.destroy_process_group()

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """The model that all learners had after the last round: the state is half-summed within an all-reduce."""
        with self.exchanger.seam:
            return self.learner.read.clone() if out is None else out.copy_(self.learner.read)

    def counts(self) -> dict[Key, Count]:
        """As they were after the last round: the own count is ahead of the others' within one."""
        return self._counts

    def _tell_earlier(self, store: TCPStore) -> None:
        """After a resume some learners may have older checkpoints than others: all take the highest counts, and the
        model of the learner that counts most."""
        progress, world = self.learner.progress, range(self.config.learners)
        store.set(f"counts/{self.place.learner}", json.dumps(to_rows(progress.counts())))
        told = [from_rows(json.loads(store.get(f"counts/{learner}"))) for learner in world]
        self._newest = max(world, key=lambda learner: sum(count.steps for count in told[learner].values()))
        for other in self.place.others:
            progress.merge(told[other])

    def _publish(self) -> None:
        """What others see is the model and the counts of one round."""
        with self.exchanger.seam:
            self.learner.read.copy_(self.learner.state)
            self._counts = self.learner.progress.counts()

    def _round(self) -> bool:
        """One step of everybody. False when the run ends after it."""
        self.state = "training" if self.learner.may_step else "averaging"
        began = time.monotonic()
        stepped = self._descend(began)
        self._average()
        self._note_exchange()
        over, able = self._agree()
        self._publish()
        steps = self.learner.progress.total
        if stepped:
            self.note_step(0, began)
        self.turns += 1
        if steps >= self.setup.target_steps:
            self.exchanger.reached.set()
        return not over and able and steps < self.setup.target_steps

    def _descend(self, began: float) -> bool:
        learner, config = self.learner, self.config
        if not learner.may_step:
            return False
        learner.begin()
        self._velocity = learner.momentum()
        try:
            gradient = learner.gradient()
        except LedgerError as error:
            self.notes.append(f"stopped training after {learner.steps} steps: {error}")
            return False
        self.pad(began, round_seconds(config.speeds, config.learners, self.setup.seed, self.turns)[self.place.learner])
        learner.update(gradient)
        return True

    def _average(self) -> None:
        """Sum, then divide by K, as the paper's SYNC does."""
        _together(distributed.all_reduce, self.learner.state)
        self.learner.state.div_(self.config.learners)

    def _note_exchange(self) -> None:
        tally, world = self.exchanger.exchange.tally, self.config.learners
        tally.completed += 1
        tally.bytes_sent += 2 * self.learner.state.nbytes * (world - 1) // world

    def _agree(self) -> tuple[bool, bool]:
        """Learn everybody's step count, whether somebody was told to end, and whether somebody can still step."""
        me, world, progress = self.place.learner, self.config.learners, self.learner.progress
        facts: Tensor = torch.zeros(world + 2, dtype=torch.int64)
        facts[me] = progress.counts()[progress.own].steps
        facts[-2], facts[-1] = int(self.exchanger.over.is_set()), int(self.learner.may_step)
        facts = facts.to(self.setup.device)
        _together(distributed.all_reduce, facts)
        *steps, over, able = facts.tolist()
        progress.merge({(k, self.place.start): Count(steps[k]) for k in self.place.others})
        return bool(over), bool(able)


def _together(what: Callable[..., Any], tensor: Tensor, *options: Any) -> None:
    try:
        what(tensor, *options)
    except RuntimeError as error:
        raise StrandedError(str(error)) from error
