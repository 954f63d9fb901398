"""What each learner has spent of its ε during a run. A thread computes it, because one ε takes up to a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from adp2sgd.privacy.plan import Plan

START_S = 1.0  # runs that are shorter need none of this
POINTS = 16  # numbers of steps up to the cap at which ε is computed
SHARE = 0.5  # of a core's time at most


class Spending(threading.Thread):
    """Guarantee: no figure is below what a learner has spent. It is ε at the next of a few numbers of steps."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        """`plans`: of the learners' budgets; none outside private mode."""
        super().__init__(name="spending", daemon=True)
        self.drawn: Sequence[int | None] = [None] * len(plans)  # the steps that each learner has charged
        self._plans = plans
        self._found: list[dict[int, float]] = [{} for _ in plans]  # of each learner: steps → ε
        self._closing = threading.Event()

    def spent(self, learner: int) -> float | None:
        """An upper bound on the ε that the learner has spent; None until one is known."""
        if not self._plans:
            return None
        drawn, found = self.drawn[learner], self._found[learner]
        return min((value for steps, value in list(found.items()) if steps >= (drawn or 0)), default=None)

    def cap(self, learner: int) -> float | None:
        return self._found[learner].get(self._plans[learner].max_steps) if self._plans else None

    def close(self) -> None:
        """Ends the thread after the computation under way. Does not wait for it."""
        self._closing.set()

    def run(self) -> None:
        self._closing.wait(START_S)
        for part in range(POINTS, 0, -1):  # the cap first: it bounds every number of steps
            for learner, plan in enumerate(self._plans):
                steps = max(1, -(-part * plan.max_steps // POINTS))
                began = time.monotonic()
                self._found[learner][steps] = self._known(plan, steps)
                if self._closing.wait((time.monotonic() - began) / SHARE):
                    return

    def _known(self, plan: Plan, steps: int) -> float:
        """Learners with equal plans share a figure."""
        for other, found in zip(self._plans, self._found, strict=True):
            if other == plan and steps in found:
                return found[steps]
        return plan.spent_after(steps).epsilon
