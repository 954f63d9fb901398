"""Starts the learners, watches, replaces those that die, and collects what they leave. They end by themselves."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adp2sgd.data.indexed import detached
from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.engine.processes.control import LAST_WORDS, SUPERVISOR, line_of
from adp2sgd.engine.processes.forkserver import ForkServer
from adp2sgd.engine.processes.handover import pack
from adp2sgd.engine.processes.observer import Observer
from adp2sgd.engine.processes.seat import Seat
from adp2sgd.engine.setup import Setup
from adp2sgd.engine.spending import Spending
from adp2sgd.engine.status import Counters, LearnerStatus, RunStatus
from adp2sgd.errors import DivergedError, PrivacyError, RunError, StopRun
from adp2sgd.exchange.shared import Post, make_mail
from adp2sgd.exchange.slots import LOOK, Layout, Memory
from adp2sgd.files import to_json
from adp2sgd.privacy.plan import Plan
from adp2sgd.progress import Key
from adp2sgd.run_folder import SESSION, Folder

TICK_S = 0.05
ERRORS: dict[str, type[Exception]] = {"DivergedError": DivergedError, "PrivacyError": PrivacyError}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the supervisor waits, in seconds, and how often it tries."""

    arrive: float = 300.0  # for a learner's first report: it may have to load its records
    wedged: float = 5.0  # without any report, before a learner is killed and replaced
    rest: float = 60.0  # for the learners to write their checkpoints at the end
    short_life: float = 60.0  # a start that lasted less counts as a failure
    failures: int = 5  # in a row, before the run goes on without the learner


