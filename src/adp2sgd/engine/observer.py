"""θ while the learners train: a thread of the supervisor that asks for snapshots, averages them and evaluates.

Each learner's exchange thread takes its snapshot beside those for its partners, so that training waits for nothing.
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
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from adp2sgd.engine.evaluate import Metrics, evaluate
from adp2sgd.engine.exchanger import OBSERVER
from adp2sgd.engine.setup import Setup
from adp2sgd.errors import reason
from adp2sgd.exchange.protocol import Message
from adp2sgd.exchange.shared import NO_SLOT, Datagram, Layout, Memory, Post, decode
from adp2sgd.files import owner_only, to_json
from adp2sgd.progress import Key
from adp2sgd.record import Folder, Point

EVENTS = "events.jsonl"  # of the run: one line per evaluation of θ
AGAIN_S = 0.01  # before a learner that was busy is asked again
PIECE = 250  # held-out records between two looks at whether the run is over


def read_curve(folder: Folder) -> list[Point]:
    """The points that earlier sessions recorded; a line that is not whole is left out."""
    points: list[Point] = []
    path = folder.path / EVENTS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            points.append(Point(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return points


def write_point(folder: Folder, point: Point) -> None:
    with open(folder.path / EVENTS, "a", encoding="utf-8", opener=owner_only) as file:
        file.write(to_json(asdict(point)) + "\n")


@dataclass(eq=False)
class Mean:
    """The average of the snapshots that came. Sums are of differences from the first: equal models differ by 0."""

    learners: int = 0
    seconds: float = 0.0  # of training, when the last snapshot came
    counts: dict[Key, int] = field(default_factory=dict)  # steps: the most that anybody knows of
    _first: Tensor = field(default_factory=lambda: torch.empty(0))
    _total: Tensor = field(default_factory=lambda: torch.empty(0))
    _squares: float = 0.0

    def add(self, state: Tensor) -> None:
        if not self.learners:
            self._first, self._total = state, torch.zeros_like(state, dtype=torch.float64)
        else:
            change = state.double() - self._first
            self._total += change
            self._squares += float(change.square().sum())
        self.learners += 1

    @property
    def theta(self) -> Tensor:
        return (self._first + self._total / self.learners).to(self._first.dtype)

    @property
    def consensus(self) -> float:
        """(1/K) Σ ‖w_k − θ‖² over the snapshots."""
        shift = float((self._total / self.learners).square().sum())
        return max(0.0, self._squares / self.learners - shift)


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
        self._asked = 1 if setup.config.algorithm == "sync" else setup.config.learners
        self._patience_s = 2 * layout.deadline_s
        self._every = setup.config.evaluate_every * setup.steps_per_epoch
        self._seen = curve[-1].global_steps if curve else 0  # global steps at the last evaluation
        self._number = 0
        self._idle = True
        self._closing = False
        self._wake = threading.Event()

    def note(self, global_steps: int) -> None:
        """How far the run is. Returns at once; an evaluation begins if one is due and none is under way."""
        due = global_steps // self._every > self._seen // self._every
        if due and self._idle and global_steps < self._setup.target_steps:  # the last evaluation follows the run
            self._idle, self._seen = False, global_steps
            self._wake.set()

    def close(self) -> None:
        """Give up what is under way; waits for some held-out records at most."""
        self._closing = True
        self._wake.set()
        if self.ident is not None:
            self.join()
        self._post.close()
        self._memories.clear()  # each holds a descriptor

    def run(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (self._setup.config.learners + 1)))
        try:
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                if not self._closing:
                    self._look()
                    self._idle = True
        except Exception as error:  # whatever a task's code or a full disk does: the learners go on
            why = reason(error, private=self._setup.private)
            self._notes.append(f"θ could not be evaluated while the learners trained ({why})")
        finally:
            torch.set_num_threads(threads)

    def _look(self) -> None:
        mean = self.gather()
        metrics = self._metrics(mean.theta) if 2 * mean.learners >= self._asked else None
        if metrics is None:
            return
        steps = sum(mean.counts.values())
        self._seen = max(self._seen, steps)
        if steps >= self._setup.target_steps:
            return  # the last evaluation follows the run
        if self.curve and steps <= self.curve[-1].global_steps:
            return  # the session before this one was further when it was killed
        point = Point(
            global_steps=steps,
            epoch=self._setup.epoch(steps),
            seconds=mean.seconds,
            loss=metrics.loss,
            accuracy=metrics.accuracy,
            consensus=mean.consensus,
            learners=mean.learners if mean.learners < self._asked else None,
        )
        self.curve.append(point)
        write_point(self._folder, point)

    def gather(self) -> Mean:
        """Ask the learners that are there for a snapshot, and average those that come in time."""
        self._number += 1
        mean, end = Mean(), time.monotonic() + self._patience_s
        waiting = {learner for learner in range(self._asked) if self._ask(learner)}
        while waiting and not self._closing and time.monotonic() < end:
            select.select([self._post], [], [], AGAIN_S)
            came, seconds = list(self._post.receive()), self._clock()  # adding up takes longer than the snapshots
            busy = [self._take(decode(data), mean, waiting, seconds) for data in came]
            if any(learner is not None for learner in busy):
                time.sleep(AGAIN_S)
            waiting -= {learner for learner in busy if learner is not None and not self._ask(learner)}
        return mean

    def _ask(self, learner: int) -> bool:
        return self._post.send(str(learner), json.dumps({"do": "show", "number": self._number}).encode())

    def _take(self, datagram: Datagram, mean: Mean, waiting: set[int], seconds: float) -> int | None:
        """Add the snapshot of an answer and release its slot. Returns the learner if it must be asked again."""
        message = datagram.message
        assert message is not None
        wanted = message.number == self._number and message.sender in waiting
        state = self._copy(message, datagram) if wanted else None
        if datagram.slot != NO_SLOT:
            self._memories[message.sender].release(datagram.slot, datagram.sequence)
        if state is None:
            return message.sender if wanted else None
        waiting.discard(message.sender)
        mean.seconds = seconds
        for key, count in message.progress.items():
            mean.counts[key] = max(mean.counts.get(key, 0), count.steps)
        mean.add(state)
        return None

    def _copy(self, message: Message, datagram: Datagram) -> Tensor | None:
        """The snapshot on the device; None if the learner was busy, or has used the slot again meanwhile."""
        if datagram.slot == NO_SLOT:
            return None
        memory = self._memories[message.sender]
        state = memory.slots[datagram.slot].to(self._setup.device, copy=True)
        return state if memory.sequence(datagram.slot) == datagram.sequence else None

    def _metrics(self, theta: Tensor) -> Metrics | None:
        """On all held-out records; None if the run ended meanwhile."""
        task, loss, accuracy = self._setup.task, 0.0, 0.0
        records = len(task.test)
        classes = task.metric == "accuracy"
        for rows in torch.arange(records).split(PIECE):
            if self._closing:
                return None
            part = evaluate(self._setup.model, task, theta, rows)
            loss += part.loss * len(rows) / records
            accuracy += (part.accuracy or 0.0) * len(rows) / records
        return Metrics(loss, accuracy if classes else None)
