"""SYNC with real processes: every learner steps, then `torch.distributed` averages the models of all."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adp2sgd.engine.speeds import round_seconds
from adp2sgd.engine.worker import Worker
from adp2sgd.errors import LedgerError
from adp2sgd.progress import Count


class SyncWorker(Worker):
    """One learner of SYNC. One whose budget is spent takes part with unchanged weights.

    A round's small all-reduce carries everybody's step count and wish to end, so that all end after the same round.
    A lost learner ends the run: the supervisor says so, and the others wait for its word.
    """

    def assemble(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        world = self.config.learners
        on_gpu = self.setup.device.type == "cuda" and torch.cuda.device_count() >= world
        store = TCPStore("127.0.0.1", self.order["port"], is_master=False)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=self.place.learner, world_size=world
        )

    def train(self) -> None:
        try:
            self._average()
            self.learner.read.copy_(self.learner.state)
            while self._round():
                pass
        except RuntimeError as error:  # the connection to another learner broke: the supervisor knows to which
            self.notes.append(f"left alone in an all-reduce ({str(error).splitlines()[0][:80]})")
            self.state = "stranded"
            self.exchanger.over.wait()
        finally:
            distributed.destroy_process_group()

    def snapshot(self, out: Tensor) -> Tensor:
        """The model that all learners had after the last round: the state itself is half-summed within an all-reduce.

        Without the mutex: a copy that a new round overtakes holds coordinates of two rounds in a row.
        """
        return out.copy_(self.learner.read)

    def _round(self) -> bool:
        """One step of everybody. False when the run ends after it."""
        self.state = "training" if self.learner.may_step else "averaging"
        began = time.monotonic()
        stepped = self._descend(began)
        self._average()
        steps, over, able = self._agree()
        self.learner.read.copy_(self.learner.state)
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
        state = self.learner.state
        distributed.all_reduce(state)
        state.div_(self.config.learners)
        tally, world = self.exchanger.exchange.tally, self.config.learners
        tally.completed += 1
        tally.bytes_sent += 2 * state.nbytes * (world - 1) // world

    def _agree(self) -> tuple[int, bool, bool]:
        """The global step count, whether somebody was told to end, and whether somebody can still step."""
        me, world = self.place.learner, self.config.learners
        own = self.learner.progress.counts()[self.learner.progress.own].steps
        facts: Tensor = torch.zeros(world + 2, dtype=torch.int64)
        facts[me], facts[world], facts[world + 1] = own, int(self.exchanger.over.is_set()), int(self.learner.may_step)
        facts = facts.to(self.setup.device)
        distributed.all_reduce(facts)
        *steps, over, able = facts.tolist()
        self.learner.progress.merge({(k, self.place.start): Count(steps[k]) for k in self.place.others})
        return self.learner.progress.total, bool(over), bool(able)
