"""The global counter of minibatches, without a counter server.

Every learner keeps step counts keyed by (learner, start); two that meet merge by maximum; the sum is the global
count. A restart opens a new key, so that no step is hidden or counted twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Key = tuple[int, int]
"""(learner, start): `start` differs each time that the learner's process starts."""


@dataclass(frozen=True, slots=True)
class Count:
    """Steps under one key, and whether that learner has stopped training. Both only ever grow."""

    steps: int = 0
    stopped: bool = False


def to_rows(counts: Mapping[Key, Count]) -> list[list[int]]:
    """Counts as plain numbers, for JSON: learner, start, steps, stopped."""
    return [[*key, count.steps, int(count.stopped)] for key, count in counts.items()]


def from_rows(rows: Iterable[Sequence[int]]) -> dict[Key, Count]:
    return {(learner, start): Count(steps, bool(stopped)) for learner, start, steps, stopped in rows}


class Progress:
    """One learner's view of all learners' step counts. Its own count is always exact."""

    def __init__(self, learner: int, start: int = 0, *, limit: int | None = None, steps_per_epoch: float = 1.0) -> None:
        """`limit`: the steps after which the run ends; a larger count from a peer is refused as implausible.
        `steps_per_epoch`: steps of all learners together."""
        self.own: Key = (learner, start)
        self.total = 0
        self.refused = 0
        self._limit = limit
        self._steps_per_epoch = steps_per_epoch
        self._counts: dict[Key, Count] = {self.own: Count()}
        self._mutex = threading.Lock()  # the training thread counts while the exchange thread merges

    @property
    def epoch(self) -> float:
        """Global progress in epochs, as far as this learner has heard."""
        return self.total / self._steps_per_epoch

    def advance(self) -> None:
        """One more step of the own learner."""
        with self._mutex:
            count = self._counts[self.own]
            self._set(self.own, Count(count.steps + 1, count.stopped))

    def stop(self) -> None:
        """The own learner takes no further step."""
        with self._mutex:
            self._set(self.own, Count(self._counts[self.own].steps, True))

    def merge(self, theirs: Mapping[Key, Count]) -> None:
        """Take the maximum of every count; implausible ones are refused and counted in `refused`."""
        with self._mutex:
            for key, count in theirs.items():
                if count != self._counts.get(key) and key != self.own:
                    self._merge_one(key, count)

    def stopped(self, learner: int) -> bool:
        """Whether the learner has stopped training, as far as is known of its last start."""
        with self._mutex:
            starts = [start for number, start in self._counts if number == learner]
            return bool(starts) and self._counts[learner, max(starts)].stopped

    def counts(self) -> dict[Key, Count]:
        """A copy to send."""
        with self._mutex:
            return dict(self._counts)

    def restore(self, counts: Mapping[Key, Count]) -> None:
        """Take over the counts of a checkpoint, the own one included; what was heard since stays."""
        with self._mutex:
            for key, count in counts.items():
                self._raise(key, count)

    def _merge_one(self, key: Key, count: Count) -> None:
        if self._limit is not None and count.steps > self._limit:
            self.refused += 1
            return
        self._raise(key, count)

    def _raise(self, key: Key, count: Count) -> None:
        before = self._counts.get(key, Count())
        self._set(key, Count(max(before.steps, count.steps), before.stopped or count.stopped))

    def _set(self, key: Key, count: Count) -> None:
        self.total += count.steps - self._counts.get(key, Count()).steps
        self._counts[key] = count
