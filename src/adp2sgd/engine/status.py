"""How a run stands: one type for a learner and one for the run, the same in every engine.

Callbacks, live views, status pages and results read these. They may hold figures that must stay at their site, so
neither type ever leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from adp2sgd.exchange.protocol import Tally
from adp2sgd.run_folder import Measured, Point


@dataclass
class Staleness:
    """Global steps between reading ŵ and descending, over a learner's own steps."""

    total: int = 0
    max: int = 0

    def note(self, stale: int) -> None:
        self.total += stale
        self.max = max(self.max, stale)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a learner has done. Staleness is in global steps."""

    steps: int = 0
    staleness_total: int = 0
    staleness_max: int = 0
    exchanges: int = 0  # completed, on either side
    initiated: int = 0  # of these, begun by this learner
    mixed_before: int = 0  # of these, mixed before the descent of the step that they were begun in
    busy: int = 0  # answers `busy` that it received
    expired: int = 0  # asked, and no answer in time
    unconfirmed: int = 0  # answered, and no commit in time
    halves: int = 0  # exchanges that changed one side only, as far as is known
    bytes_sent: int = 0

    @classmethod
    def of(cls, steps: int, staleness: Staleness, tally: Tally) -> Self:
        return cls(
            steps=steps,
            staleness_total=staleness.total,
            staleness_max=staleness.max,
            exchanges=tally.completed,
            initiated=tally.initiated,
            mixed_before=tally.mixed_before,
            busy=tally.busy,
            expired=tally.expired,
            unconfirmed=tally.unconfirmed,
            halves=tally.halves,
            bytes_sent=tally.bytes_sent,
        )

    def __add__(self, other: Counters) -> Counters:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        sums["staleness_max"] = max(self.staleness_max, other.staleness_max)
        return Counters(**sums)

    @property
    def staleness_mean(self) -> float:
        return self.staleness_total / max(1, self.steps)


@dataclass(frozen=True, kw_only=True)
class LearnerStatus(Measured):
    """`state`: starting, ready, training, averaging (its budget is spent), finished, ended, restarting, lost …"""

    learner: int
    state: str = "starting"
    site: str | None = None
    start: int = 0  # how often its process was started before
    pid: int | None = None  # of its process, where it has one
    restarts: int = 0
    counters: Counters = field(default_factory=Counters)
    rate: float = 0.0  # steps per second
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of its own model, on held-out records
    drawn: int | None = None  # private steps that count as spent
    epsilon_spent: float | None = None
    epsilon: float | None = None  # at the cap
    clip_norm: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """`seconds` are virtual or real, as `clock` says; `curve` holds the evaluations of θ so far."""

    task: str
    algorithm: str
    clock: str
    seconds: float
    global_steps: int
    target_steps: int
    epoch: float
    epochs: float
    learners: tuple[LearnerStatus, ...]
    curve: tuple[Point, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def point(self) -> Point | None:
        """The last evaluation of θ."""
        return self.curve[-1] if self.curve else None

    @property
    def rate(self) -> float:
        """Steps per second of all learners together."""
        return sum(each.rate for each in self.learners)
