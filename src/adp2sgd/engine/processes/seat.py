"""A learner as its supervisor knows it, over all starts of its process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from adp2sgd.engine.status import Counters, LearnerStatus


@dataclass
class Seat:
    """`past` sums the reports of the learner's earlier starts; `status` is the last report of this one."""

    learner: int
    site: str | None = None  # whose records it has, where each learner has one site's
    start: int = 0
    pid: int | None = None
    status: LearnerStatus = field(default_factory=lambda: LearnerStatus(learner=-1))
    past: Counters = field(default_factory=Counters)
    restarts: int = 0
    failures: int = 0  # in a row
    died: int = 0  # deaths within an exchange: each may have left a half-exchange
    alive: bool = False
    spawned_at: float = 0.0
    heard_at: float = 0.0
    fate: str = "starting"  # starting, running, restarting, lost, ended
    heard_total: int = 0  # the global count that the learner reported last

    @property
    def state(self) -> str:
        """The learner's state in one word, for display."""
        return self.status.state if self.fate == "running" else self.fate

    @property
    def name(self) -> str:
        """For people: the site, or the number of a learner without one."""
        return self.site or str(self.learner)

    @property
    def totals(self) -> Counters:
        """Over all starts."""
        return self.past + self.status.counters

    @property
    def total_status(self) -> LearnerStatus:
        """The learner's status over all its starts."""
        return replace(
            self.status,
            learner=self.learner,
            state=self.state,
            start=self.start,
            pid=self.pid,
            restarts=self.restarts,
            counters=self.totals,
            rate=self.status.rate if self.fate == "running" else 0.0,
        )

    def turn_page(self) -> None:
        """Add the last start's counters to `past` and begin a new status."""
        self.past = self.totals
        self.status = LearnerStatus(learner=self.learner, site=self.status.site, drawn=self.status.drawn)

    def to_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know."""
        kept = ("learner", "start", "restarts", "died")
        return {**{name: getattr(self, name) for name in kept}, "counters": asdict(self.totals)}

    @classmethod
    def resumed(cls, kept: dict[str, Any]) -> Self:
        """The same learner in a later session: its next start."""
        past = Counters(**kept["counters"])
        return cls(kept["learner"], start=kept["start"] + 1, past=past, restarts=kept["restarts"], died=kept["died"])
