"""K learners in one process and virtual time: deterministic from the seed.

ADPSGD is an event heap of `(time, order, event)`: a learner finishes a step, or a message arrives. When a step ends,
the learner starts its exchange and then descends; with a free network the exchange completes in between, which is
Algorithm 1 to the letter. SYNC is a loop of rounds, each as long as its slowest learner plus an all-reduce.
"""

from __future__ import annotations

import heapq
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from adp2sgd.config import Config
from adp2sgd.data.indexed import start_reading
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine import extension
from adp2sgd.engine.divergence import Watch
from adp2sgd.engine.interrupt import Interrupt, telling_that_nothing_is_kept
from adp2sgd.engine.pace import Pace
from adp2sgd.engine.result import finish, learner_result, save_model
from adp2sgd.engine.setup import Setup, beginning, prepare
from adp2sgd.engine.simulation import checkpoint
from adp2sgd.engine.simulation.events import Event, Member, StepEnd, Turn
from adp2sgd.engine.simulation.open_files import allow_open_files
from adp2sgd.engine.speeds import all_reduce_seconds, message_seconds, round_seconds, step_seconds
from adp2sgd.engine.spending import Spending
from adp2sgd.engine.status import OnStatus, RunStatus, StatusFile
from adp2sgd.engine.theta import mean_of
from adp2sgd.engine.threads import suited_threads
from adp2sgd.errors import InterruptedRunError, StopRun, callback, showing_users_code, telling_no_values
from adp2sgd.exchange.memory import MemoryCarrier, Pool
from adp2sgd.exchange.protocol import Busy, Exchange, Message
from adp2sgd.metrics import Figures
from adp2sgd.run_folder import SCRATCH, Folder, LearnerResult, Point, Run
from adp2sgd.task import Task
from adp2sgd.tasks import named

STATUSES = 1000  # calls of `on_status` in a run, at least
STATUS_S = 1.0  # real time between two of them, at most


