"""The end of a run between sites: only averaging, until neighbours' models are close.

The distance of two models is ‖w_i − w_j‖ / ‖w_i‖, taken of the snapshots of an exchange before it mixes. A site has
settled when its last exchange with every neighbour that it reaches was within the tolerance, and no exchange moved it
further since. It keeps answering until nobody has asked it for a while, so a neighbour that has not settled is not left
alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import Tensor, linalg

QUIET_S = 1.0  # without an exchange, before a settled site leaves
LIMIT_DEADLINES = 10  # times the longest deadline of a link: then a site leaves as it is


class Settling:
    """Distances to neighbours, noted by the exchange thread."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.distances: dict[int, float] = {}  # neighbour → at the last exchange since `begin`
        self.squares: dict[int, float] = {}  # the same, as ‖w_i − w_j‖²
        self.began: float | None = None
        self._last = 0.0

    def begin(self) -> None:
        self.distances.clear()
        self.squares.clear()
        self.began = self._last = time.monotonic()

    def note(self, partner: int, mine: Tensor, theirs: Tensor) -> None:
        """An exchange is about to mix these snapshots."""
        if self.began is None:
            return  # training goes on, and a look would cost time
        apart = float(linalg.vector_norm(theirs.double() - mine.double()))
        distance = apart / max(float(linalg.vector_norm(mine.double())), 1e-30)
        if distance >= self.tolerance:  # this model moves, so what is known of other neighbours no longer holds
            self.distances, self.squares = {}, {}
        self.distances[partner], self.squares[partner] = distance, apart**2
        self._last = time.monotonic()

    def open(self, reached: Iterable[int]) -> list[int]:
        """The neighbours that this site must still exchange with."""
        return [each for each in reached if not self.distances.get(each, float("inf")) < self.tolerance]

    def over(self, reached: Iterable[int], longest_deadline_s: float, *, waits: bool = False) -> bool:
        """Whether the site may leave. `waits`: for neighbours that it has lost."""
        assert self.began is not None
        now = time.monotonic()
        if now - self.began > LIMIT_DEADLINES * longest_deadline_s:
            return True
        return not waits and not self.open(reached) and now - self._last >= QUIET_S

    @property
    def distance(self) -> float | None:
        """The largest of the last distances; None where nobody was met since the end of training."""
        return max(self.distances.values(), default=None)

    @property
    def consensus(self) -> float:
        """Mean squared distance from the pairs' averages: what is known here of the consensus."""
        return sum(self.squares.values()) / (4 * len(self.squares)) if self.squares else 0.0
