"""Carries exchange messages between learners of one process: the simulator's network.

A message is handed over as it is, snapshot included; `post` decides when it arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from adp2sgd.exchange.protocol import Message
from adp2sgd.learner import Learner

FOREVER_S = float("inf")


class Pool:
    """Snapshots that both sides have finished with: new memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._spare: list[Tensor] = []
        self._read_once: dict[int, Tensor] = {}  # by one of its two sides

    def get(self) -> Tensor | None:
        return self._spare.pop() if self._spare else None

    def finished(self, snapshot: Tensor) -> None:
        """One of the two sides no longer needs it."""
        if self._read_once.pop(id(snapshot), None) is None:
            self._read_once[id(snapshot)] = snapshot
        else:
            self._spare.append(snapshot)


class MemoryCarrier:
    """One learner's end. `arrived` holds what `receive` will return; messages are neither lost nor forged."""

    def __init__(self, learner: Learner, post: Callable[[Message], None], pool: Pool) -> None:
        """`post` takes a message that this learner sends, and brings it to its receiver in its own time."""
        self.arrived: deque[Message] = deque()
        self._learner = learner
        self._post = post
        self._pool = pool

    @property
    def room(self) -> int:
        return 2

    def take(self) -> Tensor:
        return self._learner.snapshot(self._pool.get())

    def free(self, snapshot: Tensor) -> None:
        self._pool.finished(snapshot)

    def send(self, message: Message) -> bool:
        self._post(message)
        return True

    def receive(self, timeout_s: float = 0.0) -> Sequence[Message]:
        messages = list(self.arrived)
        self.arrived.clear()
        return messages

    def release(self, message: Message) -> None:
        if message.snapshot is not None:
            self._pool.finished(message.snapshot)

    def expose(self, exposed: bool) -> None:
        """A simulation dies as a whole."""

    def deadline_s(self, partner: int) -> float:
        return FOREVER_S

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """There is nothing to close."""
