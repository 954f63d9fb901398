"""How a run stands: one type for a learner and one for the run, the same in every engine.

Callbacks, live views, status pages and results read these. They may hold figures that must stay at their site, so
neither type ever leaves it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Self

from torch import Tensor

from adp2sgd.engine.plan import Plan
from adp2sgd.exchange.protocol import Tally
from adp2sgd.files import to_json
from adp2sgd.run_folder import STATUS, Folder, Measured, Point, by_number

PERIOD_S = 1.0  # between two writes of it, at least
SHARE = 0.02  # of the time that writing may take, at most


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
    partners: Mapping[int, int] = field(default_factory=dict)  # partner → completed exchanges with it

    def __post_init__(self) -> None:
        object.__setattr__(self, "partners", by_number(self.partners))

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
            partners=tally.partners.copy(),  # while another thread exchanges
        )

    def __add__(self, other: Counters) -> Counters:
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        sums["staleness_max"] = max(self.staleness_max, other.staleness_max)
        met = self.partners.keys() | other.partners.keys()
        partners = {k: self.partners.get(k, 0) + other.partners.get(k, 0) for k in met}
        return Counters(**sums, partners=partners)

    @property
    def staleness_mean(self) -> float:
        return self.staleness_total / max(1, self.steps)


COUNTS = [each.name for each in fields(Counters) if each.name != "partners"]


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

    @property
    def name(self) -> str:
        """What people call the learner: its site where it has one, else its number."""
        return self.site or str(self.learner)


@dataclass(frozen=True, kw_only=True)
class PublicStatus:
    """What a site tells others of itself, beside its model and the step counts. It holds nothing that depends on the
    site's records."""

    site: str
    stopped: bool = False
    epsilon: float | None = None  # stated: what its policy lets all runs spend
    delta: float | None = None


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
    monitor: str = "-loss"  # the metric that decides; "-" before it: smaller is better
    model: Callable[[], Mapping[str, Tensor]] | None = field(default=None, repr=False, compare=False)
    """θ of the last evaluation under torch's own names; for callbacks alone, and only within their call."""
    written_at: float | None = None  # Unix time at which status.json was written
    left_s: float | None = None  # real time until the target, at the pace of this session

    @classmethod
    def of(
        cls, plan: Plan, global_steps: int, seconds: float, learners: Iterable[LearnerStatus], *,
        clock: str, curve: Iterable[Point], notes: Iterable[str], monitor: str,
        model: Callable[[], Mapping[str, Tensor]] | None,
    ) -> Self:  # fmt: skip
        """The status of a run of `plan`."""
        return cls(
            task=plan.config.task,
            algorithm=plan.config.algorithm,
            clock=clock,
            seconds=seconds,
            global_steps=global_steps,
            target_steps=plan.target_steps,
            epoch=plan.epoch(global_steps),
            epochs=plan.config.epochs,
            learners=tuple(learners),
            curve=tuple(curve),
            notes=tuple(notes),
            monitor=monitor,
            model=model,
        )

    @property
    def point(self) -> Point | None:
        """The last evaluation of θ."""
        return self.curve[-1] if self.curve else None

    @property
    def private(self) -> bool:
        """Whether learners spend a privacy budget."""
        return any(each.drawn is not None for each in self.learners)

    @property
    def rate(self) -> float:
        """Steps per second of all learners together."""
        return sum(each.rate for each in self.learners)


OnStatus = Callable[[RunStatus], None] | Iterable[Callable[[RunStatus], None]] | None
"""What an engine may be given to call with each status; see `callbacks.py`."""


class StatusFile:
    """A callback for statuses: writes one to `status.json` each second, then calls `then`.

    The curve is left out, because the run's events hold it. The file is for its owner alone. If it cannot be written,
    the run goes on.
    """

    def __init__(self, folder: Folder, then: Callable[[RunStatus], None]) -> None:
        self._folder, self._then = folder, then
        self._next = 0.0
        self._began: tuple[float, int] | None = None  # the session's first status: time and global steps

    def __call__(self, status: RunStatus) -> None:
        now = time.monotonic()
        if self._began is None or status.global_steps < self._began[1]:
            self._began = now, status.global_steps
        if now >= self._next or status.global_steps >= status.target_steps:
            with suppress(OSError):
                self._write(status, now)
            self._next = now + max(PERIOD_S, (time.monotonic() - now) / SHARE)
        self._then(status)

    def _write(self, status: RunStatus, now: float) -> None:
        assert self._began is not None
        began, steps = self._began
        left = max(0, status.target_steps - status.global_steps)
        pace = (now - began) / (status.global_steps - steps) if status.global_steps > steps else None
        told = replace(
            status, curve=(), model=None, written_at=time.time(), left_s=None if pace is None else left * pace
        )
        with self._folder.replacing(STATUS, private=True, durable=False) as part:
            part.write_text(to_json(asdict(told)) + "\n", encoding="utf-8")


def read_status(folder: Folder) -> RunStatus | None:
    """The run's last status with the curve so far; None where none was written."""
    try:
        raw = json.loads((folder.path / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    learners = tuple(
        LearnerStatus(**{**each, "counters": Counters(**each["counters"]), "notes": tuple(each["notes"])})
        for each in raw["learners"]
    )
    return RunStatus(**{**raw, "learners": learners, "curve": tuple(folder.points()), "notes": tuple(raw["notes"])})
