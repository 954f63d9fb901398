"""How long an exchange over one link may take, learnt from the exchanges that it has completed.

    no exchange yet    FLOOR_S + both models at SLOWEST bytes per second
    then               median + 8 spreads of the last exchanges, at least FLOOR_S

The spread is the median distance from the median, at least an eighth of the median, so the deadline is at least twice
the median. Every exchange that is given up doubles the deadline until one completes: a link that has become slower is
measured again instead of being given up for ever. There is nothing to configure.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

FLOOR_S = 5.0
SLOWEST = 125_000  # bytes per second: 1 Mbit/s
KEPT = 32  # exchanges
SPREADS = 8
MOST_DOUBLINGS = 6


class Pace:
    """One link's exchanges. `begin` and `end` are called by one thread."""

    def __init__(self, model_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cold_s = FLOOR_S + 2 * model_bytes / SLOWEST
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._given_up = 0
        self._began: float | None = None

    def begin(self) -> None:
        self._began = self._clock()

    def end(self, completed: bool) -> None:
        """The exchange under way is over. One that took the whole deadline in vain doubles it."""
        if self._began is None:
            return
        took, self._began = self._clock() - self._began, None
        if completed:
            self._seconds.append(took)
            self._given_up = 0
        elif took >= self.deadline_s:
            self._given_up = min(self._given_up + 1, MOST_DOUBLINGS)

    @property
    def typical_s(self) -> float | None:
        """The median of the exchanges that were completed; None before the first."""
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def deadline_s(self) -> float:
        typical = self.typical_s
        if typical is None:
            return self._cold_s * 2.0**self._given_up
        spread = statistics.median(abs(each - typical) for each in self._seconds)
        learnt = typical + SPREADS * max(spread, typical / SPREADS)
        return float(max(FLOOR_S, learnt) * 2.0**self._given_up)
