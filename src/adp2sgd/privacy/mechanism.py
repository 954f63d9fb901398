"""Mechanisms as data, and the guarantee that an accountant derives from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from adp2sgd.errors import PrivacyError

POISSON = "poisson"
RECORD = "record"  # the unit of privacy, unless the data name another
THREAT_MODEL = (
    "any neighbour, even all of them together, even malicious (by weights made to amplify rounding: only with "
    'clipper = "loop"), who sees every model that the learner sends and counts its steps; an observer who measures how '
    "long steps take is not covered (privacy.fixed_work = true covers it)"
)
TIMED_THREAT_MODEL = (
    "any neighbour, even all of them together, even malicious (by weights made to amplify rounding: only with "
    'clipper = "loop"), who sees every model that the learner sends, counts its steps and measures how long they take'
)


@dataclass(frozen=True)
class SampledGaussian:
    """One private step: draw a batch, add N(0, (noise_multiplier · clip)²) to the sum of clipped gradients.

    With adaptive clipping a step also releases a count, and `noise_multiplier` is that of both together (`with_count`).

    `sample_rate` is each record's chance to be in the batch, fixed and public. Only the "poisson" sampler amplifies
    privacy; any other is accounted as if every record took part in every step.

    `overflow`: where all steps do the same work, at least the probability that a batch is too large for it and is cut
    (see `fixed_work`). 0: no batch is ever cut, and the time of a step depends on its batch.
    """

    noise_multiplier: float
    sample_rate: float
    sampler: str = POISSON
    overflow: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(
                f"noise_multiplier = {self.noise_multiplier} gives no guarantee; use a finite value above 0, like 1.0"
            )
        if not 0 < self.sample_rate <= 1:
            raise PrivacyError(
                f"sample_rate = {self.sample_rate} is no probability in (0, 1]; it is the expected batch over the "
                "learner's own shard, so lower batch_size or use fewer learners"
            )
        if not 0 <= self.overflow < 1:
            raise PrivacyError(f"overflow = {self.overflow} is no probability below 1; use 0 where no batch is cut")

    @property
    def accounted_rate(self) -> float:
        """The rate that the accountant may use: 1 unless batches are Poisson samples."""
        return self.sample_rate if self.sampler == POISSON else 1.0


@dataclass(frozen=True)
class Composed:
    """Mechanisms run on the same records, each `count` times: `Composed(((mechanism, count), …))`."""

    parts: tuple[tuple[SampledGaussian, int], ...]

    def __post_init__(self) -> None:
        for mechanism, count in self.parts:
            if not isinstance(mechanism, SampledGaussian):
                raise PrivacyError(f"{mechanism!r} cannot be accounted; only SampledGaussian can")
            if count < 0:
                raise PrivacyError(f"count = {count} is negative; use how often the mechanism ran")

    @property
    def overflow(self) -> float:
        """At least the probability that any batch of all these was cut."""
        return sum(count * mechanism.overflow for mechanism, count in self.parts)

    @property
    def timed(self) -> bool:
        """Whether the work of every step was independent of its batch."""
        return all(mechanism.overflow > 0 for mechanism, count in self.parts if count)

    def uncut(self) -> Composed:
        """The same, as if no batch had been cut."""
        return Composed(tuple((replace(mechanism, overflow=0.0), count) for mechanism, count in self.parts))


Mechanism = SampledGaussian | Composed


def with_count(noise_multiplier: float, count_noise: float) -> float:
    """Noise multiplier of the one Gaussian that a noised sum and a noised count of the same batch amount to.

    Adaptive clipping releases both: the sum with `noise_multiplier`, and how many norms lie under the bound (each
    record adds ±1/2) with standard deviation `count_noise`. Accounting them as two events would amplify twice.
    """
    for name, value in (("noise_multiplier", noise_multiplier), ("count_noise", count_noise)):
        if not value > 0:
            raise PrivacyError(f"{name} = {value} gives no guarantee; use a value above 0")
    return float((noise_multiplier**-2 + (2 * count_noise) ** -2) ** -0.5)


def beside_count(noise_multiplier: float, count_noise: float) -> float:
    """The sum's own noise multiplier, where sum and count together are one Gaussian of `noise_multiplier`.

    The inverse of `with_count`: the count is paid for by more noise on the sum.
    """
    if not 2 * count_noise > noise_multiplier:
        raise PrivacyError(
            f"count_noise = {count_noise:g} reveals more than noise multiplier {noise_multiplier:.4g} allows; set "
            f"privacy.count_noise above {noise_multiplier / 2:.4g} (at {2 * noise_multiplier:.3g} it costs 3 % more "
            "noise on the sum), or raise batch_size"
        )
    return float((noise_multiplier**-2 - (2 * count_noise) ** -2) ** -0.5)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What one learner's data are promised: (`epsilon`, `delta`) over all runs on its ledger, for one `unit` of data.

    `composition` says how the runs are added up. "pld": all steps are of one mechanism, fixed before the first one.
    "renyi-filter(order)": any steps, chosen after earlier results, within an allowance at an order that was fixed
    before the first one; this costs some ε. `epsilon_alone` is that of this run at its cap `max_steps`, by PLD, were
    nothing else drawn from the data.

    `epsilon_spent` describes the `steps` really taken, on top of the `epsilon_others` of other runs on the same data.
    It is not chosen before training, so it is a report and not the guarantee.
    """

    epsilon: float
    epsilon_spent: float
    delta: float
    adjacency: str
    accountant: str
    sampler: str
    steps: int
    max_steps: int
    seeded: bool
    composition: str = "pld"
    epsilon_alone: float | None = None
    epsilon_others: float = 0.0
    unit: str = RECORD
    threat_model: str = THREAT_MODEL
    note: str = ""
    valid_if: str = ""  # what must hold, where this speaks for several learners

    def __str__(self) -> str:
        seed = "; seeded: ε describes the mechanism, not this run" if self.seeded else ""
        note = f"; {self.note}" if self.note else ""
        others = f" ({self.epsilon_others:.4g} of it by other runs)" if self.epsilon_others else ""
        valid = f"; valid where {self.valid_if}" if self.valid_if else ""
        how, alone = self.accountant, ""
        if self.composition != "pld":
            how = f"all runs on the ledger by {self.composition}"
            alone = "" if self.epsilon_alone is None else f"; this run alone {self.epsilon_alone:.4g} by pld"
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.delta:g} per {self.unit} ({self.adjacency}, {how}, {self.sampler}), "
            f"spent {self.epsilon_spent:.4g}{others} in {self.steps} of {self.max_steps} steps"
            f"{alone}{note}{seed}{valid}"
        )
