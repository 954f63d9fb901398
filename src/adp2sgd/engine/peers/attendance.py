"""How a run stands, as one site sees it: itself in full, the others by what they have told and by their links."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from adp2sgd.engine.spending import Spending
from adp2sgd.engine.status import Counters, LearnerStatus, RunStatus
from adp2sgd.exchange.neighbours import Event
from adp2sgd.exchange.network import LinkStatus
from adp2sgd.run_folder import Point

if TYPE_CHECKING:
    from adp2sgd.engine.peers.worker import SiteWorker

KEPT = 20  # events in a status
NEVER = "never came"
WAITING = "waiting for a first neighbour"  # a state


class Attendance:
    """`came` holds the numbers of all sites that were ever heard of in this run."""

    def __init__(self, worker: SiteWorker, names: tuple[str, ...]) -> None:
        self.names = names
        self.troubles: dict[str, None] = {}  # refusals, in words, each once
        self.curve: list[Point] = []
        self._worker = worker
        self._events: list[str] = []
        self._linked: set[int] = set()  # at any time
        budget = worker.learner.budget
        self._spending = Spending([] if budget is None else [budget.plan])
        self._spending.start()

    def note(self, event: Event) -> None:
        """What happens to a link; in its thread."""
        text = " ".join(filter(None, (f"site {event.site}:", event.kind, event.reason and f"({event.reason})")))
        self._events = [*self._events[-KEPT:], f"{time.strftime('%H:%M:%S')} {text}"]
        if "refused" in event.kind:
            self.troubles[text] = None

    @property
    def came(self) -> set[int]:
        counted = {learner for (learner, _), count in self._worker.learner.progress.counts().items() if count.steps}
        return self._linked | counted | {self._worker.place.learner}

    @property
    def missing(self) -> list[str]:
        """Planned sites that never came."""
        return [name for number, name in enumerate(self.names) if number not in self.came]

    def steps(self, number: int) -> int:
        counts = self._worker.learner.progress.counts()
        return sum(count.steps for (learner, _), count in counts.items() if learner == number)

    def status(self) -> RunStatus:
        worker, plan = self._worker, self._worker.plan
        links = {each.peer.number: each for each in worker.carrier.status()}
        self._linked |= {number for number, link in links.items() if link.up}
        total = worker.learner.progress.total
        me = worker.place.learner
        learners = [self.own() if k == me else self._other(k, links.get(k)) for k in range(len(self.names))]
        waits = [] if worker.state != WAITING else [f"{WAITING} before the first private step; --alone begins without"]
        notes = [*waits, *(f"site {name} {NEVER}" for name in self.missing)]
        return RunStatus(
            task=plan.config.task,
            algorithm=plan.config.algorithm,
            clock="real",
            seconds=time.monotonic() - worker.control.zero,
            global_steps=total,
            target_steps=plan.target_steps,
            epoch=plan.epoch(total),
            epochs=plan.config.epochs,
            learners=tuple(learners),
            curve=tuple(self.curve),
            notes=(*notes, *self._worker.terms.credentials.warnings(), *self._events),
        )

    def own(self) -> LearnerStatus:
        status, _ = self._worker.report()
        self._spending.drawn = [status.drawn]
        return replace(
            status,
            counters=replace(self._worker.session.past + status.counters, steps=self.steps(status.learner)),
            restarts=status.start,
            epsilon_spent=self._spending.spent(0),
            epsilon=self._spending.cap(0),
        )

    def close(self) -> None:
        self._spending.close()

    def _other(self, number: int, link: LinkStatus | None) -> LearnerStatus:
        worker, name = self._worker, self.names[number]
        told = worker.introduction.heard.get(name)
        exchanges = worker.session.past.partners.get(number, 0) + worker.exchange.tally.partners.get(number, 0)
        notes = []
        if number in worker.met_at:
            notes.append(f"last exchange {time.monotonic() - worker.met_at[number]:.0f} s ago")
        if link is not None and not link.up and link.trouble:
            notes.append(link.trouble)
        return LearnerStatus(
            learner=number,
            site=name,
            state=self._state(number, link),
            counters=Counters(steps=self.steps(number), exchanges=exchanges),
            epsilon=None if told is None else told.epsilon,
            notes=tuple(notes),
        )

    def _state(self, number: int, link: LinkStatus | None) -> str:
        if number not in self.came:
            return NEVER
        if self._worker.learner.progress.stopped(number):
            return "stopped"
        if link is None:
            return "not a neighbour"
        return "linked" if link.up else "away"
