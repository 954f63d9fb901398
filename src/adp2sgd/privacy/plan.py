"""A run's plan: its noise and the cap on its steps, fixed before training, within the policy of its ledger."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from adp2sgd import config
from adp2sgd.errors import ConfigError, LedgerError, PrivacyError
from adp2sgd.files import replacing
from adp2sgd.privacy.accountant import Spent, epsilon
from adp2sgd.privacy.calibrate import noise_for, steps_for
from adp2sgd.privacy.fixed_work import SHARE, overflow_for
from adp2sgd.privacy.ledger import Mark
from adp2sgd.privacy.mechanism import Composed, SampledGaussian, beside_count
from adp2sgd.privacy.policy import FixedPlan, Policy, RenyiFilter, filter_for, parse

NOTHING = Composed(())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Fixed before training: at most `max_steps` runs of `mechanism`, under the `policy` of a ledger that had spent
    `before` already."""

    mechanism: SampledGaussian
    max_steps: int
    policy: Policy
    before: Composed = NOTHING

    def spent_after(self, steps: int) -> Spent:
        """ε of everything that the data set has spent once this run has taken `steps` steps."""
        return self.policy.spent(Composed((*self.before.parts, (self.mechanism, steps))))

    def alone(self) -> float:
        """ε of this run at its cap if nothing else is ever drawn from the data. Its plan is fixed, so PLD applies."""
        own = self.policy
        return epsilon(self.mechanism, self.max_steps, own.delta, "pld", own.adjacency).epsilon

    def resumed(self, policy: Policy, spent: Composed, target: float | None) -> Plan:
        """The plan of a run that resumes on a ledger that has spent `spent`, partly by other runs.

        Steps of the same mechanism cannot be distinguished from the run's own and count as such. The cap only moves
        down; steps beyond it are still reported. `target` is the run's own ε, if it has one.
        """
        own = self.mechanism
        earlier = dict(self.before.parts).get(own, 0)
        counted = dict(spent.parts).get(own, 0) - earlier
        others = tuple(part for part in spent.parts if part[0] != own)
        cap = self.max_steps
        if cap > counted:
            cap = min(cap, counted + policy.room(spent, own, target))
        before = Composed((*others, (own, earlier)) if earlier else others)
        return replace(self, policy=policy, before=before, max_steps=max(cap, counted))


@lru_cache(maxsize=256)  # learners that are alike share one calculation
def plan(
    privacy: config.Privacy,
    *,
    records: int,
    batch_size: int,
    planned_steps: int,
    policy: Policy | None = None,
    before: Composed = NOTHING,
) -> Plan:
    """Noise and cap for a learner with `records` records that expects to take `planned_steps` steps.

    `epsilon` and `noise_multiplier`: the largest cap within ε. `epsilon` alone: the least noise for the planned steps
    times `headroom`. `noise_multiplier` alone: that many steps, and the ε that follows. Without a `policy` the plan
    makes one; else it keeps to it.
    """
    if batch_size > records:
        raise ConfigError(
            f"batch_size = {batch_size} exceeds the smallest shard ({records}); lower it or use fewer learners"
        )
    rate, cap = batch_size / records, math.ceil(planned_steps * privacy.headroom)
    if policy is not None:
        _check_agreement(privacy, policy)
        _check_fixed_work(privacy, policy)
    else:
        lasting = privacy.ledger is not None and privacy.runs != 1
        policy = (_first_filter if lasting else _first_fixed)(privacy, rate, cap)
    if isinstance(policy, FixedPlan):
        mechanism, cap = _within_fixed(privacy, policy, rate, cap, before)
    else:
        mechanism, cap = _within_filter(privacy, policy, rate, cap, before)
    noise, count_noise = mechanism.noise_multiplier, privacy.noise_on_count(batch_size)
    if cap < 1:
        raise PrivacyError(
            f"privacy.epsilon = {privacy.epsilon or policy.epsilon} allows no step at noise_multiplier = {noise}; "
            "raise noise_multiplier or epsilon"
        )
    if count_noise is not None:
        beside_count(noise, count_noise)  # raises an error before anything is written
    return Plan(mechanism=mechanism, max_steps=cap, policy=policy, before=before)


