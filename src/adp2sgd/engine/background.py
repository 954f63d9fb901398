"""A learner's background thread: events, checkpoints and evaluations. Training waits for no disk but its ledger's."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.evaluate import evaluate
from adp2sgd.engine.pace import Pace
from adp2sgd.engine.site import Site
from adp2sgd.errors import reason
from adp2sgd.files import to_json
from adp2sgd.flat import FlatModel
from adp2sgd.learner import Learner
from adp2sgd.metrics import Figures
from adp2sgd.progress import Count, Key, to_rows
from adp2sgd.run_folder import Folder

LOOK = 1000  # held-out records that a look in passing uses, the same ones each time
PACE_S = 0.5  # between two writes of the events


class Background(threading.Thread):
    """`evaluate` and `checkpoint` return at once; the thread does the work. `trouble` says what it could not do."""

    def __init__(
        self, site: Site, compute: Compute, learner: Learner, folder: Folder, *,
        snapshot: Callable[[], Tensor], evaluated: Callable[[], Tensor], counts: Callable[[], dict[Key, Count]],
    ) -> None:  # fmt: skip
        """`snapshot` gives a copy of the learner's model, whatever it is doing, and `counts` the steps behind it.
        `evaluated` gives a copy of what is evaluated of it."""
        super().__init__(name="background", daemon=True)
        self.metrics: Figures = {}
        self.trouble: str | None = None
        self._site = site
        self._device = compute.device
        self._learner = learner
        self._folder = folder
        self._snapshot = snapshot
        self._evaluated = evaluated
        self._counts = counts
        self._lines: deque[str] = deque()  # the training thread appends, this one takes
        self._due = {"evaluate": False, "checkpoint": False}
        self._wake = threading.Event()
        self._closing = False
        self.pace = Pace(site.plan.config.checkpoint_every_s)
        self._model: FlatModel | None = None

    def log(self, events: list[dict[str, Any]]) -> None:
        self._lines.extend([to_json(event) for event in events])

    def evaluate(self) -> None:
        self._due["evaluate"] = True
        self._wake.set()

    def checkpoint(self) -> None:
        if not self._due["checkpoint"]:
            self._due["checkpoint"] = True
            self._wake.set()

    def close(self, *, checkpoint: bool) -> None:
        """Write what is pending, in the calling thread. The learner must not change meanwhile."""
        self._closing = True
        self._wake.set()
        self.join()
        self._write_events()
        if checkpoint:
            self._write_checkpoint()

    def run(self) -> None:
        while not self._closing:
            self._wake.wait(PACE_S)
            self._wake.clear()
            self._write_events()
            if self._due["checkpoint"]:
                began = time.monotonic()
                self._write_checkpoint()
                self.pace.done(began)
                self._due["checkpoint"] = False
            if self._due["evaluate"] and not self._closing:
                self._due["evaluate"] = False
                try:
                    self._look()
                except Exception as error:  # out of memory, say
                    why = reason(error, private=self._site.plan.private)
                    self.trouble = f"its own looks at held-out records fail ({why})"

    def _write_events(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if lines:
            try:
                self._folder.append_events(self._learner.number, lines)
            except OSError as error:
                self.trouble = f"events are not recorded ({error.strerror})"

    def _write_checkpoint(self) -> None:
        try:
            start = self._learner.progress.own[1]
            facts = {"start": start, "seed": self._site.plan.seed, "counts": to_rows(self._counts())}
            learner_checkpoint.save(self._folder, self._learner, self._snapshot(), facts)
        except OSError as error:
            self.trouble = f"checkpoints cannot be written ({error.strerror})"

    def _look(self) -> None:
        """Evaluate the model on some held-out records, in a module of its own: training continues meanwhile."""
        task = self._site.task
        if self._model is None:
            with torch.random.fork_rng(devices=[]):
                self._model = FlatModel(task.model(), self._device)
        records = len(task.test)
        rows = None
        if records > LOOK:
            rows = torch.randperm(records, generator=torch.Generator().manual_seed(self._site.plan.seed))[:LOOK]
        self.metrics = evaluate(self._model, task, self._evaluated(), rows)
