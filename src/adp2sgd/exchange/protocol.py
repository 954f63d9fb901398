"""The pairwise exchange of models as one state machine. It knows no clock; a `Carrier` moves its messages.

    initiator i                          responder j
    ask(j) ── Request ─────────────────▶ occupied?  ── Busy ──▶ i is idle again; its next step draws anew
                                         else takes snapshot w_j and answers at once
       ◀───────────────────── Answer(w_j) ──
    takes snapshot w_i,
       ── Commit(w_i) ─────────────────▶ mixes −(w_j − w_i)/2
    mixes +(w_j − w_i)/2

Both sides use the same two snapshots, so they change by exactly opposite amounts. A learner takes part in at most
`at_once` exchanges, each with another partner, and nobody waits: `expire` gives up an exchange whose next message did
not come in time. If the commit is lost after the initiator mixed, the responder counts one `unconfirmed` exchange: a
half-exchange may have happened.

Coming back after a crash is one-way: catch_up(j) ── Copy ──▶ j answers Model(w_j), occupied or not, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from adp2sgd.exchange.carrier import Carrier
from adp2sgd.learner import Learner
from adp2sgd.progress import Count, Key


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """`number` tells the initiator's exchanges apart; `initiator` is the same in all messages of one exchange.

    A plain Message is news: step counts and nothing else.
    """

    sender: int
    receiver: int
    initiator: int
    number: int
    progress: Mapping[Key, Count] = field(default_factory=dict)
    snapshot: Tensor | None = None
    intact: Callable[[], bool] | None = None  # whether `snapshot` is still what was sent, where it lies at its sender
    receipt: Any = None  # the carrier's own note of where a received snapshot lies

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
    """I mix; here is the snapshot that I use."""


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
    ignored: int = 0  # messages that came too late to matter, twice, or from somebody else
    bytes_sent: int = 0
    partners: dict[int, int] = field(default_factory=dict)  # partner → completed exchanges with it


class Exchange:
    """One learner's side of all its exchanges, over one carrier."""

    def __init__(self, learner: Learner, carrier: Carrier, *, first: int = 1, at_once: int = 1) -> None:
        """`first`: the number of the first exchange; a learner that restarts must not use a number twice."""
        self.learner = learner
        self.carrier = carrier
        self.tally = Tally()
        self.number = first - 1  # of the last exchange that this learner began
        self.step = 0  # own steps taken when it was asked for
        self.lost = False  # restarted, and no model worth sharing yet
        self.shut = False  # the run is over: everybody is answered `busy`
        self.watch: Callable[[int, Tensor, Tensor], None] = lambda partner, mine, theirs: None  # before each mix
        self.under_way: dict[int, Message] = {}  # partner → the last message sent to it
        self._at_once = at_once

    @property
    def occupied(self) -> bool:
        return len(self.under_way) >= self._at_once

    def ask(self, partner: int, step: int | None = None) -> bool:
        """Begin an exchange; False if the learner is occupied or the partner cannot be reached.

        `step`: own steps taken when the exchange was wanted, if not now.
        """
        if not self.occupied:
            self.step = self.learner.steps if step is None else step
        return self._open(Request, partner)

    def catch_up(self, partner: int) -> bool:
        """Ask for the partner's model, to go on from it; False as with `ask`."""
        return self._open(Copy, partner)

    def receive(self, message: Message) -> None:
        """React to a message; whatever is to be answered is sent at once."""
        self.learner.progress.merge(message.progress)
        try:
            if isinstance(message, Request):
                self._answer(message)
            elif isinstance(message, Copy):
                self._show(message)
            elif type(message) is not Message:
                self._continue(message)
        finally:
            if not self._keeps(message):
                self.carrier.release(message)

    def expire(self, partner: int) -> None:
        """Give up the exchange with `partner`, because its next message did not come in time."""
        if isinstance(self._end(partner), Answer):
            self.tally.unconfirmed += 1
        else:
            self.tally.expired += 1

    def tell(self, partner: int) -> bool:
        """News for `partner`: the step counts that this learner knows."""
        return self.carrier.send(self._message(Message, partner, self.learner.number, 0))

    def _admits(self, partner: int) -> bool:
        """Whether one more exchange may begin, with this partner."""
        return not self.occupied and partner not in self.under_way and self.carrier.room > 0

    def _keeps(self, message: Message) -> bool:
        """Whether the snapshot of a message that was received is still needed."""
        return False

    def _open(self, kind: type[Message], partner: int) -> bool:
        if not self._admits(partner):
            return False
        self.number += 1
        me = self.learner.number
        self.under_way[partner] = message = kind(sender=me, receiver=partner, initiator=me, number=self.number)
        if self.carrier.send(message):  # over a free network the whole exchange happens within this call
            return True
        self.expire(partner)
        return False

    def _answer(self, request: Message) -> None:
        partner = request.sender
        if not self._admits(partner) or self.lost or self.shut:
            self._reply(Busy, request)
            return
        answer = self.under_way[partner] = self._message(
            Answer, partner, request.initiator, request.number, self.carrier.take()
        )
        self._expose()
        if not self._send(answer):  # the initiator is gone and knows of nothing
            self._end(partner)

    def _show(self, request: Message) -> None:
        if self.lost or self.shut or self.carrier.room < 2:  # one snapshot's room stays for a commit
            self._reply(Busy, request)
            return
        mine = self.carrier.take()
        self._reply(Model, request, mine)
        self.carrier.free(mine)

    def _continue(self, message: Message) -> None:
        mine = self.under_way.get(message.sender)
        if mine is None or not _follows(message, mine):
            self.tally.ignored += 1
        elif isinstance(message, Answer):
            self._commit(message)
        elif isinstance(message, Commit):
            assert mine.snapshot is not None
            self._mix(mine.snapshot, message)
            self._end(message.sender)
        elif isinstance(message, Model):
            assert message.snapshot is not None
            self.learner.adopt(message.snapshot)
            self.lost = message.intact is not None and not message.intact()
            self._end(message.sender)
        else:
            self.tally.busy += 1
            self._end(message.sender)

    def _commit(self, answer: Message) -> None:
        """Send the commit, then mix: both sides mix at the same time. If it cannot be sent, nobody mixes."""
        partner, mine = answer.sender, self.carrier.take()
        self.under_way[partner] = commit = self._message(Commit, partner, answer.initiator, answer.number, mine)
        self._expose()
        if self._send(commit):
            self._mix(mine, answer)
        else:
            self.tally.expired += 1
        self._end(partner)

    def _mix(self, mine: Tensor, message: Message) -> None:
        assert message.snapshot is not None
        self.watch(message.sender, mine, message.snapshot)
        if self.learner.mix(mine, message.snapshot, message.intact):
            self.tally.completed += 1
            self.tally.partners[message.sender] = self.tally.partners.get(message.sender, 0) + 1
            if isinstance(message, Answer):
                self.tally.initiated += 1
                self.tally.mixed_before += self.learner.steps == self.step
        else:
            self.tally.halves += 1

    def _end(self, partner: int) -> Message | None:
        """The exchange with `partner` is over, in whatever way."""
        ended = self.under_way.pop(partner, None)
        if ended is not None and ended.snapshot is not None:
            self.carrier.free(ended.snapshot)
        self._expose()
        return ended

    def _expose(self) -> None:
        self.carrier.expose(any(message.snapshot is not None for message in self.under_way.values()))

    def _reply(self, kind: type[Message], to: Message, snapshot: Tensor | None = None) -> bool:
        return self._send(self._message(kind, to.sender, to.initiator, to.number, snapshot))

    def _send(self, message: Message) -> bool:
        delivered = self.carrier.send(message)
        self.tally.bytes_sent += message.payload_bytes if delivered else 0
        return delivered

    def _message(
        self, kind: type[Message], partner: int, initiator: int, number: int, snapshot: Tensor | None = None
    ) -> Message:
        return kind(
            sender=self.learner.number,
            receiver=partner,
            initiator=initiator,
            number=number,
            progress=self.learner.progress.counts(),
            snapshot=snapshot,
        )


def _follows(message: Message, mine: Message) -> bool:
    """Whether `message` is the next one of the exchange of which this side sent `mine` last."""
    if (mine.initiator, mine.number) != (message.initiator, message.number):
        return False
    if isinstance(mine, Copy):
        return isinstance(message, Model | Busy)
    if isinstance(mine, Answer):
        return isinstance(message, Commit)
    return isinstance(mine, Request) and isinstance(message, Answer | Busy)
