"""When the next checkpoint is due by the clock."""

from __future__ import annotations

import math
import time

SHARE = 0.05  # of the time that checkpoints may take, at most


class Pace:
    """Due every `every_s` seconds of real time; less often where the work would take more than `SHARE` of the time."""

    def __init__(self, every_s: float) -> None:
        """0: never due."""
        self._every_s = every_s or math.inf
        self._next = time.monotonic() + self._every_s

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def done(self, began: float) -> None:
        """The work that began at this monotonic time has ended; whatever made it due."""
        now = time.monotonic()
        self._next = now + max(self._every_s, (now - began) / SHARE)
