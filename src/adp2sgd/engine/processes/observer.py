"""θ while the learners train: a thread of the supervisor that asks for snapshots, averages them and evaluates.

Each learner's control thread puts its snapshot into a slot of its own, so that training waits for nothing.
A learner that is dead, restarting or silent is left out; a point for which less than half of the learners answered is
skipped, and so is one that falls due while another is evaluated. In SYNC one learner is asked: after a round all have
the same model. Only vectors that travel anyway are read.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adp2sgd.engine.evaluate import evaluate
from adp2sgd.engine.processes.control import OBSERVER, line_of
from adp2sgd.engine.setup import Setup
from adp2sgd.engine.theta import Mean
from adp2sgd.errors import reason
from adp2sgd.exchange.shared import Post
from adp2sgd.exchange.slots import LOOK, Layout, Memory
from adp2sgd.metrics import Figures
from adp2sgd.progress import Key, from_rows
from adp2sgd.run_folder import Folder, Point

AGAIN_S = 0.01  # before a learner that was busy is asked again
PIECE = 250  # held-out records between two looks at whether the run is over


@dataclass(eq=False)
class Look(Mean):
    """θ of the snapshots that came."""

    seconds: float = 0.0  # of training, when the last snapshot came
    counts: dict[Key, int] = field(default_factory=dict)  # steps: the most that anybody knows of


class Observer(threading.Thread):
    """Started once; `note` leaves work for it, `close` ends it. Appends to `curve` and to the run's events."""

    def __init__(
        self,
        setup: Setup,
        folder: Folder,
        mail: str,
        descriptors: list[int],
        layout: Layout,
        *,
        curve: list[Point],
        notes: list[str],
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds of training. The caller may use `setup.model` again after `close`."""
        super().__init__(name="observer", daemon=True)
        self.curve, self._notes, self._clock = curve, notes, clock
        self._setup, self._folder = setup, folder
        self._post = Post(mail, OBSERVER)
        self._memories = [Memory(each, layout) for each in descriptors]  # not pinned: this process outlives them
        self._asked = 1 if setup.plan.config.algorithm == "sync" else setup.plan.config.learners
        self._patience_s = 2 * layout.deadline_s
        self._seen = curve[-1].global_steps if curve else 0  # global steps at the last evaluation
        self._number = 0
        self.theta: Tensor | None = None  # as evaluated last; written by this thread, with its point
        self._idle = True
        self._closing = False
        self._wake = threading.Event()

    def note(self, global_steps: int) -> None:
        """Start an evaluation if one is due at this progress and none is under way. Returns at once."""
        plan = self._setup.plan
        due = plan.passed(plan.config.evaluate_every, self._seen, global_steps)
        if due and self._idle and global_steps < plan.target_steps:  # the last evaluation follows the run
            self._idle, self._seen = False, global_steps
            self._wake.set()

    def close(self) -> None:
        """End the thread. An evaluation under way is abandoned after its current piece of held-out records."""
        self._closing = True
        self._wake.set()
        if self.ident is not None:
            self.join()
        self._post.close()
        self._memories.clear()  # each holds a descriptor

    def run(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (self._setup.plan.config.learners + 1)))
        try:
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                if not self._closing:
                    self._look()
                    self._idle = True
        except Exception as error:  # whatever a task's code or a full disk does: the learners go on
            why = reason(error, private=self._setup.plan.private)
            self._notes.append(f"θ could not be evaluated while the learners trained ({why})")
        finally:
            torch.set_num_threads(threads)

    def _look(self) -> None:
        mean = self.gather()
        metrics = self._metrics(mean.theta) if 2 * mean.learners >= self._asked else {}
        if not metrics:
            return
        steps = sum(mean.counts.values())
        self._seen = max(self._seen, steps)
        if steps >= self._setup.plan.target_steps:
            return  # the last evaluation follows the run
        if self.curve and steps <= self.curve[-1].global_steps:
            return  # the session before this one was further when it was killed
        point = self._setup.point(steps, mean.seconds, metrics, mean)
        point = replace(point, learners=mean.learners if mean.learners < self._asked else None)
        self.theta = mean.theta
        self.curve.append(point)
        self._folder.append_point(point)

    def gather(self) -> Look:
        """Ask the learners that are there for a snapshot, and average those that come in time."""
        self._number += 1
        mean, end = Look(), time.monotonic() + self._patience_s
        waiting = {learner for learner in range(self._asked) if self._ask(learner)}
        while waiting and not self._closing and time.monotonic() < end:
            select.select([self._post], [], [], AGAIN_S)
            came, seconds = list(self._post.receive()), self._clock()  # adding up takes longer than the snapshots
            again = [self._take(json.loads(data), mean, waiting, seconds) for _, data in came]
            if any(learner is not None for learner in again):
                time.sleep(AGAIN_S)
            waiting -= {learner for learner in again if learner is not None and not self._ask(learner)}
        return mean

    def _ask(self, learner: int) -> bool:
        order = {"do": "show", "learner": learner, "number": self._number}
        return self._post.send(line_of(learner), json.dumps(order).encode())

    def _take(self, reply: dict[str, Any], mean: Look, waiting: set[int], seconds: float) -> int | None:
        """Add the snapshot of an answer. Returns the learner if it must be asked again."""
        learner = reply["learner"]
        if reply["number"] != self._number or learner not in waiting:
            return None
        state = self._copy(learner, reply["sequence"]) if "sequence" in reply else None
        if state is None:
            return int(learner)
        waiting.discard(learner)
        mean.seconds = seconds
        for key, count in from_rows(reply["counts"]).items():
            mean.counts[key] = max(mean.counts.get(key, 0), count.steps)
        mean.add(state)
        return None

    def _copy(self, learner: int, sequence: int) -> Tensor | None:
        """The snapshot on the device; None if the learner has written another one meanwhile."""
        memory = self._memories[learner]
        state = memory.slots[LOOK].to(self._setup.compute.device, copy=True)
        return state if memory.sequence(LOOK) == sequence else None

    def _metrics(self, theta: Tensor) -> Figures:
        """On all held-out records; none if the run ended meanwhile."""
        setup = self._setup
        return evaluate(setup.compute.model, setup.task, theta, most=PIECE, stop=lambda: self._closing)
