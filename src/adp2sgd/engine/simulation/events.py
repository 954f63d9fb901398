"""What happens in a simulation, and to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from adp2sgd.engine.spending import Spending
from adp2sgd.engine.status import Counters, LearnerStatus, Staleness
from adp2sgd.exchange.protocol import Exchange, Message
from adp2sgd.learner import Learner


@dataclass(frozen=True)
class StepEnd:
    """Event: a learner's gradient is ready."""

    learner: int


@dataclass(frozen=True)
class Turn:
    """Event: a learner whose budget is spent goes on averaging, at the pace of its steps."""

    learner: int


Event = StepEnd | Turn | Message


@dataclass
class Member:
    """A learner with what the simulator keeps about it."""

    learner: Learner
    exchange: Exchange
    turns: int = 0  # steps and averaging-only turns
    partners: list[int] = field(default_factory=list)  # still to be asked for the last turn's exchanges
    wanted_at: int = 0  # own steps taken when these were drawn
    read_at: int = 0  # the global step at which ŵ was read
    staleness: Staleness = field(default_factory=Staleness)

    def note_staleness(self, global_steps: int) -> int:
        stale = global_steps - self.read_at
        self.staleness.note(stale)
        return stale

    @property
    def counters(self) -> Counters:
        return Counters.of(self.learner.steps, self.staleness, self.exchange.tally)

    def status(self, site: str | None, spending: Spending) -> LearnerStatus:
        learner, budget = self.learner, self.learner.budget
        return LearnerStatus(
            learner=learner.number,
            site=site,
            state="training" if learner.may_step else "averaging",
            counters=self.counters,
            drawn=None if budget is None else budget.steps,
            epsilon_spent=spending.spent(learner.number),
            epsilon=spending.cap(learner.number),
            clip_norm=learner.clip_norm,
        )
