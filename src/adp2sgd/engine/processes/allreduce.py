"""SYNC with real processes: every learner steps, then all take the average of their models.

Through shared memory; where every learner has a GPU of its own, by NCCL, whose processes find each other by a file in
the folder of the run's sockets and listen on the loopback device only.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, distributed

from adp2sgd.engine.processes.worker import ProcessWorker
from adp2sgd.engine.speeds import round_seconds
from adp2sgd.errors import LedgerError
from adp2sgd.exchange.assembly import Assembly, StrandedError
from adp2sgd.progress import Count, Key, Progress, from_rows, to_rows


class SyncWorker(ProcessWorker):
    """One learner of SYNC. One whose budget is spent takes part with unchanged weights.

    A round's last meeting carries everybody's step count and wish to end, so that all end after the same round.
    A lost learner ends the run: the supervisor says so, and the others keep the last round's model. When it goes on,
    all take the newest model that any of them has kept.
    """

    without_checkpoint = "found no checkpoint of its own and takes the newest of the others', or the initial model"
    _counts: dict[Key, Count]
    _optimizer: dict[str, Tensor] | None = None  # its state before the step under way
    _newest: int  # the learner whose model all begin with
    _assembly: Assembly
    _by_nccl = False

    def assemble(self) -> None:
        place, state = self.place, self.learner.state
        self._publish()  # the own model with its own counts, until all have the newest
        stranded = self.control.stranded.is_set
        self._assembly = Assembly(place.mail, place.learner, place.descriptors, self.carrier.layout, stranded)
        self._tell_earlier()
        self._by_nccl = state.is_cuda and torch.cuda.device_count() >= self.config.learners
        if self._by_nccl:
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            store = distributed.FileStore(f"{place.mail}/nccl", self.config.learners)  # type: ignore[attr-defined]
            distributed.init_process_group("nccl", store=store, rank=place.learner, world_size=self.config.learners)

    def train(self) -> None:
        try:
            self._assembly.spread(self.learner.state, self._newest)
            self._publish()
            while self._round():
                pass
        except StrandedError as error:  # the supervisor knows who was lost
            self.notes.append(f"left a round: {error}")
            self.state = "stranded"
            if self._optimizer is not None:  # the round is undone
                self.learner.optimizer.restore(self._optimizer)
            self.control.over.wait()
        finally:
            self._assembly.close()
            if self._by_nccl:
                distributed.destroy_process_group()

    def wait_for_the_others(self) -> None:
        """All end after the same round."""

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """The model that all learners had after the last round: the state is half-summed within an all-reduce."""
        with self.seam:
            return self.learner.read.clone() if out is None else out.copy_(self.learner.read)

    def counts(self) -> dict[Key, Count]:
        """As they were after the last round: the own count is ahead of the others' within one."""
        return self._counts

    def _tell_earlier(self) -> None:
        """After a resume some learners may have older checkpoints than others: all take the highest counts, and the
        model of the learner that counts most."""
        progress = self.learner.progress
        self._newest, counts = self._assembly.meet(to_rows(progress.counts()), _newest_and_highest)
        progress.merge(from_rows(counts))

    def _publish(self) -> None:
        """What others see is the model and the counts of one round."""
        with self.seam:
            self.learner.read.copy_(self.learner.state)
            self._counts = self.learner.progress.counts()

    def _round(self) -> bool:
        """One step of everybody. False when the run ends after it."""
        self.state = "training" if self.learner.may_step else "averaging"
        began = time.monotonic()
        stepped = self._descend(began)
        over, able = self._average()
        self._note_exchange()
        self._publish()
        steps = self.learner.progress.total
        if stepped:
            self.note_step(0, began)
        self.turns += 1
        if steps >= self.plan.target_steps:
            self.reached.set()
        return not over and able and steps < self.plan.target_steps

    def _descend(self, began: float) -> bool:
        learner, config = self.learner, self.config
        if not learner.may_step:
            return False
        learner.begin()
        self._optimizer = learner.optimizer_state()
        try:
            gradient = learner.gradient()
        except LedgerError as error:
            self.notes.append(f"stopped training after {learner.steps} steps: {error}")
            return False
        self.pad(began, round_seconds(config.speeds, config.learners, self.plan.seed, self.turns)[self.place.learner])
        learner.update(gradient)
        return True

    def _average(self) -> tuple[bool, bool]:
        """Sum, then divide by K, as the paper's SYNC does. Everybody also learns everybody's step count.

        Returns whether somebody was told to end, and whether somebody can still step.
        """
        state, progress = self.learner.state, self.learner.progress
        facts = [progress.counts()[progress.own].steps, self.control.over.is_set(), self.learner.may_step]
        if self._by_nccl:
            _all_reduce(state)
            told = self._assembly.meet(facts, list)
        else:
            told = self._assembly.average(state, facts, list)
        steps, over, able = zip(*told, strict=True)
        progress.merge({(k, self.place.start): Count(steps[k]) for k in self.place.others})
        return any(over), any(able)

    def _note_exchange(self) -> None:
        tally, world = self.exchange.tally, self.config.learners
        tally.completed += 1
        tally.bytes_sent += 2 * self.learner.state.nbytes * (world - 1) // world


def _newest_and_highest(told: list[Any]) -> tuple[int, list[list[int]]]:
    """The learner whose counts add up to most, and every count at its highest."""
    merged = Progress(-1)  # nobody's own
    for rows in told:
        merged.merge(from_rows(rows))
    totals = [sum(steps for _, _, steps, _ in rows) for rows in told]
    return totals.index(max(totals)), [row for row in to_rows(merged.counts()) if row[0] >= 0]


def _all_reduce(state: Tensor) -> None:
    try:
        distributed.all_reduce(state, op=distributed.ReduceOp.SUM)
    except RuntimeError as error:
        raise StrandedError(str(error).splitlines()[0][:80]) from error
    state.div_(distributed.get_world_size())
