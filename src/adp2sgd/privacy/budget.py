"""A learner's right to draw: a cap on its own steps, fixed before training, and a ledger charged before each draw.

Under asynchrony nobody knows how many steps a learner will take, so its guarantee is computed for the cap: a learner
that reaches it stops training and goes on averaging. What it really took is reported as `epsilon_spent`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from adp2sgd import config
from adp2sgd.errors import LedgerError, PrivacyError
from adp2sgd.privacy.ledger import Ledger, Mark, require
from adp2sgd.privacy.mechanism import RECORD, THREAT_MODEL, TIMED_THREAT_MODEL, Composed, Guarantee
from adp2sgd.privacy.plan import Kept, Plan, plan, read_plan, write_plan
from adp2sgd.privacy.policy import Policy


class Budget:
    """A plan with its ledger.

    Guarantee: `draw` returns only while fewer than `max_steps` steps count as spent in this run, over all its starts,
    and only while the ledger's policy covers the step. The policy is on disk before the first one.
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
        unit: str = RECORD,
    ) -> Budget:
        """Open the ledger at `path`; the run's plan is made at its first start and kept in `plan_path`, with a mark of
        what the ledger held when the run last began or ended. A ledger that lacks it is refused."""
        kept = _kept(path, plan_path) if plan_path.exists() else None
        ledger = Ledger.open(path, dataset=dataset, site=site, unit=unit, run=str(plan_path.parent.parent.name))
        try:
            if kept is not None:
                made, fixed = kept.plan, _resumed(kept.plan, ledger, privacy, records, batch_size)
            else:
                size = {"records": records, "batch_size": batch_size, "planned_steps": planned_steps}
                made = fixed = _first_plan(ledger, privacy, size)
            if fixed.policy != ledger.policy:
                ledger.adopt(fixed.policy)  # on disk before the first step

            def remember(mark: Mark) -> None:
                with suppress(OSError):  # an earlier mark remains
                    if plan_path.exists():  # else the run could not begin
                        write_plan(plan_path, Kept(made, path, mark))

            if kept is None:
                write_plan(plan_path, Kept(made, path, ledger.mark))
            else:
                remember(ledger.mark)
            return cls(fixed, ledger, seeded=seeded, remember=remember)
        except BaseException:
            ledger.close()
            raise

    @classmethod
    def read(cls, path: Path, privacy: config.Privacy, *, plan_path: Path, seeded: bool) -> Budget:
        """A budget that only reports figures. Works while another process holds the ledger."""
        kept, ledger = read_plan(plan_path), Ledger.closed(path)
        require(path, kept.mark)
        fixed = kept.plan.resumed(_policy_of(ledger, kept.plan), ledger.spent(), privacy.epsilon)
        return cls(fixed, ledger, seeded=seeded)

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
        """Charge one step durably. Call it before the gradient is computed and the noise is drawn."""
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
        """What the ledger's policy promises over all runs, and what they have spent."""
        policy, now = self.plan.policy, self.plan.spent_after(self.steps)
        promised = policy.promised()
        return Guarantee(
            epsilon=max(promised.epsilon, now.epsilon),  # a torn line may count steps that were never taken
            epsilon_spent=now.epsilon,
            delta=policy.delta,
            adjacency=policy.adjacency,
            accountant=promised.accountant,
            sampler=self.plan.mechanism.sampler,
            steps=self.steps,
            max_steps=self.plan.max_steps,
            seeded=self.seeded,
            composition=policy.composition,
            epsilon_alone=self.plan.alone(),
            epsilon_others=self.plan.spent_after(0).epsilon,
            unit=self._ledger.unit,
            threat_model=TIMED_THREAT_MODEL if self._timed else THREAT_MODEL,
            note=promised.note,
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


def _kept(path: Path, plan_path: Path) -> Kept:
    """The plan of a resumed run. The ledger at `path` must be the one that it is charged to, with all its steps."""
    kept = read_plan(plan_path)
    charged = kept.ledger.absolute()
    if charged != path.absolute():
        fix = "go on where it was started"
        raise LedgerError(f"the run is charged to {charged}, not to {path.absolute()}; {fix}")
    if not path.exists():
        fix = "restore it, or start a new run"
        raise LedgerError(f"{plan_path} belongs to a run whose ledger {path} is gone; {fix}")
    require(path, kept.mark)
    return kept


def _resumed(made: Plan, ledger: Ledger, privacy: config.Privacy, records: int, batch_size: int) -> Plan:
    """The plan of a resumed run, after what other runs have spent meanwhile."""
    planned, rate = made.mechanism.sample_rate, batch_size / records
    if planned != rate:
        raise PrivacyError(
            f"the run was planned at sample rate {planned:.6g}, but batch_size = {batch_size} of {records} records is "
            f"{rate:.6g}: data or settings have changed since; start a new run"
        )
    return made.resumed(_policy_of(ledger, made), ledger.spent(), privacy.epsilon)


def _first_plan(ledger: Ledger, privacy: config.Privacy, size: dict[str, int]) -> Plan:
    """The plan of a new run. Until the first step is drawn, its policy replaces the ledger's."""
    spent = ledger.spent()
    if not any(count for _, count in spent.parts):
        return plan(privacy, **size)
    policy = ledger.policy
    if policy is None:
        raise LedgerError(
            f"the ledger {ledger.path} has steps from before ledgers had a policy: no bound covers runs chosen after "
            "others without one; finish its runs, and begin no other on these records"
        )
    try:
        return plan(privacy, **size, policy=policy, before=spent)
    except PrivacyError as error:
        told = f"earlier runs have spent ε = {policy.spent(spent).epsilon:.4g} in {ledger.path}"
        raise PrivacyError(f"{told}: {error}") from None


def _policy_of(ledger: Ledger, made: Plan) -> Policy:
    """The policy of a resumed run: the ledger's, which another run may have fixed before the first step. Without one
    it is the run's own, if the ledger holds nothing but this run's steps."""
    if ledger.policy is not None:
        return ledger.policy
    if any(mechanism != made.mechanism for mechanism, _ in ledger.spent().parts):
        raise LedgerError(
            f"the ledger {ledger.path} has steps of several runs from before ledgers had a policy: no bound covers "
            "further ones; adp2sgd privacy spent tells what it holds"
        )
    return made.policy