@showing_users_code
def simulate(
    config: Config,
    folder: str | Path | None = None,
    *,
    task: Task | None = None,
    resume: bool = False,
    on_status: OnStatus = None,
) -> Run:
    """Run `config` in virtual time. `folder` keeps all files of the run; without it nothing is left behind.

    `task` is the task itself, instead of the one that `config.task` names.

    `resume` goes on from the folder's last checkpoint: a seeded run ends exactly as if it had not been interrupted.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch, telling_that_nothing_is_kept():
            return replace(simulate(config, Path(scratch) / "run", task=task, on_status=on_status), folder=None)
    with telling_no_values(config.privacy.mode == "private"):
        return _simulate(named(config, task), task, folder, resume, callback(on_status))


def _simulate(
    config: Config, task: Task | None, folder: str | Path, resume: bool, on_status: Callable[[RunStatus], None]
) -> Run:
    kind = Synchronous if config.algorithm == "sync" else Asynchronous
    before = extension.earlier(Folder.open(folder), config, checkpoint.NAME) if resume else None
    saved = checkpoint.read(Folder.open(folder)) if resume and before is None else None
    seed = saved.seed if saved else extension.seed_of(Folder.open(folder)) if before else None
    # Before the folder is made: a wrong task leaves nothing behind.
    setup = prepare(config, task, seed, resumed=saved is not None)
    start_reading(setup.task.train)
    home = Folder.reopen(folder, config) if resume else Folder.create(folder, config)
    simulation = kind(setup, home, StatusFile(home, on_status))
    with (
        home.held(),
        home.telling_of_full_disks(),
        closing(setup),
        closing(simulation),
        suited_threads(len(simulation.setup.compute.model.weights), config.batch_size),
    ):
        if resume and before is None and config.seed is not None:
            home.remove_logs("ledger.jsonl", "plan.json")  # a seeded run repeats its draws: charged anew, not twice
        if resume and before is None and saved is None:  # it was killed before its first checkpoint, and begins anew
            home.write_points(())
            home.truncate_logs("events.jsonl", {})
        with beginning(home, fresh=not resume):
            simulation.enlist()
        if saved is not None:
            checkpoint.restore(simulation, saved)
            return simulation.run()
        if before is not None:
            checkpoint.extend(simulation, before)
        simulation.start()
        return simulation.run()


class Simulation:
    """What SYNC and ADPSGD share: the clock, the run's folder, evaluation and checkpoints."""

    def __init__(self, setup: Setup, folder: Folder, on_status: Callable[[RunStatus], None]) -> None:
        self.setup = setup
        self.folder = folder
        self.time = 0.0
        self.order = 0
        self.global_steps = 0
        self.heap: list[tuple[float, int, Event]] = []
        self.curve: list[Point] = []
        self.members: list[Member] = []
        self._on_status = on_status
        self._next_status = 0.0
        self._theta: Tensor | None = None  # as evaluated last
        self._stopped: str | None = None  # why a callback has ended the run
        self._watch = Watch(folder)
        self._pace = Pace(setup.plan.config.checkpoint_every_s)
        self._spending = Spending(())
        self._pool = Pool()

    def _post(self, message: Message) -> None:
        """Send a message on its way."""
        raise NotImplementedError

    def enlist(self) -> None:
        """Make the learners; private ones hold a ledger each from now on."""
        count = self.setup.plan.config.learners
        if self.setup.plan.config.privacy.mode == "private":
            allow_open_files(count)
        for number in range(count):
            learner = self.setup.learner(number, self.folder.learner(number))
            exchange = Exchange(learner, MemoryCarrier(learner, self._post, self._pool))
            self.members.append(Member(learner, exchange))
        self._spending = Spending([m.learner.budget.plan for m in self.members if m.learner.budget is not None])
        self._spending.start()

    def start(self) -> None:
        """Everything that happens at time 0."""

    def advance(self) -> None:
        """Process the next event or round."""
        raise NotImplementedError

    def run(self) -> Run:
        """Until the global count is reached or all learners have spent their budgets."""
        with Interrupt() as interrupt:
            while not self._ended():
                before = self.global_steps
                self.advance()
                if self.global_steps != before:
                    self._keep_schedule(before)
                if interrupt.requested:
                    self.checkpoint()
                    raise InterruptedRunError(
                        f"interrupted at epoch {self.setup.plan.epoch(self.global_steps):.2f}; nothing is lost: "
                        f"go on with adp2sgd simulate --resume {self.folder.path}"
                    )
            self.drain()
            return self._result()  # the steps are done: an interruption now waits for the result

    def close(self) -> None:
        self._spending.close()
        self.folder.flush()
        for member in self.members:
            if member.learner.budget is not None:
                member.learner.budget.close()

    def drain(self) -> None:
        """Let exchanges under way complete."""

    def states(self) -> list[Tensor]:
        """What is evaluated of the learners."""
        return [member.learner.optimizer.evaluated(member.learner.state) for member in self.members]

    def checkpoint(self) -> None:
        began = time.monotonic()
        self._look()
        checkpoint.write(self)
        self._pace.done(began)

    def _step_done(self, member: Member) -> None:
        """Book-keeping after a learner's update."""
        learner, stale = member.learner, member.note_staleness(self.global_steps)
        self.global_steps += 1
        event = {"global_step": self.global_steps, "seconds": self.time, "staleness": stale}
        self._watch.note(learner, event)
        if self._watch.due:
            self._look()

    def _look(self) -> None:
        """Write the pending step events; a norm that is not finite ends the run."""
        events, error = self._watch.look()
        for learner, event in events:
            self.folder.log(learner, event)
        if error is not None:
            raise error

    def _keep_schedule(self, before: int) -> None:
        plan = self.setup.plan
        if plan.passed(plan.config.evaluate_every, before, self.global_steps):
            self._evaluate()
        if self._pace.due or plan.passed(plan.config.checkpoint_every, before, self.global_steps):
            self.checkpoint()
        share = max(1, plan.target_steps // STATUSES)
        if self.global_steps // share != before // share or time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + STATUS_S
            try:
                self._on_status(self.status)
            except StopRun as stop:
                self._stopped = str(stop) or "no reason given"

    @property
    def status(self) -> RunStatus:
        budgets = (member.learner.budget for member in self.members)
        self._spending.drawn = [None if budget is None else budget.steps for budget in budgets]
        named = zip(self.members, self.setup.site_names, strict=True)
        learners = (member.status(name, self._spending) for member, name in named)
        return RunStatus.of(
            self.setup.plan, self.global_steps, self.time, learners,
            clock="virtual", curve=self.curve, notes=self.setup.notes, monitor=self.setup.task.monitor,
            model=None if self._theta is None else partial(self.setup.compute.named, self._theta),
        )  # fmt: skip

    def _evaluate(self) -> Point:
        self._look()
        mean = mean_of(self.states())
        self._theta = mean.theta
        point = self.setup.point(self.global_steps, self.time, self.setup.held_out.figures(self._theta), mean)
        self.curve.append(point)
        self.folder.append_point(point)
        return point

    def _ended(self) -> bool:
        """By the step count, by a callback, or because no learner may step any more."""
        reached = self.global_steps >= self.setup.plan.target_steps or self._stopped is not None
        return reached or not any(member.learner.may_step for member in self.members)

    def _result(self) -> Run:
        """Save the models first, because their privacy is spent even if the evaluation fails."""
        self._look()
        theta = mean_of(self.states()).theta
        save_model(self.setup, theta, self.folder)
        for member in self.members:
            facts = {"steps": member.learner.steps, "seed": self.setup.plan.seed}
            learner_checkpoint.save(self.folder, member.learner, member.learner.state, facts)
        if not self.curve or self.curve[-1].global_steps != self.global_steps:
            self._evaluate()
        learners = self._learner_results()
        run = finish(
            self.setup,
            [member.learner for member in self.members],
            learners,
            tuple(self.curve),
            theta=theta,
            clock="virtual",
            stopped=self._stopped,
            folder=str(self.folder.path),
        )
        self.folder.write_result(run)
        (self.folder.path / checkpoint.NAME).unlink(missing_ok=True)
        return run

    def _learner_results(self) -> tuple[LearnerResult, ...]:
        """Equal models, as after SYNC's all-reduce, are evaluated once."""
        found, states = list[LearnerResult](), self.states()
        for before, member in zip((None, *self.members), self.members, strict=False):
            if before is None or not torch.equal(states[before.learner.number], states[member.learner.number]):
                metrics = self.setup.held_out.figures(states[member.learner.number])
            found.append(self._learner_result(member, metrics))
        return tuple(found)

    def _learner_result(self, member: Member, metrics: Figures) -> LearnerResult:
        learner = member.learner
        return learner_result(
            learner.number, member.counters, metrics, learner.budget,
            global_steps=self.global_steps, clip_norm=learner.clip_norm,
        )  # fmt: skip


class Asynchronous(Simulation):
    """ADPSGD."""

    def start(self) -> None:
        for member in self.members:
            self._begin(member)

    def advance(self) -> None:
        self.time, _, event = heapq.heappop(self.heap)
        if isinstance(event, Message):
            self._deliver(event)
            self._ask_next(self.members[event.receiver])
            return
        member = self.members[event.learner]
        # After a kill the reserved block counts as spent, so a step that was under way may be beyond the cap.
        gradient = member.learner.gradient() if isinstance(event, StepEnd) and member.learner.may_step else None
        self._exchange(member)
        if gradient is not None:
            member.learner.update(gradient)
            self._step_done(member)
        member.turns += 1
        self._begin(member)

    def drain(self) -> None:
        """Deliver what is under way; nobody starts anything new."""
        while self.heap:
            _, _, event = heapq.heappop(self.heap)
            if isinstance(event, Message):
                self._deliver(event)

    def _begin(self, member: Member) -> None:
        learner, config = member.learner, self.setup.plan.config
        event: Event
        if learner.may_step:
            learner.begin()
            member.read_at = self.global_steps
            event = StepEnd(learner.number)
        else:
            learner.progress.stop()
            event = Turn(learner.number)
        duration = step_seconds(config.speeds, config.learners, self.setup.plan.seed, learner.number, member.turns)
        self._push(duration, event)

    def _exchange(self, member: Member) -> None:
        number = member.learner.number
        stream = random.Random(f"{self.setup.plan.seed}/partner/{number}/{member.turns}")
        member.partners = self.setup.plan.graph.draw_partners(number, stream)
        member.wanted_at = member.learner.steps
        if member.exchange.occupied:
            del member.partners[:1]  # its time is over
        self._ask_next(member)

    def _ask_next(self, member: Member) -> None:
        """One exchange of a step after the other, each when the learner is free; `busy` ends them (see `_deliver`)."""
        while member.partners and not member.exchange.occupied:
            member.exchange.ask(member.partners.pop(0), member.wanted_at)

    def _post(self, message: Message) -> None:
        delay = message_seconds(self.setup.plan.config.network, message.payload_bytes)
        if delay:
            self._push(delay, message)
        else:
            self._deliver(message)  # a free network: the exchange is over before the learner descends

    def _deliver(self, message: Message) -> None:
        member = self.members[message.receiver]
        if isinstance(message, Busy):
            member.partners.clear()  # learners that ask again at once would all be busy for ever
        member.exchange.receive(message)

    def _push(self, delay: float, event: Event) -> None:
        self.order += 1
        heapq.heappush(self.heap, (self.time + delay, self.order, event))


class Synchronous(Simulation):
    """SYNC: all learners step, then all take the average. One whose budget is spent takes part unchanged."""

    def advance(self) -> None:
        config, number = self.setup.plan.config, self.order
        self.order += 1
        durations = round_seconds(config.speeds, config.learners, self.setup.plan.seed, number)
        active = [member for member in self.members if member.learner.may_step]
        state = self.members[0].learner.state
        payload = state.numel() * state.element_size()
        self.time += max(durations[member.learner.number] for member in active)
        self.time += all_reduce_seconds(config.network, config.learners, payload)
        for member in active:
            member.learner.begin()
            member.learner.update(member.learner.gradient())
            self._step_done_in_round(member)
        self._all_reduce(payload)

    def _step_done_in_round(self, member: Member) -> None:
        member.read_at = self.global_steps  # all steps of a round start from the same model: nothing is stale
        self._step_done(member)

    def _all_reduce(self, payload: int) -> None:
        """Sum, then divide by K, as the paper's SYNC does; everybody also learns everybody's step count."""
        mean = self.members[0].learner.state.clone()
        for member in self.members[1:]:
            mean += member.learner.state
        mean /= len(self.members)
        counts = {}
        for member in self.members:
            counts.update({member.learner.progress.own: member.learner.progress.counts()[member.learner.progress.own]})
        for member in self.members:
            member.learner.state.copy_(mean)
            member.learner.progress.merge(counts)
            member.exchange.tally.completed += 1
            member.exchange.tally.bytes_sent += 2 * payload * (len(self.members) - 1) // len(self.members)
