"""What a ledger promises over all runs on its data set. It is fixed and written before the first step is drawn.

The owner sees a run's result before choosing the next run. A bound must therefore hold for mechanisms that were chosen
because of earlier outputs. Composing loss distributions (PLD) is proved only for mechanisms that are fixed beforehand;
if the noise is chosen after a first result, PLD reports ε = 1.92 where 2.08 is true (tests/privacy/test_policy.py).
There are two policies. Both hold whatever the owner does between runs:

`FixedPlan`: at most `steps` steps of one mechanism. Every step of every run is dominated by the same pair of
distributions, whatever its inputs, so PLD applies to all of them together. A run that stops early is post-processing of
one that does not.

`RenyiFilter`: any mechanisms, as long as their Rényi divergences at one fixed order α add up to at most a fixed
allowance ρ (Feldman and Zrnic 2021; Lécuyer 2021). Proof: let step t have output densities p_t, q_t under two
neighbouring data sets given all that came before, and divergence ρ_t at order α. Under the second data set
M_t = Π (p_s/q_s)^α · exp(−(α−1) Σ ρ_s) is a supermartingale with M_0 = 1, because ρ_t is known before step t is drawn.
Since Σ ρ_s ≤ ρ always holds, E[Π (p_s/q_s)^α] ≤ exp((α−1) ρ): all runs together have divergence ρ at order α. The
proof needs constants α and ρ. An order chosen afterwards, or an ε raised afterwards, is not covered.

Cut batches (`fixed_work`) cost (1 + e^ε) times the probability that any batch is cut. That probability is at most the
sum of the steps' `overflow`, whatever was chosen when, as long as the sum stays within a constant: the policy's. The
part of δ that this costs is set aside before the first step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from adp2sgd.errors import LedgerError, PrivacyError
from adp2sgd.privacy import accountant
from adp2sgd.privacy.accountant import Spent, renyi
from adp2sgd.privacy.calibrate import MOST_NOISE, least_noise, steps_for
from adp2sgd.privacy.fixed_work import SHARE, cost, overflow_for
from adp2sgd.privacy.mechanism import Composed, SampledGaussian

RUNS = 1000  # of fixed work that a filter has room for: a run's rows depend on the logarithm of its part alone
FEW = 8  # mechanisms whose loss distributions are composed to tell what a fixed plan would have cost


@dataclass(frozen=True, kw_only=True)
class FixedPlan:
    """At most `steps` steps of `mechanism`, in any number of runs: together they spend at most `epsilon`, by PLD."""

    epsilon: float
    delta: float
    adjacency: str
    mechanism: SampledGaussian
    steps: int

    composition: ClassVar[str] = "pld"

    def spent(self, steps: Composed) -> Spent:
        """ε of `steps`."""
        return accountant.epsilon(steps, 1, self.delta, "pld", self.adjacency)

    def promised(self) -> Spent:
        """ε of everything that the ledger may ever allow."""
        return self.spent(Composed(((self.mechanism, self.steps),)))

    def room(self, spent: Composed, mechanism: SampledGaussian, epsilon: float | None = None) -> int:
        """Further steps that may follow `spent`; a smaller `epsilon` than the policy's allows fewer."""
        own = self.mechanism
        if mechanism != own:
            raise LedgerError(
                f"the ledger allows noise_multiplier = {own.noise_multiplier:g} at sample rate {own.sample_rate:.6g} "
                f"alone, not {mechanism.noise_multiplier:g} at {mechanism.sample_rate:.6g}; use these, or other "
                "records: only a ledger begun without privacy.runs = 1 allows several mechanisms"
            )
        most = self.steps
        if epsilon is not None and epsilon < self.epsilon:
            most = min(most, self._steps_for(epsilon))
        return max(0, most - dict(spent.parts).get(own, 0))

    def _steps_for(self, epsilon: float) -> int:
        left = self.delta * (1 - 2 * SHARE) if self.mechanism.overflow else self.delta  # the rest is for cut batches
        return steps_for(
            epsilon=epsilon,
            delta=left,
            sample_rate=self.mechanism.sample_rate,
            noise_multiplier=self.mechanism.noise_multiplier,
            adjacency=self.adjacency,
        )

    def entry(self) -> dict[str, Any]:
        """For a line of the ledger, which is short."""
        own = self.mechanism
        fixed = [own.noise_multiplier, own.sample_rate, own.sampler, *([own.overflow] if own.overflow else [])]
        return {**_common(self), "mechanism": fixed, "steps": self.steps}


