"""The pairwise exchange of models as one state machine. It knows no clock and no carrier.

    initiator i                          responder j
    ask(j) ── Request ─────────────────▶ occupied?  ── Busy ──▶ i is idle again; its next step draws anew
                                         else takes snapshot w_j and answers at once
       ◀───────────────────── Answer(w_j) ──
    takes snapshot w_i,
    mixes +(w_j − w_i)/2
       ── Commit(w_i) ─────────────────▶ mixes −(w_j − w_i)/2

Both sides use the same two snapshots, so they change by exactly opposite amounts. A learner takes part in one exchange
at a time and nobody waits: the carrier calls `expire` on the side that has heard nothing for too long. If the commit is
lost after the initiator mixed, the responder counts one `unconfirmed` exchange: a half-exchange may have happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from adp2sgd.learner import Learner
from adp2sgd.progress import Count, Key


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """`number` tells the initiator's exchanges apart; `initiator` is the same in all messages of one exchange."""

    sender: int
    receiver: int
    initiator: int
    number: int
    progress: Mapping[Key, Count] = field(default_factory=dict)
    snapshot: Tensor | None = None

    @property
    def payload_bytes(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.numel() * self.snapshot.element_size()


class Request(Message):
    """May we exchange?"""


class Busy(Message):
    """Not now."""


class Answer(Message):
    """Here is my snapshot."""


class Commit(Message):
    """I have mixed; here is the snapshot that I used."""


MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in (Request, Busy, Answer, Commit)}


@dataclass
class Tally:
    """What became of a learner's exchanges."""

    completed: int = 0  # on either side
    busy: int = 0  # answers `busy` that this learner received
    expired: int = 0  # asked, and no answer in time
    unconfirmed: int = 0  # answered, and no commit in time
    ignored: int = 0  # messages that came too late to matter
    bytes_sent: int = 0


class Exchange:
    """One learner's side of all its exchanges."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.tally = Tally()
        self.number = 0  # of the exchanges that this learner began
        self.current: Message | None = None  # the last message sent of the exchange under way

    @property
    def occupied(self) -> bool:
        return self.current is not None

    def ask(self, partner: int) -> Request | None:
        """Begin an exchange; None if one is under way."""
        if self.occupied:
            return None
        self.number += 1
        request = Request(sender=self._me, receiver=partner, initiator=self._me, number=self.number)
        self.current = request
        return request

    def receive(self, message: Message) -> Message | None:
        """React to a message; the reply, if there is one, is to be sent at once."""
        self.learner.progress.merge(message.progress)
        if isinstance(message, Request):
            return self._answer(message)
        if not self._continues(message):
            self.tally.ignored += 1
            return None
        if isinstance(message, Answer):
            return self._commit(message)
        if isinstance(message, Commit):
            self._complete(message)
        else:
            self.tally.busy += 1
        self.current = None
        return None

    def expire(self) -> None:
        """Give up the exchange under way, because its next message did not come in time."""
        if isinstance(self.current, Request):
            self.tally.expired += 1
        elif self.current is not None:
            self.tally.unconfirmed += 1
        self.current = None

    def _answer(self, request: Message) -> Message:
        if self.occupied:
            return self._reply(Busy, request)
        self.current = self._reply(Answer, request, self.learner.snapshot())
        return self.current

    def _commit(self, answer: Message) -> Message:
        assert answer.snapshot is not None
        mine = self.learner.snapshot()
        self.learner.mix(mine, answer.snapshot)
        self.tally.completed += 1
        self.current = None
        return self._reply(Commit, answer, mine)

    def _complete(self, commit: Message) -> None:
        assert self.current is not None
        assert self.current.snapshot is not None
        assert commit.snapshot is not None
        self.learner.mix(self.current.snapshot, commit.snapshot)
        self.tally.completed += 1

    def _continues(self, message: Message) -> bool:
        """Whether `message` is the next one of the exchange under way."""
        mine = self.current
        if mine is None or (mine.initiator, mine.number) != (message.initiator, message.number):
            return False
        return isinstance(mine, Answer) == isinstance(message, Commit)

    def _reply(self, kind: type[Message], to: Message, snapshot: Tensor | None = None) -> Message:
        reply = kind(
            sender=self._me,
            receiver=to.sender,
            initiator=to.initiator,
            number=to.number,
            progress=self.learner.progress.counts(),
            snapshot=snapshot,
        )
        self.tally.bytes_sent += reply.payload_bytes
        return reply

    @property
    def _me(self) -> int:
        return self.learner.number
