"""A run as its report sees it: one type, whichever engine made the folder and however far the run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adp2sgd.report.statement import Statement

Edge = tuple[int, int]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """A learner's steps, one entry each: when the step ended, how stale its gradient was, which start it belongs to."""

    seconds: Floats = field(default_factory=lambda: np.empty(0))
    staleness: Floats = field(default_factory=lambda: np.empty(0))
    start: Floats = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, kw_only=True)
class LearnerData:
    """One learner or site. A figure that the folder does not hold is None."""

    learner: int
    site: str | None = None
    state: str = "unknown"
    steps: int = 0
    share: float = 0.0
    staleness_mean: float | None = None
    staleness_max: int | None = None
    exchanges: int = 0
    busy: int = 0
    expired: int = 0
    halves: int = 0
    restarts: int = 0
    bytes_sent: int = 0
    epsilon: float | None = None  # at the cap
    epsilon_spent: float | None = None
    max_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    partners: Mapping[int, int] = field(default_factory=dict)
    log: StepLog = field(default_factory=StepLog)

    @property
    def name(self) -> str:
        return f"learner {self.learner}" if self.site is None else self.site

    @property
    def short_name(self) -> str:
        """For axes and the nodes of a graph."""
        return str(self.learner) if self.site is None else self.site


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The evaluations of the average model θ, one entry each. `metrics`: name → values, NaN where there is none."""

    epoch: Floats = field(default_factory=lambda: np.empty(0))
    seconds: Floats = field(default_factory=lambda: np.empty(0))
    consensus: Floats = field(default_factory=lambda: np.empty(0))
    metrics: Mapping[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.epoch)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """`finished`: it has a result. `running`: a process works on it now. `left_s`: real time until its end."""

    name: str
    folder: Path | None
    task: str
    algorithm: str
    clock: str = "real"
    finished: bool = False
    running: bool = False
    seconds: float = 0.0
    global_steps: int = 0
    target_steps: int | None = None
    epoch: float = 0.0
    epochs: float | None = None  # asked for
    left_s: float | None = None
    written_at: float | None = None
    consensus: float | None = None
    seeded: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    monitor: str | None = None  # the metric that decides
    curve: Curve = field(default_factory=Curve)
    learners: tuple[LearnerData, ...] = ()
    edges: tuple[Edge, ...] = ()  # of the graph; none in SYNC
    guarantee: Mapping[str, Any] | None = None
    guarantee_why: str | None = None
    statement: Statement | None = None  # of a finished private run in a folder
    noise_source: str | None = None
    sites: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # dotted key → value

    @property
    def private(self) -> bool:
        return bool(self.config.get("privacy.mode") == "private")

    @property
    def state(self) -> str:
        """In one word, for people."""
        if self.finished:
            return "finished"
        return "running" if self.running else "stopped"

    @property
    def exchanges(self) -> dict[Edge, int]:
        """Completed exchanges on every edge that the graph has or that was used."""
        told: dict[Edge, list[int]] = {edge: [] for edge in self.edges}
        for each in self.learners:
            for partner, count in each.partners.items():
                edge = (min(each.learner, partner), max(each.learner, partner))
                told.setdefault(edge, []).append(count)
        return {edge: max(counts, default=0) for edge, counts in sorted(told.items())}
