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

Coming back after a crash is one-way: catch_up(j) ── Copy ──▶ j answers Model(w_j), occupied or not, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    intact: Callable[[], bool] | None = None  # whether `snapshot` is still what was sent, where it lies at its sender

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


class Copy(Message):
    """I come back without a model: may I have yours?"""


class Model(Message):
    """Here it is; nothing is expected in return."""


MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in (Request, Busy, Answer, Commit, Copy, Model)}


@dataclass
class Tally:
    """What became of a learner's exchanges."""

    completed: int = 0  # on either side
    initiated: int = 0  # of these, begun by this learner
    mixed_before: int = 0  # of these, mixed before the descent of the step that they were begun in
    busy: int = 0  # answers `busy` that this learner received
    expired: int = 0  # asked, and no answer in time
    unconfirmed: int = 0  # answered, and no commit in time
    halves: int = 0  # the partner mixed and this side could not, or only in part
    ignored: int = 0  # messages that came too late to matter
    bytes_sent: int = 0


class Exchange:
    """One learner's side of all its exchanges.

    A carrier may say where a snapshot is taken to (`snapshot`), and it may take the commit before this side mixes, so
    that both mix at the same time (`send`; it tells whether the commit is on its way, and if not, nobody mixes).
    """

    def __init__(
        self,
        learner: Learner,
        *,
        first: int = 1,
        snapshot: Callable[[], Tensor] | None = None,
        send: Callable[[Message], bool] | None = None,
    ) -> None:
        """`first`: the number of the first exchange; a learner that restarts must not use a number twice."""
        self.learner = learner
        self.tally = Tally()
        self.number = first - 1  # of the last exchange that this learner began
        self.step = 0  # own steps taken when it was asked for
        self.lost = False  # restarted, and no model worth sharing yet
        self.shut = False  # the carrier has no room, or the run is over: everybody is answered `busy`
        self._snapshot = snapshot or learner.snapshot
        self._send = send
        self.current: Message | None = None  # the last message sent of the exchange under way

    @property
    def occupied(self) -> bool:
        return self.current is not None

    def ask(self, partner: int, step: int | None = None) -> Message | None:
        """Begin an exchange; None if one is under way. `step`: own steps taken when it was wanted, if not now."""
        request = self._open(Request, partner)
        if request is not None:
            self.step = self.learner.steps if step is None else step
        return request

    def catch_up(self, partner: int) -> Message | None:
        """Ask for the partner's model, to go on from it; None if an exchange is under way."""
        return self._open(Copy, partner)

    def receive(self, message: Message) -> Message | None:
        """React to a message; the reply, if there is one, is to be sent at once."""
        self.learner.progress.merge(message.progress)
        if isinstance(message, Request):
            return self._answer(message)
        if isinstance(message, Copy):
            refused = self.lost or self.shut
            return self._reply(Busy, message) if refused else self._reply(Model, message, self._snapshot())
        if not self._continues(message):
            self.tally.ignored += 1
            return None
        if isinstance(message, Answer):
            return self._commit(message)
        if isinstance(message, Commit):
            self._complete(message)
        elif isinstance(message, Model):
            assert message.snapshot is not None
            self.learner.adopt(message.snapshot)
            self.lost = message.intact is not None and not message.intact()
        else:
            self.tally.busy += 1
        self.current = None
        return None

    def expire(self) -> None:
        """Give up the exchange under way, because its next message did not come in time."""
        if isinstance(self.current, Answer):
            self.tally.unconfirmed += 1
        elif self.current is not None:
            self.tally.expired += 1
        self.current = None

    def _answer(self, request: Message) -> Message:
        if self.occupied or self.lost or self.shut:
            return self._reply(Busy, request)
        self.current = self._reply(Answer, request, self._snapshot())
        return self.current

    def _commit(self, answer: Message) -> Message | None:
        self.current = None
        mine = self._snapshot()
        commit = self._reply(Commit, answer, mine)
        if self._send is None:
            self._mix(mine, answer)
            return commit
        if self._send(commit):
            self._mix(mine, answer)
        else:
            self.tally.expired += 1
        return None

    def _complete(self, commit: Message) -> None:
        assert self.current is not None
        assert self.current.snapshot is not None
        self._mix(self.current.snapshot, commit)

    def _mix(self, mine: Tensor, message: Message) -> None:
        assert message.snapshot is not None
        if self.learner.mix(mine, message.snapshot, message.intact):
            self.tally.completed += 1
            if isinstance(message, Answer):
                self.tally.initiated += 1
                self.tally.mixed_before += self.learner.steps == self.step
        else:
            self.tally.halves += 1

    def _continues(self, message: Message) -> bool:
        """Whether `message` is the next one of the exchange under way."""
        mine = self.current
        if mine is None or (mine.initiator, mine.number) != (message.initiator, message.number):
            return False
        if isinstance(mine, Copy):
            return isinstance(message, Model | Busy)
        return isinstance(message, Commit if isinstance(mine, Answer) else Answer | Busy)

    def _open(self, kind: type[Message], partner: int) -> Message | None:
        if self.occupied:
            return None
        self.number += 1
        self.current = kind(sender=self._me, receiver=partner, initiator=self._me, number=self.number)
        return self.current

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
