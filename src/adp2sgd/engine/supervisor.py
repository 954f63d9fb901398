"""Starts the learners, listens, replaces those that die, says when the run is over. It only looks at their weights."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from adp2sgd.config import fingerprint
from adp2sgd.engine.exchanger import SUPERVISOR
from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.engine.nursery import Nursery
from adp2sgd.engine.observer import Observer, read_curve
from adp2sgd.engine.setup import Setup
from adp2sgd.errors import DivergedError, PrivacyError, RunError
from adp2sgd.exchange.shared import Layout, Memory, Post, make_mail
from adp2sgd.files import to_json
from adp2sgd.privacy.plan import Plan
from adp2sgd.progress import Key
from adp2sgd.record import Folder

SESSION = "session.json"  # what `--resume` needs beside the learners' checkpoints
TICK_S = 0.05
SUMMED = (
    "steps", "staleness_total", "exchanges", "initiated", "mixed_before", "busy", "expired", "unconfirmed", "halves",
    "bytes_sent",
)  # fmt: skip
ERRORS: dict[str, type[Exception]] = {"DivergedError": DivergedError, "PrivacyError": PrivacyError}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the supervisor waits, in seconds, and how often it tries."""

    arrive: float = 300.0  # for a learner's first report: it may have to load its records
    wedged: float = 5.0  # without any report, before a learner is killed and replaced
    linger: float = 1.0  # all learners having spent their budgets, before the run ends
    rest: float = 60.0  # for the learners to write their checkpoints at the end
    short_life: float = 60.0  # a start that lasted less counts as a failure
    failures: int = 5  # in a row, before the run goes on without the learner


@dataclass
class Seat:
    """A learner as the supervisor knows it. `past` sums the reports of its earlier starts."""

    learner: int
    start: int = 0
    pid: int | None = None
    status: dict[str, Any] = field(default_factory=dict)
    past: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*SUMMED, "staleness_max"), 0))
    restarts: int = 0
    failures: int = 0
    died: int = 0  # deaths within an exchange: each may have left a half-exchange
    alive: bool = False
    spawned_at: float = 0.0
    heard_at: float = 0.0
    fate: str = "starting"  # starting, running, restarting, lost, ended

    @property
    def state(self) -> str:
        """In one word, for people."""
        return str(self.status.get("state", "starting")) if self.fate == "running" else self.fate

    @property
    def totals(self) -> dict[str, int]:
        """Over all starts."""
        sums = {name: self.past[name] + int(self.status.get(name, 0)) for name in SUMMED}
        sums["staleness_max"] = max(self.past["staleness_max"], int(self.status.get("staleness_max", 0)))
        return sums

    def turn_page(self) -> None:
        """The start that was is history."""
        self.past, self.status = self.totals, {k: v for k, v in self.status.items() if k in {"drawn", "notes"}}