class Supervisor:
    """One run of K learner processes. `run` returns when all have ended."""

    def __init__(
        self,
        setup: Setup,
        folder: Folder,
        server: ForkServer,
        *,
        mode: str = "fresh",
        seats: list[Seat] | None = None,
        elapsed_s: float = 0.0,
        exchange: bool = True,
        plans: Sequence[Plan] = (),
        patience: Patience | None = None,
        on_status: Callable[[RunStatus], None] | None = None,
    ) -> None:
        """`mode`: how the learners find their first model: "fresh", or "resume" from their checkpoints."""
        self.setup, self.folder = setup, folder
        self.seats = seats or [Seat(k) for k in range(setup.plan.config.learners)]
        for seat, site in zip(self.seats, setup.site_names, strict=True):
            seat.site = site
        self.notes: list[str] = []
        self.states: dict[int, Tensor] = {}  # of the learners that ended well
        self.interrupted = False
        self.stopped: str | None = None  # why a callback has ended the run
        self._spending = Spending(plans)
        self.patience = patience or Patience()
        self._server = server
        self._mode = mode
        self.curve = folder.points()  # θ, evaluated while the learners train; earlier sessions' points first
        self._elapsed_s = max([elapsed_s, *(point.seconds for point in self.curve)])
        self._exchange = exchange
        self._on_status = on_status or (lambda _: None)
        self._failure: RunError | None = None  # why the run ends before its time
        self._going_at: float | None = None
        self._over_at: float | None = None
        self._cut_short = False
        self._counts: dict[Key, int] = {}  # everybody's steps, from the learners' last words
        model = setup.compute.model
        buffers = 0 if setup.plan.private else model.buffers.numel()  # in private mode no buffer travels
        self._layout = Layout(model.weights.numel() + buffers, model.weights.dtype)

    @property
    def seconds(self) -> float:
        """Real time of training, earlier sessions of a resumed run included."""
        if self._going_at is None:
            return self._elapsed_s
        return self._elapsed_s + (self._over_at or time.monotonic()) - self._going_at

    @property
    def global_steps(self) -> int:
        heard = max(seat.heard_total for seat in self.seats)
        return heard if self._in_step else max(sum(map(self.steps, self.seats)), heard)

    @property
    def _in_step(self) -> bool:
        """Whether the run is SYNC. Its rounds since the last checkpoint are repeated after an early end."""
        return self.setup.plan.config.algorithm == "sync"

    def steps(self, seat: Seat) -> int:
        """A learner's steps over all its starts: what it reported itself, or what the others heard of it, if more."""
        heard = sum(steps for (learner, _), steps in self._counts.items() if learner == seat.learner)
        return heard if self._in_step and self._counts else max(seat.totals.steps, heard)

    def run(self) -> None:
        """Raises RunError if the run cannot go on; no process is left behind in any case."""
        self._mail = make_mail()
        try:
            self._run()
        finally:
            shutil.rmtree(self._mail, ignore_errors=True)  # as the fork server does, unless it was killed

    def _run(self) -> None:
        self._post = Post(self._mail, SUPERVISOR)
        self._descriptors = [self._layout.create(seat.learner) for seat in self.seats]
        self._task, self._records = self._pack()
        self.keep()
        self._observer = Observer(
            self.setup, self.folder, self._mail, self._descriptors, self._layout,
            curve=self.curve, notes=self.notes, clock=lambda: self.seconds,
        )  # fmt: skip
        try:
            self._observer.start()
            self._spending.start()
            self._server.give(self._descriptors, self._task, self._records, self._mail)
            with Interrupt() as interrupt:
                for seat in self.seats:
                    self._spawn(seat, self._mode)
                while any(seat.alive for seat in self.seats):
                    self._turn(interrupt)
            if self._failure is not None:
                raise self._failure
            self._collect()
        finally:
            self._server.close()  # first: then nobody uses the rest any more
            self._observer.close()
            self._spending.close()
            self._post.close()
            for descriptor in (*self._descriptors, self._task, *self._records):
                os.close(descriptor)
            self.keep()

    @property
    def status(self) -> RunStatus:
        return RunStatus.of(
            self.setup.plan, self.global_steps, self.seconds, map(self._learner_status, self.seats),
            clock="real", curve=self.curve, notes=self.notes, monitor=self.setup.task.monitor,
            model=None if self._observer.theta is None else partial(self.setup.compute.named, self._observer.theta),
        )  # fmt: skip

    def _learner_status(self, seat: Seat) -> LearnerStatus:
        status, spending = seat.total_status, self._spending
        return replace(
            status,
            site=self.setup.site_names[seat.learner],
            epsilon_spent=spending.spent(seat.learner),
            epsilon=spending.cap(seat.learner),
        )

    def _pack(self) -> tuple[int, list[int]]:
        """What the learners inherit: plan and task without training records, and for each its own site's. All
        inherit a dataset that is read by index, and each the numbers of its own site's records."""
        setup = self.setup
        nothing = setup.task.train.take(torch.empty(0, dtype=torch.int64))
        largest = max(each.count for each in setup.populations)
        task = pack((setup.plan, replace(setup.task, train=nothing)))
        sites = (setup.site(seat.learner) for seat in self.seats)
        return task, [pack((site.name, detached(site.task.train), largest)) for site in sites]

    def _collect(self) -> None:
        """The last models, for evaluation: the learners left them in their memories, so a full disk loses none."""
        for seat in self.seats:
            if seat.fate == "ended":
                memory = Memory(self._descriptors[seat.learner], self._layout)
                self.states[seat.learner] = memory.slots[LOOK].clone()

    def _turn(self, interrupt: Interrupt) -> None:
        before = time.monotonic()
        select.select([self._post.fileno(), self._server.line.fileno()], [], [], TICK_S)
        asleep = time.monotonic() - before
        if asleep > 1.0:  # the whole group was stopped, or the machine slept: nobody is to blame
            for seat in self.seats:
                seat.heard_at += asleep
        for _, data in self._post.receive():
            self._hear(json.loads(data))
        for report in self._server.reports():
            self._learn(report)
        if interrupt.requested and not self.interrupted:
            self.interrupted = True
            self._end(cut_short=True)
        self._watch()
        self._direct()
        if self._going_at is not None and self._over_at is None:
            self._observer.note(self.global_steps)
        self._spending.drawn = [seat.status.drawn for seat in self.seats]
        self._tell_callbacks()

    def _tell_callbacks(self) -> None:
        """A run that a callback stops ends once it has begun: before that there is no model."""
        if self.stopped is None:
            try:
                self._on_status(self.status)
            except StopRun as stop:
                self.stopped = str(stop) or "no reason given"
        if self.stopped is not None and self._going_at is not None and self._over_at is None:
            self._end(cut_short=True)

    # ------------------------------------------------------------ listening

    def _hear(self, report: dict[str, Any]) -> None:
        if "error" in report:
            if report["start"] == self.seats[report["learner"]].start:
                raise ERRORS.get(report["kind"], RunError)(report["error"])
            return
        counters = Counters(**report["status"].pop("counters"))
        status = LearnerStatus(**{**report["status"], "counters": counters, "notes": tuple(report["status"]["notes"])})
        seat = self.seats[status.learner]
        if status.start != seat.start:
            return
        seat.heard_at, seat.heard_total, seat.status = time.monotonic(), report["total"], status
        if seat.fate in {"starting", "restarting"} and status.state != "starting":
            seat.fate = "running"
        for learner, start, steps, _ in report.get("counts", ()):
            self._counts[learner, start] = max(steps, self._counts.get((learner, start), 0))

    def _learn(self, report: dict[str, Any]) -> None:
        if "gone" in report:
            raise RunError("the process that starts learners was killed; go on with --resume " + str(self.folder.path))
        seat = self.seats[report["learner"]]
        if "code" not in report:
            seat.pid = report["pid"]
        elif report["pid"] == seat.pid:
            seat.pid, seat.alive = None, False
            self._bury(seat, report["code"])

    def _bury(self, seat: Seat, code: int) -> None:
        """Handle the end of a learner's process, expected or not."""
        for _, data in self._post.receive():  # its last words may still wait
            self._hear(json.loads(data))
        if code == 0 and seat.status.state != "ended":
            self._hear_late(seat)
        if code == 0 and seat.status.state == "ended":
            seat.fate = "ended"
            return
        if self._over_at is not None and seat.fate in {"starting", "restarting"}:
            seat.fate = "lost"
            self.notes.append(f"learner {seat.name} had not come back when the run ended")
            return
        steps, how = seat.totals.steps, _how(code)
        memory = Memory(self._descriptors[seat.learner], self._layout)
        if memory.exposed:
            memory.exposed = False
            seat.died += 1
            self.notes.append(f"learner {seat.name} died within an exchange: a half-exchange may have happened")
        if self._in_step:
            seat.fate = "lost"
            self._failure = self._failure or RunError(
                f"learner {seat.name} was lost after {steps} steps ({how}); SYNC cannot go on without it: "
                f'go on with --resume {self.folder.path}, or use algorithm = "adpsgd"'
            )
            if self._going_at is None:  # there is nothing to keep yet
                raise self._failure
            self._end(cut_short=True)  # the others keep the last round's model
            return
        short = time.monotonic() - seat.spawned_at < self.patience.short_life
        seat.failures = seat.failures + 1 if short else 1
        if self._over_at is not None or seat.failures > self.patience.failures:
            seat.fate = "lost"
            self.notes.append(f"learner {seat.name} was lost after {steps} steps ({how})")
            self._refuse_empty()
            return
        self.notes.append(f"learner {seat.name} was restarted after {steps} steps ({how})")
        self._keep_notes_of(seat)
        seat.turn_page()
        seat.start += 1
        seat.restarts += 1
        self.keep()
        self._spawn(seat, "comeback")

    def _hear_late(self, seat: Seat) -> None:
        """What a learner left in a file, because nobody listened when it ended."""
        path = self.folder.learner(seat.learner) / LAST_WORDS
        with suppress(OSError, ValueError):
            self._hear(json.loads(path.read_text(encoding="utf-8")))
            path.unlink()

    def _refuse_empty(self) -> None:
        if self._over_at is None and all(seat.fate == "lost" for seat in self.seats):
            raise RunError(f"all learners were lost; the last: {self.notes[-1]}; what was recorded is kept")

    def _keep_notes_of(self, seat: Seat) -> None:
        self.notes += [f"learner {seat.name} {note}" for note in seat.status.notes]

    # ------------------------------------------------------------ acting

    def _spawn(self, seat: Seat, mode: str) -> None:
        seat.fate = "starting" if mode != "comeback" else "restarting"
        seat.alive, seat.pid = True, None
        seat.spawned_at = seat.heard_at = time.monotonic()
        order = {
            "learner": seat.learner,
            "start": seat.start,
            "mail": self._mail,
            "folder": str(self.folder.path.absolute()),
            "seed": self.setup.plan.seed,
            "mode": mode,
            "private": self.setup.plan.private,
            "exchange": self._exchange,
        }
        self._server.spawn(order)

    def _watch(self) -> None:
        """Kill learners that have not reported for too long. Their end is then handled like any other."""
        now = time.monotonic()
        for seat in self.seats:
            reports = seat.fate == "running" and self._over_at is None  # afterwards it may write a large checkpoint
            limit = self.patience.wedged if reports else self.patience.arrive
            if seat.alive and seat.pid is not None and now - seat.heard_at > limit:
                self.notes.append(f"learner {seat.name} did not report for {limit:g} s and was killed")
                seat.heard_at = now
                self._kill(seat)

    def _direct(self) -> None:
        """Say `go` when all are ready (a restarted learner at once), and `over` if a run must end before its time."""
        running = [seat for seat in self.seats if seat.alive]
        if self._going_at is None and self._over_at is None and all(s.state in {"ready", "lost"} for s in self.seats):
            self._going_at = time.monotonic()
        if self._going_at is not None:
            for seat in running:
                if seat.state == "ready":
                    self._tell(seat, "go")
        if self._over_at is None and self._done():
            self._end()
        if self._over_at is not None:
            for seat in running:
                if self._cut_short:
                    self._tell(seat, "over")
                if time.monotonic() > self._over_at + self.patience.rest:
                    self._kill(seat)

    def _kill(self, seat: Seat) -> None:
        if seat.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(seat.pid, signal.SIGKILL)

    def _tell(self, seat: Seat, what: str) -> None:
        order = {"do": what, "zero": time.monotonic() - self.seconds, "lost": self._failure is not None}
        self._post.send(line_of(seat.learner), json.dumps(order).encode())

    def _end(self, *, cut_short: bool = False) -> None:
        """The run is over: learners that are still coming back have nothing to add. `cut_short`: before its time."""
        self._over_at = self._over_at or time.monotonic()
        self._cut_short = self._cut_short or cut_short
        for seat in self.seats:
            if seat.alive and seat.fate in {"starting", "restarting"}:
                self._kill(seat)

    def _done(self) -> bool:
        """Whether every learner that runs has stopped, as it says itself."""
        states = [seat.state for seat in self.seats if seat.fate in {"running", "ended"}]
        return bool(states) and set(states) <= {"finished", "ended"}

    def keep(self) -> None:
        """Write what `--resume` needs to know, so that no start is ever numbered twice."""
        seats = [seat.to_dict() for seat in self.seats]
        facts = {"seed": self.setup.plan.seed, "seconds": self.seconds, "seats": seats, "notes": self.notes}
        try:
            with self.folder.replacing(SESSION, private=True) as part:
                part.write_text(to_json(facts), encoding="utf-8")
        except OSError as error:
            self.notes.append(f"{SESSION} could not be written ({error.strerror})")


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", perhaps out of memory" if code == -signal.SIGKILL else "")
