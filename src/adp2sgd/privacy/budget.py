"""A learner's right to draw: a cap on its own steps, fixed before training, and a ledger charged before each draw.

Under asynchrony nobody knows how many steps a learner will take, so its guarantee is computed for the cap: a learner
that reaches it stops training and goes on averaging. What it really took is reported as `epsilon_spent`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adp2sgd import config
from adp2sgd.errors import ConfigError, LedgerError, PrivacyError
from adp2sgd.files import replacing
from adp2sgd.privacy.accountant import Spent, epsilon
from adp2sgd.privacy.calibrate import noise_for, steps_for
from adp2sgd.privacy.fixed_work import SHARE, cost, overflow_for
from adp2sgd.privacy.ledger import Ledger, Mark, require
from adp2sgd.privacy.mechanism import (
    THREAT_MODEL,
    TIMED_THREAT_MODEL,
    Composed,
    Guarantee,
    SampledGaussian,
    beside_count,
)

NOTHING = Composed(())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Fixed before training: at most `max_steps` runs of `mechanism` on a data set that had spent `before` already."""

    mechanism: SampledGaussian
    max_steps: int
    delta: float
    adjacency: str
    before: Composed = NOTHING

    def spent_after(self, steps: int) -> Spent:
        """ε of everything that the data set has spent once this run has taken `steps` steps."""
        everything = Composed((*self.before.parts, (self.mechanism, steps)))
        return epsilon(everything, 1, self.delta, "pld", self.adjacency)


def plan(
    privacy: config.Privacy, *, records: int, batch_size: int, planned_steps: int, before: Composed = NOTHING
) -> Plan:
    """Noise and cap for a learner with `records` records that expects to take `planned_steps` steps.

    `epsilon` and `noise_multiplier`: the largest cap within ε. `epsilon` alone: the least noise for the planned steps
    times `headroom`. `noise_multiplier` alone: that many steps, and the ε that follows.
    """
    if batch_size > records:
        raise ConfigError(
            f"batch_size = {batch_size} exceeds the smallest shard ({records}); lower it or use fewer learners"
        )
    assert privacy.delta is not None
    rate, cap = batch_size / records, math.ceil(planned_steps * privacy.headroom)
    goal: dict[str, Any] = {
        "sample_rate": rate,
        "adjacency": privacy.adjacency,
        **_goal(privacy, privacy.delta, before),
    }
    noise = privacy.noise_multiplier
    if noise is None:
        assert privacy.epsilon is not None
        noise = noise_for(epsilon=privacy.epsilon, steps=cap, **goal)
    elif privacy.epsilon is not None:
        cap = steps_for(epsilon=privacy.epsilon, noise_multiplier=noise, **goal)
    if cap < 1:
        raise PrivacyError(
            f"privacy.epsilon = {privacy.epsilon} allows no step at noise_multiplier = {noise}; "
            "raise noise_multiplier or epsilon"
        )
    count_noise = privacy.noise_on_count(batch_size)
    if count_noise is not None:
        beside_count(noise, count_noise)  # refuses what cannot be, before anything is written
    made = Plan(
        mechanism=SampledGaussian(noise, rate),
        max_steps=cap,
        delta=privacy.delta,
        adjacency=privacy.adjacency,
        before=before,
    )
    made = _with_fixed_work(made, privacy) if privacy.fixed_work else made
    _refuse_infinite(made)
    return made


def _goal(privacy: config.Privacy, delta: float, before: Composed) -> dict[str, Any]:
    """δ and earlier steps to calibrate with. What cut batches cost of `delta` at the wanted ε is set aside: twice for
    this run's own, so that the accountant, which solves for that cost, never answers above ε."""
    left = delta - cost(privacy.epsilon or 0.0, before.overflow) - (2 * SHARE * delta if privacy.fixed_work else 0.0)
    if left <= 0:
        raise PrivacyError(
            f"privacy.delta = {delta:g} is spent by batches that earlier runs have cut for fixed_work, at "
            f"epsilon = {privacy.epsilon}; lower epsilon or raise delta"
        )
    return {"delta": left, "before": before.uncut()}


def _with_fixed_work(made: Plan, privacy: config.Privacy) -> Plan:
    """The plan for steps of fixed work: the same noise and cap, and batches that are cut rarely enough."""
    reached = made.spent_after(made.max_steps).epsilon if privacy.epsilon is None else privacy.epsilon
    overflow = overflow_for(reached, made.delta, made.max_steps)
    return replace(made, mechanism=replace(made.mechanism, overflow=overflow))