class Supervisor:
    """One run of K learner processes. `run` returns when all have ended."""

    def __init__(
        self,
        setup: Setup,
        folder: Folder,
        nursery: Nursery,
        *,
        mode: str = "fresh",
        seats: list[Seat] | None = None,
        elapsed_s: float = 0.0,
        exchange: bool = True,
        plans: Sequence[Plan] = (),
        patience: Patience | None = None,
        on_status: Callable[[Supervisor], None] | None = None,
    ) -> None:
        """`mode`: how the learners find their first model: "fresh", or "resume" from their checkpoints."""
        self.setup, self.folder = setup, folder
        self.seats = seats or [Seat(k) for k in range(setup.config.learners)]
        self.notes: list[str] = []
        self.states: dict[int, Tensor] = {}  # of the learners that ended well
        self.interrupted = False
        self.plans = plans  # of the learners' budgets, in private mode
        self.patience = patience or Patience()
        self._nursery = nursery
        self._mode = mode
        self.curve = read_curve(folder)  # θ, evaluated while the learners train; earlier sessions' points first
        self._elapsed_s = max([elapsed_s, *(point.seconds for point in self.curve)])
        self._exchange = exchange
        self._on_status = on_status or (lambda _: None)
        self._failure: RunError | None = None  # why the run ends before its time
        self._going_at: float | None = None
        self._over_at: float | None = None
        self._quiet_since: float | None = None
        self._counts: dict[Key, int] = {}  # everybody's steps, from the learners' last words
        private = setup.config.privacy.mode == "private"  # then no buffer travels
        state = setup.model.weights.numel() + (0 if private else setup.model.buffers.numel())
        self._layout = Layout(state, setup.model.weights.dtype)

    @property
    def seconds(self) -> float:
        """Real time of training, earlier sessions of a resumed run included."""
        if self._going_at is None:
            return self._elapsed_s
        return self._elapsed_s + (self._over_at or time.monotonic()) - self._going_at

    @property
    def global_steps(self) -> int:
        heard = max(int(seat.status.get("total", 0)) for seat in self.seats)
        return heard if self._in_step else max(sum(map(self.steps, self.seats)), heard)

    @property
    def _in_step(self) -> bool:
        """SYNC: then rounds since the last checkpoints are undone when a run ends early, and taken again."""
        return self.setup.config.algorithm == "sync"

    def steps(self, seat: Seat) -> int:
        """A learner's steps over all its starts: what it reported itself, or what the others heard of it, if more."""
        heard = sum(steps for (learner, _), steps in self._counts.items() if learner == seat.learner)
        return heard if self._in_step and self._counts else max(seat.totals["steps"], heard)

    def run(self) -> None:
        """Raises RunError if the run cannot go on; no process is left behind in any case."""
        self._mail = make_mail()
        try:
            self._run()
        finally:
            shutil.rmtree(self._mail, ignore_errors=True)  # as the nursery does, unless it was killed

    def _run(self) -> None:
        self._post = Post(self._mail, SUPERVISOR)
        self._descriptors = [self._layout.create(seat.learner) for seat in self.seats]
        self.keep()
        self._observer = Observer(
            self.setup, self.folder, self._mail, self._descriptors, self._layout,
            curve=self.curve, notes=self.notes, clock=lambda: self.seconds,
        )  # fmt: skip
        try:
            self._observer.start()
            self._nursery.give(self._descriptors, self._mail)
            with Interrupt() as interrupt:
                for seat in self.seats:
                    self._spawn(seat, self._mode)
                while any(seat.alive for seat in self.seats):
                    self._turn(interrupt)
            if self._failure is not None:
                raise self._failure
            self._collect()
        finally:
            self._nursery.close()  # first: then nobody uses the rest any more
            self._observer.close()
            self._post.close()
            for descriptor in self._descriptors:
                os.close(descriptor)
            self.keep()

    def _collect(self) -> None:
        """The last models, for evaluation: the learners left them in their memories, so a full disk loses none."""
        for seat in self.seats:
            if seat.fate == "ended":
                memory = Memory(self._descriptors[seat.learner], self._layout)
                self.states[seat.learner] = memory.slots[seat.status["slot"]].clone()

    def _turn(self, interrupt: Interrupt) -> None:
        before = time.monotonic()
        select.select([self._post.fileno(), self._nursery.line.fileno()], [], [], TICK_S)
        asleep = time.monotonic() - before
        if asleep > 1.0:  # the whole group was stopped, or the machine slept: nobody is to blame
            for seat in self.seats:
                seat.heard_at += asleep
        for data in self._post.receive():
            self._hear(json.loads(data))
        for report in self._nursery.reports():
            self._learn(report)
        if interrupt.requested and not self.interrupted:
            self.interrupted = True
            self._end()
        self._watch()
        self._direct()
        if self._going_at is not None and self._over_at is None:
            self._observer.note(self.global_steps)
        self._on_status(self)

    # ------------------------------------------------------------ listening

    def _hear(self, status: dict[str, Any]) -> None:
        seat = self.seats[status["learner"]]
        if status["start"] != seat.start:
            return
        seat.heard_at = time.monotonic()
        if seat.fate in {"starting", "restarting"} and status["state"] not in {"starting", "failed"}:
            seat.fate = "running"
        for learner, start, steps, _ in status.pop("counts", ()):
            self._counts[learner, start] = max(steps, self._counts.get((learner, start), 0))
        seat.status = {**seat.status, **status}
        if status["state"] == "failed":
            raise ERRORS.get(status["kind"], RunError)(status["error"])

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
        """A learner's process has ended: as it should, or not."""
        for data in self._post.receive():  # its last words may still wait
            self._hear(json.loads(data))
        if code == 0 and seat.status.get("state") == "ended":
            seat.fate = "ended"
            return
        if self._over_at is not None and seat.fate in {"starting", "restarting"}:
            seat.fate = "lost"
            self.notes.append(f"learner {seat.learner} had not come back when the run ended")
            return
        steps, how = seat.totals["steps"], _how(code)
        memory = Memory(self._descriptors[seat.learner], self._layout)
        if memory.open:
            memory.open = False
            seat.died += 1
            self.notes.append(f"learner {seat.learner} died within an exchange: a half-exchange may have happened")
        if self._in_step:
            seat.fate = "lost"
            self._failure = self._failure or RunError(
                f"learner {seat.learner} was lost after {steps} steps ({how}); SYNC cannot go on without it: "
                f'go on with --resume {self.folder.path}, or use algorithm = "adpsgd"'
            )
            if self._going_at is None:  # there is nothing to keep yet
                raise self._failure
            self._end()  # the others keep the last round's model
            return
        short = time.monotonic() - seat.spawned_at < self.patience.short_life
        seat.failures = seat.failures + 1 if short else 1
        if self._over_at is not None or seat.failures > self.patience.failures:
            seat.fate = "lost"
            self.notes.append(f"learner {seat.learner} was lost after {steps} steps ({how})")
            self._refuse_empty()
            return
        self.notes.append(f"learner {seat.learner} was restarted after {steps} steps ({how})")
        self._keep_notes_of(seat)
        seat.turn_page()
        seat.start += 1
        seat.restarts += 1
        self.keep()
        self._spawn(seat, "comeback")

    def _refuse_empty(self) -> None:
        if self._over_at is None and all(seat.fate == "lost" for seat in self.seats):
            raise RunError(f"all learners were lost; the last: {self.notes[-1]}; what was recorded is kept")

    def _keep_notes_of(self, seat: Seat) -> None:
        self.notes += [f"learner {seat.learner} {note}" for note in seat.status.get("notes", ())]

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
            "seed": self.setup.seed,
            "mode": mode,
            "private": self.setup.config.privacy.mode == "private",
            "config": fingerprint(self.setup.config),
            "exchange": self._exchange,
        }
        self._nursery.spawn(order)

    def _watch(self) -> None:
        """Kill what has not been heard of for too long; its end is then learned like any other."""
        now = time.monotonic()
        for seat in self.seats:
            reports = seat.fate == "running" and self._over_at is None  # afterwards it may write a large checkpoint
            limit = self.patience.wedged if reports else self.patience.arrive
            if seat.alive and seat.pid is not None and now - seat.heard_at > limit:
                self.notes.append(f"learner {seat.learner} did not report for {limit:g} s and was killed")
                seat.heard_at = now
                self._kill(seat)

    def _direct(self) -> None:
        """Say `go` when all are ready (a restarted learner at once), and `over` when the run is done."""
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
                self._tell(seat, "over")
                if time.monotonic() > self._over_at + self.patience.rest:
                    self._kill(seat)

    def _kill(self, seat: Seat) -> None:
        if seat.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(seat.pid, signal.SIGKILL)

    def _tell(self, seat: Seat, what: str) -> None:
        note = {"do": what, "zero": time.monotonic() - self.seconds, "lost": self._failure is not None}
        self._post.send(str(seat.learner), json.dumps(note).encode())

    def _end(self) -> None:
        self._over_at = time.monotonic()
        for seat in self.seats:  # one that is still coming back has nothing to add
            if seat.alive and seat.fate in {"starting", "restarting"}:
                self._kill(seat)

    def _done(self) -> bool:
        """Whether every learner that runs has finished, or all have spent their budgets for a while."""
        states = [seat.state for seat in self.seats if seat.fate == "running"]
        if not states or not set(states) <= {"finished", "averaging"}:
            self._quiet_since = None
            return False
        if "finished" in states:
            return True
        self._quiet_since = self._quiet_since or time.monotonic()
        return time.monotonic() - self._quiet_since > self.patience.linger

    def keep(self) -> None:
        """Write what `--resume` needs to know, so that no start is ever numbered twice."""
        seats = [asdict(seat) for seat in self.seats]
        facts = {"seed": self.setup.seed, "seconds": self.seconds, "seats": seats, "notes": self.notes}
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
