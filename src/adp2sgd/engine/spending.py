"""What each learner has spent of its ε during a run. A thread computes it, because one ε takes up to a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from adp2sgd.privacy.plan import Plan

START_S = 1.0  # runs that are shorter need none of this
FIRST_SHARE, SHARE = 0.5, 0.02  # of a core's time at most: until every learner has a figure, and then


class Spending(threading.Thread):
    """Updates the figures of one learner after the other, in turn."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        """`plans`: of the learners' budgets; none outside private mode."""
        super().__init__(name="spending", daemon=True)
        self.drawn: Sequence[int | None] = [None] * len(plans)  # the steps that each learner has charged
        self._plans = plans
        self._spent: dict[int, tuple[int, float]] = {}  # learner → steps, ε
        self._caps: dict[int, float] = {}
        self._closing = threading.Event()

    def spent(self, learner: int) -> float | None:
        return self._spent[learner][1] if learner in self._spent else None

    def cap(self, learner: int) -> float | None:
        return self._caps.get(learner)

    def close(self) -> None:
        """Ends the thread after the computation under way. Does not wait for it."""
        self._closing.set()

    def run(self) -> None:
        self._closing.wait(START_S)
        while self._plans and not self._closing.is_set():
            for learner, plan in enumerate(self._plans):
                began, steps = time.monotonic(), self.drawn[learner]
                if steps and self._spent.get(learner, (0, 0.0))[0] != steps:
                    self._spent[learner] = steps, plan.spent_after(steps).epsilon
                    self._caps[learner] = plan.spent_after(plan.max_steps).epsilon
                share = SHARE if len(self._spent) == len(self._plans) else FIRST_SHARE
                if self._closing.wait(max(0.02, (time.monotonic() - began) / share)):
                    return