def _check_agreement(privacy: config.Privacy, policy: Policy) -> None:
    """Refuse what a ledger's policy does not cover."""
    if privacy.epsilon is not None and privacy.epsilon > policy.epsilon:
        raise PrivacyError(
            f"privacy.epsilon = {privacy.epsilon:g} exceeds {policy.epsilon:g}, which was fixed before the ledger's "
            f"first step: no bound holds for a budget that is raised after results; use {policy.epsilon:g} or less"
        )
    for name in ("delta", "adjacency"):
        here, there = getattr(privacy, name), getattr(policy, name)
        if here != there:
            raise PrivacyError(
                f"privacy.{name} = {here} differs from {there}, which was fixed before the ledger's first step; use "
                f"{there}"
            )


def _check_fixed_work(privacy: config.Privacy, policy: Policy) -> None:
    """Refuse fixed work if the policy did not reserve a part of δ for cut batches before the first step."""
    cuts = policy.mechanism.overflow if isinstance(policy, FixedPlan) else policy.overflow
    if privacy.fixed_work and not cuts:
        raise PrivacyError(
            "privacy.fixed_work = true needs a ledger that was begun with it: its cut batches cost a part of delta, "
            "which this ledger's policy does not set aside; leave it out, or use other records"
        )
    if not privacy.fixed_work and cuts and isinstance(policy, FixedPlan):
        raise PrivacyError("privacy.fixed_work is false, but the ledger allows steps of fixed work alone; set it")


def _first_fixed(privacy: config.Privacy, rate: float, cap: int) -> FixedPlan:
    assert privacy.delta is not None
    left = privacy.delta * (1 - 2 * SHARE) if privacy.fixed_work else privacy.delta  # the rest is for cut batches
    goal: dict[str, Any] = {"delta": left, "sample_rate": rate, "adjacency": privacy.adjacency}
    noise, target = privacy.noise_multiplier, privacy.epsilon
    if noise is None:
        assert target is not None
        noise = noise_for(epsilon=target, steps=cap, **goal)
    elif target is not None:
        cap = steps_for(epsilon=target, noise_multiplier=noise, **goal)
    mechanism = SampledGaussian(noise, rate)
    if privacy.fixed_work:
        reached = epsilon(mechanism, cap, left, "pld", privacy.adjacency).epsilon if target is None else target
        mechanism = replace(mechanism, overflow=overflow_for(reached, privacy.delta, max(cap, 1)))
    promised = epsilon(mechanism, cap, privacy.delta, "pld", privacy.adjacency).epsilon if target is None else target
    if not math.isfinite(promised):
        raise PrivacyError(
            f"noise_multiplier = {noise} gives no guarantee with fixed_work after {cap} steps: ε is so large that cut "
            f"batches exceed privacy.delta = {privacy.delta:g}; raise one"
        )
    return FixedPlan(
        epsilon=promised,
        delta=privacy.delta,
        adjacency=privacy.adjacency,
        mechanism=mechanism,
        steps=cap,
    )


def _first_filter(privacy: config.Privacy, rate: float, cap: int) -> RenyiFilter:
    if privacy.epsilon is None:
        raise PrivacyError(
            "privacy.epsilon is missing: it bounds what all runs on privacy.ledger spend together; set it, or "
            "privacy.runs = 1 where all will have this run's noise"
        )
    assert privacy.delta is not None
    return filter_for(
        privacy.epsilon,
        privacy.delta,
        privacy.adjacency,
        rate=rate,
        noise=privacy.noise_multiplier,
        steps=cap * (privacy.runs or 1),
        fixed_work=privacy.fixed_work,
    )


