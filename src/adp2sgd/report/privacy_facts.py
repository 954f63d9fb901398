"""What a run's folder says about its privacy, gathered for a statement."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from adp2sgd import config
from adp2sgd.errors import ConfigError, LedgerError
from adp2sgd.privacy.accountant import ADD_REMOVE, Spent, epsilon
from adp2sgd.privacy.mechanism import RECORD, Guarantee, SampledGaussian
from adp2sgd.privacy.plan import Plan, read_plan
from adp2sgd.run_folder import Folder, LearnerResult, Run, read_result


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivacyFacts:
    """`plans` are the learners' own plans as far as this folder holds them; a site has its own alone."""

    name: str
    run: Run
    settings: config.Config
    guarantee: Guarantee
    plans: Mapping[int, Plan]

    @property
    def unit(self) -> str:
        return self.guarantee.unit

    @property
    def per_record(self) -> bool:
        return self.unit == RECORD

    @property
    def between_sites(self) -> bool:
        """Whether this is one site of a run on the network: its rate and noise stay at the site."""
        return self.settings.consortium.total_samples is not None

    @cached_property
    def _weakest(self) -> int | None:
        """The learner with the largest ε."""
        found = {each.learner: each.epsilon or 0.0 for each in self.run.learners if each.learner in self.plans}
        return max(found, key=lambda number: found[number], default=None)

    @property
    def weakest(self) -> Plan | None:
        """The plan of a learner with the largest ε; None where the folder holds no plan."""
        return None if self._weakest is None else self.plans[self._weakest]

    @property
    def weakest_name(self) -> str:
        return next((self.name_of(each) for each in self.run.learners if each.learner == self._weakest), "")

    @staticmethod
    def name_of(learner: LearnerResult) -> str:
        return learner.site or f"learner {learner.learner}"

    @cached_property
    def mechanism(self) -> SampledGaussian | None:
        return None if self.weakest is None else self.weakest.mechanism

    @cached_property
    def population(self) -> int | None:
        """Records, or units, of the largest learner, as its sample rate tells."""
        return max(self._populations, default=None)

    @property
    def total(self) -> int:
        """Records, or units, of all learners whose plans lie here."""
        return sum(self._populations)

    @property
    def _populations(self) -> list[int]:
        return [round(self.settings.batch_size / plan.mechanism.sample_rate) for plan in self.plans.values()]

    @cached_property
    def by_pld(self) -> Spent | None:
        """The weakest plan at its cap."""
        return self._accounted("pld")

    @cached_property
    def by_rdp(self) -> Spent | None:
        return self._accounted("rdp") if self.guarantee.adjacency == ADD_REMOVE else None

    def _accounted(self, accountant: str) -> Spent | None:
        if self.weakest is None:
            return None
        own = self.guarantee
        return epsilon(self.weakest.mechanism, self.weakest.max_steps, own.delta, accountant, own.adjacency)


def gather(path: str | Path) -> PrivacyFacts:
    """Of the finished private run in the folder `path`. A run without a guarantee is refused."""
    folder, run = Folder.open(path), read_result(path)
    if run.guarantee is None:
        raise ConfigError(f"{path} holds a run without a privacy guarantee ({run.guarantee_why}); nothing to state")
    plans = {}
    for own in folder.path.glob("learner-*/plan.json"):
        with suppress(LedgerError, ValueError):  # a folder that was copied without the learners' own files
            plans[int(own.parent.name.removeprefix("learner-"))] = read_plan(own).plan
    name = folder.path.resolve().name
    return PrivacyFacts(name=name, run=run, settings=folder.settings, guarantee=run.guarantee, plans=plans)