def _refuse_infinite(made: Plan) -> None:
    """Refuse a plan whose cut batches, or those of earlier runs, exceed δ at the ε that it reaches."""
    cut = Composed((*made.before.parts, (made.mechanism, made.max_steps)))
    if cut.overflow and not math.isfinite(made.spent_after(made.max_steps).epsilon):
        raise PrivacyError(
            f"noise_multiplier = {made.mechanism.noise_multiplier} gives no guarantee with fixed_work after "
            f"{made.max_steps} steps: ε is so large that cut batches exceed privacy.delta = {made.delta:g}; raise one"
        )


class Budget:
    """A plan with its ledger.

    Guarantee: `draw` returns only while fewer than `max_steps` steps count as spent in this run, over all its starts.
    """

    def __init__(
        self, plan: Plan, ledger: Ledger, *, seeded: bool, remember: Callable[[Mark], None] | None = None
    ) -> None:
        """`remember` keeps how far the ledger had come when it is closed."""
        self.plan = plan
        self.seeded = seeded
        self._ledger = ledger
        self._remember = remember
        self._failure: LedgerError | None = None
        counted = dict(ledger.spent().parts).get(plan.mechanism, 0)
        self._left = max(0, plan.max_steps - (counted - dict(plan.before.parts).get(plan.mechanism, 0)))

    @classmethod
    def open(
        cls,
        path: Path,
        privacy: config.Privacy,
        *,
        dataset: str,
        site: str,
        records: int,
        batch_size: int,
        planned_steps: int,
        plan_path: Path,
        seeded: bool,
    ) -> Budget:
        """Open the ledger at `path`; the run's plan is made at its first start and kept in `plan_path`, with a mark of
        what the ledger held when the run last began or ended: one that lacks it is refused."""
        kept = read_plan(plan_path) if plan_path.exists() else None
        if kept is not None:
            charged = kept.ledger.absolute()
            if charged != path.absolute():
                fix = "go on where it was started"
                raise LedgerError(f"the run is charged to {charged}, not to {path.absolute()}; {fix}")
            if not path.exists():
                fix = "restore it, or start a new run"
                raise LedgerError(f"{plan_path} tells of a run whose ledger {path} is gone; {fix}")
            require(path, kept.mark)
        ledger = Ledger.open(path, dataset=dataset, site=site, run=str(plan_path.parent.parent.name))
        try:
            if kept is not None:
                made = kept.plan
                fixed = _adjusted(made, privacy, ledger.spent())
                if fixed.mechanism.sample_rate != batch_size / records:
                    raise PrivacyError(
                        f"the run was planned at sample rate {fixed.mechanism.sample_rate:.6g}, but batch_size = "
                        f"{batch_size} of {records} records is {batch_size / records:.6g}: data or settings have "
                        "changed since; start a new run"
                    )
            else:
                try:
                    made = fixed = plan(
                        privacy,
                        records=records,
                        batch_size=batch_size,
                        planned_steps=planned_steps,
                        before=ledger.spent(),
                    )
                except PrivacyError as error:
                    if not ledger.spent().parts:
                        raise
                    spent = epsilon(ledger.spent(), 1, privacy.delta, "pld", privacy.adjacency).epsilon
                    raise PrivacyError(f"earlier runs have spent ε = {spent:.4g} in {path}: {error}") from None

            def remember(mark: Mark) -> None:
                with suppress(OSError):  # an earlier mark remains
                    if plan_path.exists():  # else the run could not begin
                        _write_plan(plan_path, made, path, mark)

            if kept is None:
                _write_plan(plan_path, made, path, ledger.mark)
            else:
                remember(ledger.mark)
            return cls(fixed, ledger, seeded=seeded, remember=remember)
        except BaseException:
            ledger.close()
            raise

    @classmethod
    def read(cls, path: Path, privacy: config.Privacy, *, plan_path: Path, seeded: bool) -> Budget:
        """A budget for its figures alone, also while another process has the ledger."""
        kept, ledger = read_plan(plan_path), Ledger.closed(path)
        require(path, kept.mark)
        return cls(_adjusted(kept.plan, privacy, ledger.spent()), ledger, seeded=seeded)

    @property
    def exhausted(self) -> bool:
        """Whether no further step may be drawn: the cap is reached, or the ledger could not be written."""
        return self._failure is not None or (not self._left and not self._ledger.remaining)

    @property
    def failure(self) -> LedgerError | None:
        """Why drawing ended before the cap, if it did."""
        return self._failure

    @property
    def ledger(self) -> Path:
        return self._ledger.path

    @property
    def steps(self) -> int:
        """Steps drawn or possibly drawn in this run, over all its starts."""
        return self.plan.max_steps - self._left - self._ledger.remaining

    def draw(self) -> None:
        """Charge one step, durably, before its gradient is taken and its noise drawn."""
        if self._ledger.remaining:
            self._ledger.draw()
            return
        block = min(self._left, self._ledger.block)
        if not block:
            raise PrivacyError(
                f"the privacy budget of {self.plan.max_steps} steps is spent; the learner may only average"
            )
        try:
            self._ledger.reserve(block, self.plan.mechanism)
        except LedgerError as error:
            self._failure = error
            raise
        self._left -= block
        self._ledger.draw()

    def charge(self, steps: int) -> None:
        """Count steps of a seeded run that is repeated up to a checkpoint."""
        for _ in range(steps):
            self.draw()

    def guarantee(self) -> Guarantee:
        at_cap, now = self.plan.spent_after(self.plan.max_steps), self.plan.spent_after(self.steps)
        return Guarantee(
            epsilon=at_cap.epsilon,
            epsilon_spent=now.epsilon,
            delta=self.plan.delta,
            adjacency=self.plan.adjacency,
            accountant=at_cap.accountant,
            sampler=self.plan.mechanism.sampler,
            steps=self.steps,
            max_steps=self.plan.max_steps,
            seeded=self.seeded,
            epsilon_others=self.plan.spent_after(0).epsilon,
            threat_model=TIMED_THREAT_MODEL if self._timed else THREAT_MODEL,
            note=at_cap.note,
        )

    @property
    def _timed(self) -> bool:
        """Whether no step that the data set has spent, or may spend, took a time that depends on its batch."""
        return Composed((*self.plan.before.parts, (self.plan.mechanism, self.plan.max_steps))).timed

    def figures(self) -> dict[str, Any]:
        """What a result says of one learner."""
        found = self.guarantee()
        return {"epsilon": found.epsilon, "epsilon_spent": found.epsilon_spent, "max_steps": found.max_steps}

    def close(self) -> None:
        """Return what was reserved and not drawn. Figures stay available."""
        self._left += self._ledger.remaining
        self._ledger.close()
        if self._remember is not None:
            self._remember(self._ledger.mark)