def _within_fixed(
    privacy: config.Privacy, policy: FixedPlan, rate: float, cap: int, before: Composed
) -> tuple[SampledGaussian, int]:
    own = policy.mechanism
    mechanism = SampledGaussian(privacy.noise_multiplier or own.noise_multiplier, rate, overflow=own.overflow)
    return mechanism, _capped(privacy, cap, policy.room(before, mechanism, privacy.epsilon))


def _within_filter(
    privacy: config.Privacy, policy: RenyiFilter, rate: float, cap: int, before: Composed
) -> tuple[SampledGaussian, int]:
    if policy.allowance(privacy.epsilon) <= 0:
        least = policy.allowance(0.0) * -1
        raise PrivacyError(
            f"privacy.epsilon = {privacy.epsilon} is below {least:.4g}, which the first step costs at the ledger's "
            f"order {policy.order:g}; use more, {policy.epsilon:g} at most"
        )
    left = policy.allowance(privacy.epsilon) - policy.divergence(before)
    left = min(left, policy.allowance() / (privacy.runs or 1))
    noise = privacy.noise_multiplier
    mechanism = SampledGaussian(policy.noise_within(left, rate, cap) if noise is None else noise, rate)
    if privacy.fixed_work:
        mechanism = replace(mechanism, overflow=policy.overflow_within(cap))
    room = min(policy.steps_within(left, mechanism), policy.room(before, mechanism, privacy.epsilon))
    return mechanism, _capped(privacy, cap, room)


def _capped(privacy: config.Privacy, cap: int, room: int) -> int:
    """All of `room` where ε and noise are both given; else no more than the planned `cap`."""
    return room if None not in (privacy.epsilon, privacy.noise_multiplier) else min(cap, room)


@dataclass(frozen=True)
class Kept:
    """What a run stores of its budget: the plan, the ledger that it is charged to, and the ledger's last known end."""

    plan: Plan
    ledger: Path
    mark: Mark


def write_plan(path: Path, kept: Kept) -> None:
    """Keep the plan of a learner's run in `path`."""
    # A ledger beside the plan is named without its folder, so that a run can be moved as a whole.
    name = kept.ledger.name if kept.ledger.parent == path.parent else str(kept.ledger.absolute())
    fixed = {**asdict(kept.plan), "policy": kept.plan.policy.entry()}
    with replacing(path, private=True) as part:
        part.write_text(json.dumps({"ledger": name, "mark": asdict(kept.mark), **fixed}), encoding="utf-8")


def read_plan(path: Path) -> Kept:
    """What a learner's run has stored in `path`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        mechanism = SampledGaussian(**raw["mechanism"])
        before = Composed(tuple((SampledGaussian(**each), count) for each, count in raw["before"]["parts"]))
        policy = parse(raw["policy"]) if "policy" in raw else _earlier(path, raw, mechanism, before)
        made = Plan(mechanism=mechanism, max_steps=raw["max_steps"], policy=policy, before=before)
        return Kept(made, path.parent / raw["ledger"], Mark(**raw.get("mark", {})))
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(f"{path} is gone or damaged; restore it, or start a new run on the same ledger") from None


def _earlier(path: Path, raw: dict[str, Any], mechanism: SampledGaussian, before: Composed) -> FixedPlan:
    """The policy of a run from before ledgers had policies. Its plan was fixed before its first step."""
    if before.parts:
        raise LedgerError(
            f"{path} was made before ledgers had a policy, for a run chosen after others: no bound covers its further "
            "steps; adp2sgd privacy spent tells what its ledger holds"
        )
    promised = epsilon(mechanism, raw["max_steps"], raw["delta"], "pld", raw["adjacency"]).epsilon
    names = {name: raw[name] for name in ("delta", "adjacency")}
    return FixedPlan(epsilon=promised, mechanism=mechanism, steps=raw["max_steps"], **names)
