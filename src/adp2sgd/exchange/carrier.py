"""The contract of whatever carries the messages of one learner's exchanges: memory, shared memory, a network.

A carrier moves messages; it decides nothing. `protocol.Exchange` holds the rules and is the only caller of `take`,
`free`, `send`, `release` and `expose`. `thread.ExchangeThread`, or a simulator, hands in what `receive` returns.
All methods but `wake` are called by one thread. `tests/exchange/test_conformance.py` holds every carrier to this text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from adp2sgd.exchange.protocol import Message


class Carrier(Protocol):
    """One learner's way to its peers."""

    @property
    def room(self) -> int:
        """How many snapshots can be taken now. A snapshot takes room until both sides have finished with it."""
        ...

    def take(self) -> Tensor:
        """A snapshot of the learner's model that this carrier can send. Needs `room`.

        With a compressed wire format the snapshot is already rounded, so both sides of an exchange use equal numbers.
        """
        ...

    def free(self, snapshot: Tensor) -> None:
        """This side no longer needs a snapshot that it took. A peer may still be reading it."""
        ...

    def send(self, message: Message) -> bool:
        """Give a message on its way. Never waits for the peer.

        False means that the message certainly does not arrive. True promises nothing.
        """
        ...

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """The messages that have arrived whole, after waiting for one at most so long.

        Guarantee: a message's `sender` is the peer that really sent it. What is incomplete, malformed or from anybody
        else is dropped. A message may be lost, late, repeated or out of order; `Exchange` copes with that.
        """
        ...

    def release(self, message: Message) -> None:
        """This side has read the snapshot of a received message."""
        ...

    def expose(self, exposed: bool) -> None:
        """While True, the death of this process may leave half an exchange behind: its partner mixed, it did not."""
        ...

    def deadline_s(self, partner: int) -> float:
        """How long the next message of an exchange with `partner` may take before this side gives it up."""
        ...

    def wake(self) -> None:
        """Make a `receive` that waits return. Callable from any thread."""
        ...

    def close(self) -> None:
        """End all connections; peers see this side as gone."""
        ...
