"""What all participants of a run know. It is made from the configuration alone and holds no record."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from functools import cached_property

from adp2sgd import topology
from adp2sgd.config import Config


@dataclass(frozen=True, eq=False)
class Plan:
    """`seed` is that of everything public: partition, initial weights, partners, delays.

    `total_samples` is the number of training records of all sites together; of a site's own number nothing is said.
    """

    config: Config
    seed: int
    total_samples: int
    graph: topology.Graph

    @cached_property
    def steps_per_epoch(self) -> float:
        """Steps of all learners together that make one pass over all records."""
        return self.total_samples / self.config.batch_size

    @cached_property
    def target_steps(self) -> int:
        """Steps of all learners together after which the run ends; the same for SYNC and ADPSGD."""
        rounds = math.ceil(self.config.epochs * self.steps_per_epoch / self.config.learners - 1e-9)
        return max(1, rounds) * self.config.learners

    @cached_property
    def planned_steps(self) -> int:
        """Steps that one learner takes if all are equally fast."""
        return math.ceil(self.target_steps / self.config.learners)

    @property
    def private(self) -> bool:
        return self.config.privacy.mode == "private"

    def epoch(self, global_steps: int) -> float:
        return global_steps / self.steps_per_epoch

    def passed(self, every_epochs: float, before: int, now: int) -> bool:
        """Whether something that is due every so many epochs fell due between two global steps; 0: never."""
        steps = every_epochs * self.steps_per_epoch
        return bool(steps) and now // steps > before // steps


def make_plan(config: Config, *, total_samples: int, seed: int | None = None) -> Plan:
    """The seed is the configuration's if it has one, else the given one of a run that resumes, else a new one."""
    if config.seed is not None:
        seed = config.seed
    elif seed is None:
        seed = secrets.randbits(32)
    return Plan(config, seed, total_samples, topology.build(config.topology, config.learners, seed))