@dataclass(frozen=True, kw_only=True)
class RenyiFilter:
    """Any steps whose Rényi divergences at `order` add up to at most `allowance()`: together they spend at most
    `epsilon`, also where each was chosen after the outputs of those before."""

    epsilon: float
    delta: float
    adjacency: str
    order: float
    overflow: float = 0.0  # the probability that any batch of any run is cut, at most

    @property
    def composition(self) -> str:
        return f"renyi-filter({self.order:g})"

    def allowance(self, epsilon: float | None = None) -> float:
        """ρ: the divergence that is worth the policy's ε, or `epsilon` where that is smaller. It may be negative."""
        return min(self.epsilon, self.epsilon if epsilon is None else epsilon) - self._conversion

    def divergence(self, steps: Composed) -> float:
        return math.fsum(count * renyi(mechanism, self.order, self.adjacency) for mechanism, count in steps.parts)

    def spent(self, steps: Composed) -> Spent:
        """ε of `steps` at the policy's order; 0 where there are none."""
        taken = sum(count for _, count in steps.parts)
        value = max(0.0, self.divergence(steps) + self._conversion) if taken else 0.0
        return Spent(epsilon=value, delta=self.delta, accountant="rdp", adjacency=self.adjacency)

    def promised(self) -> Spent:
        """ε of everything that the ledger may ever allow."""
        return Spent(epsilon=self.epsilon, delta=self.delta, accountant="rdp", adjacency=self.adjacency)

    def room(self, spent: Composed, mechanism: SampledGaussian, epsilon: float | None = None) -> int:
        """Further steps that may follow `spent`; a smaller `epsilon` than the policy's allows fewer."""
        others = Composed(tuple(part for part in spent.parts if part[0] != mechanism))
        most = self.steps_within(self.allowance(epsilon) - self.divergence(others), mechanism)
        if mechanism.overflow:
            most = min(most, math.floor((self.overflow - others.overflow) / mechanism.overflow))
        return max(0, most - dict(spent.parts).get(mechanism, 0))

    @property
    def _conversion(self) -> float:
        """With what cut batches may cost of δ set aside."""
        return conversion(self.order, self.delta - cost(self.epsilon, self.overflow))

    def overflow_within(self, steps: int) -> float:
        """The probability, per step, that a batch may be cut in a run of `steps` steps, one of RUNS."""
        return float(f"{0.99 * self.overflow / RUNS / steps:.2e}")  # few digits, for the ledger; never rounded up

    def steps_within(self, divergence: float, mechanism: SampledGaussian) -> int:
        """The most steps of `mechanism` whose divergences add up to at most `divergence`."""
        each = renyi(mechanism, self.order, self.adjacency)
        steps = max(0, math.floor(divergence / each))
        while steps and steps * each > divergence:  # the quotient was rounded up
            steps -= 1
        return steps

    def noise_within(self, divergence: float, rate: float, steps: int) -> float:
        """The least noise multiplier with which `steps` steps have at most `divergence`."""

        def taken(noise: float) -> float:
            return steps * renyi(SampledGaussian(noise, rate), self.order, self.adjacency)

        if not taken(MOST_NOISE) <= divergence:
            raise PrivacyError(
                f"what is left of the ledger's ε = {self.epsilon:g} allows {steps} steps at no noise_multiplier up to "
                f"{MOST_NOISE:g}; use fewer steps, or other records"
            )
        return least_noise(taken, divergence, steps)

    def entry(self) -> dict[str, Any]:
        """For a line of the ledger."""
        return {**_common(self), "order": self.order, **({"overflow": self.overflow} if self.overflow else {})}


Policy = FixedPlan | RenyiFilter


def parse(entry: dict[str, Any]) -> Policy:
    """The policy that a ledger's line holds: the inverse of `entry`."""
    if "order" in entry:
        return RenyiFilter(**entry)
    return FixedPlan(**{**entry, "mechanism": SampledGaussian(*entry["mechanism"])})


def conversion(order: float, delta: float) -> float:
    """ε beside the divergence at `order` (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return -(math.log(delta) + math.log(order)) / (order - 1) + math.log1p(-1 / order)


def filter_for(
    epsilon: float, delta: float, adjacency: str, *, rate: float, noise: float | None, steps: int,
    fixed_work: bool = False,
) -> RenyiFilter:  # fmt: skip
    """The filter whose order serves runs like the first one best; with `fixed_work` it sets a part of δ aside.

    With `noise`: ε then allows the most steps. Without: `steps` steps in all then need the least noise.
    """
    if noise is None:
        noise = least_noise(
            lambda value: at_best_order(Composed(((SampledGaussian(value, rate), steps),)), delta, adjacency),
            epsilon,
            steps,
        )
    mechanism = SampledGaussian(noise, rate)

    def worth(order: float) -> float:
        return (epsilon - conversion(order, delta)) / renyi(mechanism, order, adjacency)

    cuts = overflow_for(epsilon, delta, 1) if fixed_work else 0.0
    order = max(_orders(), key=worth)
    return RenyiFilter(epsilon=epsilon, delta=delta, adjacency=adjacency, order=order, overflow=cuts)


def if_fixed(steps: Composed, delta: float, adjacency: str) -> Spent:
    """ε of `steps` had all of them been fixed before the first one: by PLD, or by RDP where the mechanisms are many."""
    if len(steps.parts) <= FEW or steps.overflow or adjacency not in accountant.ADJACENCIES:
        return accountant.epsilon(steps, 1, delta, "pld", adjacency)
    value = at_best_order(steps, accountant.check_delta(delta), adjacency, every=4)
    note = f"{len(steps.parts)} mechanisms are many for PLD, so RDP answers"
    return Spent(epsilon=value, delta=delta, accountant="rdp", adjacency=adjacency, note=note)


def at_best_order(steps: Composed, delta: float, adjacency: str, every: int = 1) -> float:
    """ε of `steps` that were fixed beforehand, by Rényi divergences at the best order; each `every`th is tried."""
    spent = (
        sum(count * renyi(mechanism, order, adjacency) for mechanism, count in steps.parts) + conversion(order, delta)
        for order in _orders()[::every]
    )
    return max(0.0, min(spent))


@lru_cache(maxsize=1)
def _orders() -> tuple[float, ...]:
    """Orders to choose from, with few digits: (order − 1) grows by 12 % from one to the next."""
    return tuple(1 + float(f"{1e-3 * 1.12**step:.3g}") for step in range(124))


def _common(policy: Policy) -> dict[str, Any]:
    return {"epsilon": policy.epsilon, "delta": policy.delta, "adjacency": policy.adjacency}
