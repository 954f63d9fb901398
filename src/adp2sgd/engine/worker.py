"""One learner in a process of its own. Its main thread trains; the exchange thread and the keeper do the rest.

    begin → a hint to the exchange thread → gradient → (padding) → update

So the exchange runs beside the gradient, and the descent follows the mix wherever the link is faster than the gradient.
The training thread waits for no network, no disk (but for its ledger, at each new block) and no other learner.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from typing import Any

import torch
from torch import Tensor

from adp2sgd.engine import learner_checkpoint
from adp2sgd.engine.exchanger import SUPERVISOR, Exchanger, Place
from adp2sgd.engine.keeper import Keeper
from adp2sgd.engine.setup import Setup, make_learner
from adp2sgd.engine.speeds import step_seconds
from adp2sgd.engine.threads import SMALL_STEP
from adp2sgd.engine.watch import Watch
from adp2sgd.errors import Adp2sgdError, DivergedError, LedgerError
from adp2sgd.exchange.shared import Post
from adp2sgd.learner import Learner
from adp2sgd.progress import Count, Key, to_rows
from adp2sgd.record import Folder

LATE = 0.1  # of a padded step: by so much the next one may be late without its own time starting anew
REFUSED = "was told step counts that cannot be right, and did not believe them"
DELIVERY_S = 5.0  # how long the last words to the supervisor are repeated


def last_words(post: Post, status: dict[str, Any]) -> None:
    """Say something to the supervisor that must arrive."""
    end = time.monotonic() + DELIVERY_S
    while not post.send(SUPERVISOR, json.dumps(status).encode()) and time.monotonic() < end:
        time.sleep(0.01)


def who(place: Place) -> dict[str, Any]:
    return {"learner": place.learner, "start": place.start, "pid": os.getpid()}


class Worker:
    """What the training thread does, for ADPSGD."""

    without_checkpoint = "found no checkpoint of its own and begins with the initial model"

    def __init__(self, setup: Setup, folder: Folder, place: Place, post: Post, order: dict[str, Any]) -> None:
        self.setup, self.config, self.folder, self.place = setup, setup.config, folder, place
        self.order = order
        self.state = "starting"
        self.notes: list[str] = []
        self.learner: Learner = make_learner(setup, place.learner, folder.learner(place.learner), start=place.start)
        if len(self.learner.state) * self.config.batch_size < SMALL_STEP:
            torch.set_num_threads(1)
        self.post = post
        self.target_steps = setup.target_steps
        if not order["exchange"]:  # then nobody hears of the others' steps: each takes its share
            self.target_steps = math.ceil(setup.target_steps / self.config.learners)
        self.exchanger = Exchanger(
            place,
            self.learner,
            post,
            target_steps=self.target_steps,
            report=self.status,
            snapshot=self.snapshot,
            counts=self.counts,
        )
        self.keeper = Keeper(
            setup,
            self.learner,
            folder,
            {"start": place.start, "seed": setup.seed},
            snapshot=self.snapshot,
            counts=self.counts,
        )
        self.turns = 0
        self.staleness_total = self.staleness_max = 0
        self.step_s = 0.0  # of the last step
        self._padded_to = -math.inf
        self._watch = Watch(self.folder)
        self._recent: list[tuple[float, int]] = []
        self._last_total = 0

    def live(self) -> None:
        """Come back or start, wait for the word, train, answer until the run is over, rest."""
        self.exchange_before()
        if self.setup.device.type == "cuda":
            self.exchanger.meet(self.setup.graph.neighbours[self.place.learner])
        self.exchanger.start()
        self.keeper.start()
        self._find_model()
        if self.setup.device.type == "cuda":
            self.learner.rehearse()
        self.assemble()
        self.state = "ready"
        self.exchanger.go.wait()
        error = None
        try:
            self.train()
            self.stop()
            self.exchanger.over.wait()
        except Adp2sgdError as caught:
            error = caught
        self.exchanger.close()
        try:
            self._look_at_norms()
        except DivergedError as caught:
            error = error or caught
        if self.learner.budget is not None:
            self.learner.budget.close()
        self.keeper.close(checkpoint=error is None)
        if error is not None:
            raise error
        slot = self.exchanger.leave()
        self.state = "ended"
        counts = to_rows(self.learner.progress.counts())
        last_words(self.post, {**self.status(), "counts": counts, "slot": slot})

    def exchange_before(self) -> None:
        """Whatever must be ready before the exchange thread starts."""
        self.exchanger.exchange.lost = self.order["mode"] != "fresh"  # its model is still to be found

    def assemble(self) -> None:
        """Whatever all learners do together before the clock starts."""

    def snapshot(self, out: Tensor | None = None) -> Tensor:
        """What others, and checkpoints, see of the learner; copied by the exchange thread and by the keeper."""
        return self.learner.snapshot(out)

    def counts(self) -> dict[Key, Count]:
        """The step counts that a look at θ sees with the snapshot."""
        return self.learner.progress.counts()

    # ------------------------------------------------------------ training

    def train(self) -> None:
        """Steps until the run's count is reached or the supervisor ends it; averaging only once the budget is spent."""
        while not self.ended:
            if self.learner.may_step:
                self._step()
            else:
                self._average_only()

    @property
    def ended(self) -> bool:
        if self.learner.progress.total >= self.target_steps:
            self.exchanger.reached.set()
        return self.exchanger.reached.is_set() or self.exchanger.over.is_set()

    def stop(self) -> None:
        self.learner.progress.stop()
        self.state = "finished"
        self.exchanger.spread(everybody=self.order["exchange"])

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
        """Now; or, with padded steps, when the last one's time was up: what follows the padding adds nothing."""
        now, late = time.monotonic(), LATE * self.config.speeds.step_s
        return self._padded_to if self.config.speeds.pad and now - self._padded_to < late else now

    def _average_only(self) -> None:
        self.state = "averaging"
        self.learner.progress.stop()
        self._exchange()
        nominal = self._step_seconds()
        self.exchanger.wake.wait(nominal if self.config.speeds.pad else self.step_s or 0.05)
        self.turns += 1

    def _exchange(self) -> None:
        stream = random.Random(f"{self.setup.seed}/partner/{self.place.learner}/{self.place.start}/{self.turns}")
        partners = self.setup.graph.draw_partners(self.place.learner, stream)
        if partners and self.order["exchange"]:
            self.exchanger.want(*partners)

    def _step_seconds(self) -> float:
        return step_seconds(self.config.speeds, self.config.learners, self.setup.seed, self.place.learner, self.turns)

    def pad(self, began: float, nominal_s: float) -> None:
        """Injected slowness: sleep until the step has its nominal duration, or its own duration times its factor."""
        speeds = self.config.speeds
        took = time.monotonic() - began
        wanted = nominal_s if speeds.pad else took * nominal_s / speeds.step_s
        self._padded_to = began + wanted
        if wanted > took:
            self.exchanger.wake.wait(wanted - took)

    # ------------------------------------------------------------ book-keeping

    def note_step(self, stale: int, began: float) -> None:
        learner, now = self.learner, time.monotonic()
        self.step_s = now - began
        self.staleness_total += stale
        self.staleness_max = max(self.staleness_max, stale)
        total = learner.progress.total
        event = {
            "global_step": total,
            "seconds": now - self.exchanger.zero,
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
            self.keeper.log([event for _, event in events])
        if error is not None:
            raise error

    def _keep_schedule(self, total: int) -> None:
        before, self._last_total = self._last_total, total
        measured = self.config.speeds.pad and self.setup.device.type == "cuda"  # a look would delay the steps there
        for every, act in (
            (0.0 if measured else self.config.evaluate_every, self.keeper.evaluate),
            (self.config.checkpoint_every, self.keeper.checkpoint),
        ):
            steps = every * self.setup.steps_per_epoch
            if steps and before // steps != total // steps:
                act()

    def status(self) -> dict[str, Any]:
        """What the supervisor hears five times a second."""
        tally, learner, keeper = self.exchanger.exchange.tally, self.learner, self.keeper
        status = {
            **who(self.place),
            "state": self.state,
            "steps": learner.steps,
            "total": learner.progress.total,
            "rate": self._rate(),
            "staleness_total": self.staleness_total,
            "staleness_max": self.staleness_max,
            "exchanges": tally.completed,
            "initiated": tally.initiated,
            "mixed_before": tally.mixed_before,
            "busy": tally.busy,
            "expired": tally.expired,
            "unconfirmed": tally.unconfirmed,
            "halves": tally.halves,
            "bytes_sent": tally.bytes_sent,
            "notes": [*self.notes, *filter(None, (keeper.trouble, REFUSED if learner.progress.refused else None))],
            "drawn": learner.budget.steps if learner.budget is not None else None,
            "clip_norm": learner.clip_norm,
        }
        if keeper.metrics is not None:
            status |= {"loss": keeper.metrics.loss, "accuracy": keeper.metrics.accuracy}
        return status

    def _rate(self) -> float:
        """Steps per second over the last few seconds."""
        now = time.monotonic()
        self._recent = [*self._recent[-20:], (now, self.learner.steps)]
        then, steps = self._recent[0]
        return (self.learner.steps - steps) / (now - then) if now > then else 0.0

    # ------------------------------------------------------------ coming back

    def _find_model(self) -> None:
        mode = self.order["mode"]
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
        self.exchanger.exchange.lost = False

    def _copy_from_somebody(self) -> bool:
        """One-way: a neighbour's current model, without momentum. Neighbours first, then anybody."""
        stream = random.Random()
        near = set(self.setup.graph.neighbours[self.place.learner])
        others = sorted(self.place.others, key=lambda k: (k not in near, stream.random()))
        return any(self.exchanger.fetch(other) for _ in range(2) for other in others)