def _adjusted(fixed: Plan, privacy: config.Privacy, spent: Composed) -> Plan:
    """The plan of a run that starts again, where other runs have spent on the same data set since its first start.

    Steps of the same mechanism cannot be told from the run's own and count as such; others move the cap down.
    """
    own = fixed.mechanism
    others = {mechanism: count for mechanism, count in spent.parts if mechanism != own}
    known = {mechanism: count for mechanism, count in fixed.before.parts if mechanism != own}
    earlier = [(mechanism, count) for mechanism, count in fixed.before.parts if mechanism == own]
    counted = dict(spent.parts).get(own, 0) - sum(count for _, count in earlier)
    if others == known:
        return replace(fixed, max_steps=max(fixed.max_steps, counted))
    before, cap = Composed((*others.items(), *earlier)), fixed.max_steps
    if privacy.epsilon is not None:
        room = steps_for(
            epsilon=privacy.epsilon,
            sample_rate=own.sample_rate,
            noise_multiplier=own.noise_multiplier,
            adjacency=fixed.adjacency,
            **_goal(privacy, fixed.delta, before),
        )
        cap = min(cap, room)
    return replace(fixed, before=before, max_steps=max(cap, counted))  # what was taken is reported, beyond the cap too


@dataclass(frozen=True)
class Kept:
    """What a run keeps of its budget: the plan, the ledger that it is charged to, and how far that had come."""

    plan: Plan
    ledger: Path
    mark: Mark


def _write_plan(path: Path, fixed: Plan, ledger: Path, mark: Mark) -> None:
    # A ledger beside the plan is named without its folder, so that a run can be moved as a whole.
    name = ledger.name if ledger.parent == path.parent else str(ledger.absolute())
    with replacing(path, private=True) as part:
        part.write_text(json.dumps({"ledger": name, "mark": asdict(mark), **asdict(fixed)}), encoding="utf-8")


def read_plan(path: Path) -> Kept:
    """What the run of a learner has kept in `path`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        ledger, mark = path.parent / raw.pop("ledger"), Mark(**raw.pop("mark", {}))
        parts = tuple((SampledGaussian(**mechanism), count) for mechanism, count in raw["before"]["parts"])
        fixed = Plan(**{**raw, "mechanism": SampledGaussian(**raw["mechanism"]), "before": Composed(parts)})
        return Kept(fixed, ledger, mark)
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(f"{path} is gone or damaged; restore it, or start a new run on the same ledger") from None
