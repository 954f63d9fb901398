"""What a run promises about single records, and how its noise is set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from adp2sgd.errors import ConfigError
from adp2sgd.settings import Section, one_of, require

MODES = ("private", "paper", "none")
ADJACENCIES = ("add-remove", "replace-one")
PRIVATE_ONLY = (
    *("clip_quantile", "clip_rate", "count_noise", "copies", "clipper", "fixed_work", "records_per_unit"),
    *("epsilon", "delta", "noise_multiplier"),
)
MEANINGLESS = {"private": ("sigma",), "paper": PRIVATE_ONLY, "none": (*PRIVATE_ONLY, "sigma")}  # mode → fields
LEAST_EPSILON, LEAST_MULTIPLIER = 1e-12, 0.01  # less is a slip: nothing could be learned, or nothing is hidden
CLIPPERS = ("auto", "loop")


@dataclass(frozen=True, kw_only=True)
class Privacy(Section):
    """`private`: clipped, noised, accounted. `paper`: the paper's noise, no guarantee. `none`: no noise."""

    WHERE: ClassVar[str] = "privacy."

    mode: str = "none"
    epsilon: float | None = None
    # What ε follows from: noise on the sum in units of clip_norm; with clip_quantile that of sum and count together, so
    # that the sum gets a little more.
    noise_multiplier: float | None = None
    sigma: float | None = None  # noise on the unclipped sum, absolute (paper)
    delta: float | None = None
    clip_norm: float = 1.0  # bound on a record's gradient; with clip_quantile, where it starts
    clip_quantile: float | None = None  # the bound follows this quantile of the gradients' norms; unset: it stays
    clip_rate: float = 0.2  # how fast: if all norms lie above it, a step multiplies it by exp(clip_rate·clip_quantile)
    count_noise: float | None = None  # noise on the count of norms under the bound, absolute; unset: batch_size / 20
    clipper: str = "auto"  # or "loop": record by record, slow, for neighbours who may send weights made to harm
    fixed_work: bool = False  # every step does the same work whatever its batch, so that its time tells nothing
    copies: int = 1  # augmented copies of each record in a batch; their mean gradient is clipped
    # Where records belong to units (a patient, say): rows of each drawn unit in a step. They are clipped as one.
    records_per_unit: int = 4
    adjacency: str = "add-remove"
    ledger: str | None = None  # a folder: sites' ledgers across runs; unset: each run keeps its own
    dataset: str | None = None  # the data's name in that ledger; unset: the task's family, as in "heart"
    # Runs that share that ledger's ε: each takes at most one such part of it. Unset: a run may take all that is left.
    # 1 at a ledger's first run: all runs will have that one's noise and rate, which ε serves best.
    runs: int | None = None
    headroom: float = 1.25  # a learner's cap on steps = its planned steps × headroom, unless epsilon and noise fix it

    def _check(self) -> None:
        one_of("privacy.mode", self.mode, MODES)
        one_of("privacy.adjacency", self.adjacency, ADJACENCIES)
        one_of("privacy.clipper", self.clipper, CLIPPERS)
        require(self.clip_norm > 0, "privacy.clip_norm", self.clip_norm, "use a positive number")
        require(1 <= self.headroom < math.inf, "privacy.headroom", self.headroom, "use 1 or more")
        require(self.records_per_unit >= 1, "privacy.records_per_unit", self.records_per_unit, "use 1 or more")
        require(self.copies >= 1, "privacy.copies", self.copies, "use 1 or more")
        require(0 < self.clip_rate < math.inf, "privacy.clip_rate", self.clip_rate, "use a positive number, like 0.2")
        fix = f"use a positive number, {LEAST_EPSILON:g} at least"
        require(self.epsilon is None or self.epsilon >= LEAST_EPSILON, "privacy.epsilon", self.epsilon, fix)
        require(self.sigma is None or self.sigma >= 0, "privacy.sigma", self.sigma, "use 0 or more")
        {"private": self._check_private, "paper": self._check_paper, "none": self._check_none}[self.mode]()

    def _check_private(self) -> None:
        if self.sigma is not None:
            raise ConfigError('privacy.sigma belongs to mode = "paper"; in mode = "private" set noise_multiplier')
        if self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError('privacy.mode = "private" needs privacy.epsilon or privacy.noise_multiplier; set one')
        if self.noise_multiplier is not None:
            fix = f"no noise gives no guarantee: use a positive number, {LEAST_MULTIPLIER:g} at least"
            require(self.noise_multiplier >= LEAST_MULTIPLIER, "privacy.noise_multiplier", self.noise_multiplier, fix)
        if self.delta is None:
            raise ConfigError("privacy.delta is missing; set it well below 1/(records of the largest learner)")
        require(0 < self.delta < 1, "privacy.delta", self.delta, "use a number in (0, 1), below 1/records")
        require(self.runs is None or self.runs >= 1, "privacy.runs", self.runs, "use 1 or more")
        fix = "it divides the ε of a ledger that lasts over runs: set privacy.ledger, or remove it"
        require(self.runs is None or self.ledger is not None, "privacy.runs", self.runs, fix)
        self._check_adaptive()

    def _check_adaptive(self) -> None:
        quantile, noise = self.clip_quantile, self.count_noise
        fix = "use a number between 0 and 1, like 0.5"
        require(quantile is None or 0 < quantile < 1, "privacy.clip_quantile", quantile, fix)
        require(noise is None or 0 < noise < math.inf, "privacy.count_noise", noise, "use a positive number")
        for name in ("count_noise", "clip_rate"):
            if quantile is None and getattr(self, name) != getattr(Privacy, name):
                raise ConfigError(
                    f"privacy.{name} = {getattr(self, name)} means nothing without privacy.clip_quantile; set that or "
                    "remove it"
                )

    def noise_on_count(self, batch_size: int) -> float | None:
        """Standard deviation of the noise on the count of norms under the bound; None where nothing is counted."""
        if self.clip_quantile is None:
            return None
        return batch_size / 20 if self.count_noise is None else self.count_noise

    def _check_paper(self) -> None:
        if self.sigma is None:
            raise ConfigError('privacy.mode = "paper" needs privacy.sigma (0 for the paper\'s baseline)')
        self._refuse("paper")

    def _check_none(self) -> None:
        self._refuse("none")

    def _refuse(self, mode: str) -> None:
        for name in MEANINGLESS[mode]:
            if getattr(self, name) != getattr(Privacy, name):  # the default
                raise ConfigError(
                    f'privacy.{name} = {getattr(self, name)} means nothing in mode = "{mode}", which gives no '
                    'guarantee; remove it or set privacy.mode = "private"'
                )
