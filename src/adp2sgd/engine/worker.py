"""One learner in a process of its own, on one machine or at a site. Its main thread trains; others do the rest.

    begin → a hint to the exchange thread → gradient → (padding) → update

So the exchange runs beside the gradient, and the descent follows the mix wherever the link is faster than the gradient.
The training thread waits for no network, no disk (but for its ledger, at each new block) and no other learner.
The learner ends by itself: when the run's step count is reached, or when it may not step any more and neither may the
others that it reaches. An engine adds what carries its exchanges and who directs it.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from typing import Protocol

import torch
from torch import Tensor

from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine.background import Background
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.divergence import Watch
from adp2sgd.engine.site import Site, make_learner
from adp2sgd.engine.speeds import step_seconds
from adp2sgd.engine.status import Counters, LearnerStatus, Staleness
from adp2sgd.engine.threads import SMALL_STEP
from adp2sgd.errors import Adp2sgdError, DivergedError, LedgerError
from adp2sgd.exchange.protocol import Exchange, Message
from adp2sgd.exchange.thread import ExchangeThread
from adp2sgd.learner import Learner
from adp2sgd.progress import Count, Key
from adp2sgd.run_folder import Folder

LATE = 0.1  # of a padded step: by so much the next one may be late without its own time starting anew
LINGER_S = 1.0  # all learners having stopped, before one whose budget is spent ends
LOOK_AROUND_S = 0.1  # between two looks at who has not stopped yet
REFUSED = "ignored implausible step counts from a peer"


class Place(Protocol):
    """A learner's place in the run: its number, how often it was started before, who else takes part."""

    @property
    def learner(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def others(self) -> list[int]: ...


class Direction(Protocol):
    """Says when training may begin (`go`) and when it must end (`over`). The run's seconds count from `zero`."""

    @property
    def go(self) -> threading.Event: ...
    @property
    def over(self) -> threading.Event: ...
    @property
    def zero(self) -> float: ...
    def start(self) -> None: ...
    def beat(self) -> None:
        """Report now; from any thread."""

    def close(self) -> None: ...


class Worker:
    """What the training thread does, for ADPSGD. An engine sets `exchange` and `control` in `connect`."""

    without_checkpoint = "found no checkpoint of its own and begins with the initial model"
    exchange: Exchange
    control: Direction

    def __init__(
        self, site: Site, compute: Compute, folder: Folder, place: Place, *, mode: str, exchanging: bool = True
    ) -> None:
        """`mode`: fresh, comeback (others may have trained on) or resume (all start again from their checkpoints)."""
        self.site, self.plan, self.config, self.compute = site, site.plan, site.plan.config, compute
        self.folder, self.place, self.mode, self.exchanging = folder, place, mode, exchanging
        self.state = "starting"
        self.notes: list[str] = []
        if len(compute.model.weights) * self.config.batch_size < SMALL_STEP:
            torch.set_num_threads(1)
        self.learner: Learner = make_learner(site, compute, folder.learner(place.learner), start=place.start)
        self.target_steps = self.plan.target_steps if exchanging else self.plan.planned_steps
        self.reached, self.wake = threading.Event(), threading.Event()
        self.seam = threading.RLock()  # held while what `snapshot` and `counts` give is replaced
        self.turns = 0
        self.staleness = Staleness()
        self.step_s = 0.0  # of the last step
        self._padded_to = -math.inf
        self._watch = Watch(self.folder)
        self._recent: list[tuple[float, int]] = []
        self._last_total = 0
        self._quiet_since: float | None = None
        self._looked_at = -math.inf
        self.connect()
        self.exchanges = ExchangeThread(self.exchange, on_message=self.heard)
        self.background = Background(
            site, compute, self.learner, folder, snapshot=self.snapshot, evaluated=self.evaluated, counts=self.counts
        )

    @property
    def first_number(self) -> int:
        """Of this start's exchanges: numbers of an earlier start may still be under way."""
        return (self.place.start << 32) + 1

    def connect(self) -> None:
        """Set `exchange`, over a carrier, and `control`."""
        raise NotImplementedError

    def live(self) -> None:
        """Come back or start, wait for the word, train, answer until the others have stopped too, rest."""
        self.exchange.lost = self.mode != "fresh"  # its model is still to be found
        self.meet()
        for thread in (self.exchanges, self.control, self.background):
            thread.start()
        self.find_model()
        if self.compute.device.type == "cuda":
            self.learner.rehearse()
        self.assemble()
        self.state = "ready"
        self.control.go.wait()
        error = self._train_to_the_end()
        self.exchanges.close()
        try:
            self._look_at_norms()
        except DivergedError as caught:
            error = error or caught
        if self.learner.budget is not None:
            self.learner.budget.close()
        self.background.close(checkpoint=error is None)
        self.control.close()
        if error is not None:
            raise error
        self.state = "ended"
        self.rest()

    def meet(self) -> None:
        """Prepare the ways to the partners, before any thread starts."""

    def rest(self) -> None:
        """After the end: leave the model and the last report where others find them."""

    def _train_to_the_end(self) -> Adp2sgdError | None:
        try:
            self.train()
            self.stop()
            self.wait_for_the_others()
        except Adp2sgdError as caught:
            return caught
        return None

    def assemble(self) -> None:
        """Whatever all learners do together before the clock starts."""

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """What others, and checkpoints, see of the learner; copied by the other threads."""
        return self.learner.snapshot(out)

    def evaluated(self, out: Tensor | None = None) -> Tensor:
        """What is evaluated and exported of the learner."""
        return self.learner.evaluated(out) if self.config.optimizer.ema else self.snapshot(out)

    def counts(self) -> dict[Key, Count]:
        """The step counts that belong to the snapshot."""
        return self.learner.progress.counts()

    # ------------------------------------------------------------ training

    def train(self) -> None:
        """Steps until the run ends; averaging only once the budget is spent."""
        while not self.ended:
            if self.learner.may_step:
                self._step()
            else:
                self._average_only()

    @property
    def ended(self) -> bool:
        if self.learner.progress.total >= self.target_steps:
            self.reached.set()
        return self.reached.is_set() or self.control.over.is_set() or self._quiet_for(self.linger_s)

    @property
    def linger_s(self) -> float:
        """How long all that are reached must have stopped, before a learner whose budget is spent ends."""
        return LINGER_S

    def stop(self) -> None:
        self.learner.progress.stop()
        self.state = "finished"
        self.control.beat()
        if self.exchanging:
            self.exchanges.spread(self.place.others)

    def wait_for_the_others(self) -> None:
        """Go on answering until all that can be reached have stopped, or the supervisor ends the run."""
        while self.exchanging and not self.control.over.wait(LOOK_AROUND_S / 4):
            self._look_around()
            if self._quiet_for(0.0):
                return

    def heard(self, message: Message) -> None:
        if self.learner.progress.total >= self.target_steps:
            self.reached.set()
            self.wake.set()

    def _step(self) -> None:
        self.state = "training"
        learner, began = self.learner, self._start()
        learner.begin()
        self._exchange()
        read_at = learner.progress.total
        try:
            gradient = learner.gradient()
        except LedgerError as error:
            self.notes.append(f"stopped training after {learner.steps} steps: {error}")
            self._average_only()
            return
        self.pad(began, self._step_seconds())
        if self.ended:
            return  # a gradient that comes too late is dropped, as in the simulator; its privacy stays spent
        self.turns += 1
        stale = learner.progress.total - read_at
        learner.update(gradient)
        self.note_step(stale, began)

    def _start(self) -> float:
        """When this step begins: now, or with padded steps when the last step's time was over. So
        work between two steps does not lengthen them."""
        now, late = time.monotonic(), LATE * self.config.speeds.step_s
        return self._padded_to if self.config.speeds.pad and now - self._padded_to < late else now

    def _average_only(self) -> None:
        if self.state != "averaging":
            self.state = "averaging"
            self.learner.progress.stop()
            if self.exchanging:
                self.exchanges.spread(self.place.others)
        self._exchange()
        self.wake.wait(self._step_seconds() if self.config.speeds.pad else self.step_s or 0.05)
        self.turns += 1
        self._look_around()

    def _exchange(self) -> None:
        stream = random.Random(f"{self.plan.seed}/partner/{self.place.learner}/{self.place.start}/{self.turns}")
        partners = self.plan.graph.draw_partners(self.place.learner, stream)
        if partners and self.exchanging:
            self.exchanges.want(*partners)

    def _look_around(self) -> None:
        """Note since when all learners that can be reached have stopped."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_AROUND_S:
            return
        training = [k for k in self.place.others if not self.learner.progress.stopped(k)]
        if self.exchanging:
            reached = self.exchanges.reaches(training)
            self._quiet_since = None if reached else self._quiet_since or now
        else:
            self._quiet_since = self._quiet_since or now
        self._looked_at = now

    def _quiet_for(self, seconds: float) -> bool:
        return self._quiet_since is not None and time.monotonic() - self._quiet_since >= seconds

    def _step_seconds(self) -> float:
        return step_seconds(self.config.speeds, self.config.learners, self.plan.seed, self.place.learner, self.turns)

    def pad(self, began: float, nominal_s: float) -> None:
        """Injected slowness: sleep until the step has its nominal duration, or its own duration times its factor."""
        speeds = self.config.speeds
        took = time.monotonic() - began
        wanted = nominal_s if speeds.pad else took * nominal_s / speeds.step_s
        self._padded_to = began + wanted
        if wanted > took:
            self.wake.wait(wanted - took)

    # ------------------------------------------------------------ book-keeping

    def note_step(self, stale: int, began: float) -> None:
        learner, now = self.learner, time.monotonic()
        self.step_s = now - began
        self.staleness.note(stale)
        total = learner.progress.total
        event = {
            "global_step": total,
            "seconds": now - self.control.zero,
            "staleness": stale,
            "start": self.place.start,
        }
        self._watch.note(learner, event)
        if self._watch.due or self.step_s > 0.01:
            self._look_at_norms()
        self._keep_schedule(total)

    def _look_at_norms(self) -> None:
        events, error = self._watch.look()
        if events:
            self.background.log([event for _, event in events])
        if error is not None:
            raise error

    def _keep_schedule(self, total: int) -> None:
        before, self._last_total = self._last_total, total
        measured = self.config.speeds.pad and self.compute.device.type == "cuda"  # a look would delay the steps there
        for every, act in (
            (0.0 if measured else self.config.evaluate_every, self.background.evaluate),
            (self.config.checkpoint_every, self.background.checkpoint),
        ):
            if self.plan.passed(every, before, total):
                act()
        if self.background.pace.due:
            self.background.checkpoint()

    def report(self) -> tuple[LearnerStatus, int]:
        """What the supervisor hears five times a second."""
        learner, background = self.learner, self.background
        notes = (*self.notes, *filter(None, (background.trouble, REFUSED if learner.progress.refused else None)))
        status = LearnerStatus(
            learner=self.place.learner,
            site=self.site.name,
            state=self.state,
            start=self.place.start,
            pid=os.getpid(),
            counters=Counters.of(learner.steps, self.staleness, self.exchange.tally),
            rate=self._rate(),
            metrics=background.metrics,
            drawn=None if learner.budget is None else learner.budget.steps,
            clip_norm=learner.clip_norm,
            notes=notes,
        )
        return status, learner.progress.total

    def _rate(self) -> float:
        """Steps per second over the last few seconds."""
        now = time.monotonic()
        self._recent = [*self._recent[-20:], (now, self.learner.steps)]
        then, steps = self._recent[0]
        return (self.learner.steps - steps) / (now - then) if now > then else 0.0

    # ------------------------------------------------------------ coming back

    def find_model(self) -> None:
        mode = self.mode
        if mode == "comeback" and self._copy_from_somebody():
            learner_checkpoint.restore_clip_norm(self.folder, self.learner)
            return
        if mode == "fresh":
            return
        saved = learner_checkpoint.load(self.folder, self.place.learner)
        if saved is not None:
            self.notes += saved.complaints
        if saved is not None and saved.tensors:
            learner_checkpoint.restore(self.learner, saved)
            if mode == "comeback":
                self.notes.append("came back with its own checkpoint, because nobody gave it a model")
        else:
            self.notes.append(self.without_checkpoint)
        self.exchange.lost = False

    def _copy_from_somebody(self) -> bool:
        """Copy another learner's current model, without optimizer state. Neighbours are asked first."""
        stream = random.Random()
        near = set(self.plan.graph.neighbours[self.place.learner])
        others = sorted(self.place.others, key=lambda k: (k not in near, stream.random()))
        return any(self.exchanges.fetch(other) for _ in range(2) for other in others)
