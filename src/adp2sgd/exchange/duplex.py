"""The exchange where a snapshot takes long to travel: consent first, then both snapshots at the same time.

    initiator i                          responder j
    ask(j) ── Request ─────────────────▶ occupied? ── Busy ──▶ no byte of a model was sent
       ◀───────────────────── Accept ──  else takes snapshot w_j
    takes snapshot w_i
       ── Offer(w_i) ─────────────────▶
       ◀──────────────── Answer(w_j) ──  both flow at the same time
       ◀────────────────────── Ready ──  w_i arrived whole and is acceptable
    holds w_j and Ready:
       ── Commit ─────────────────────▶  mixes −(w_j − w_i)/2
    mixes +(w_j − w_i)/2

Nobody mixes before both sides hold both snapshots. Only a break between Commit's departure and its arrival leaves half
an exchange behind; the responder then waits after Ready in vain and counts one `unconfirmed`. Whoever gives up at any
other point knows that nobody mixed, says so with Cancel, and counts one `expired`. Coming back is as in `protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adp2sgd.exchange.carrier import Carrier
from adp2sgd.exchange.protocol import MESSAGES, Answer, Busy, Commit, Copy, Exchange, Message, Model, Request
from adp2sgd.learner import Learner


class Accept(Message):
    """Yes; my snapshot follows, send yours."""


class Offer(Message):
    """The initiator's snapshot."""


class Ready(Message):
    """Your snapshot is here, whole and acceptable."""


class Cancel(Message):
    """I do not mix; the exchange is over."""


class Gone(Message):
    """The carrier's own notice that the connection to `sender` broke. It never travels."""


KINDS: dict[str, type[Message]] = {
    **MESSAGES,
    "Message": Message,
    **{kind.__name__: kind for kind in (Accept, Offer, Ready, Cancel)},
}

FOLLOWS: dict[type[Message], tuple[type[Message], ...]] = {  # the last message sent → what may come next
    Request: (Accept, Busy, Cancel),
    Offer: (Answer, Ready, Cancel),
    Answer: (Offer, Cancel),
    Ready: (Commit, Cancel),
    Copy: (Model, Busy, Cancel),
}


class DuplexCarrier(Carrier, Protocol):
    """A carrier that knows its links' paces."""

    wire_dtype: torch.dtype  # of the numbers that travel

    def slow(self, partner: int) -> bool:
        """Whether exchanges with `partner` take longer than the median of all links."""
        ...

    def concluded(self, partner: int, completed: bool) -> None:
        """The exchange with `partner` is over. Deadlines follow the time that completed ones take."""
        ...


@dataclass
class Deal:
    """One exchange under way."""

    step: int  # own steps taken when it was asked for
    mine: Tensor | None = None
    theirs: Message | None = None
    ready: bool = False


class DuplexExchange(Exchange):
    """One learner's side of all its exchanges: one per partner, `at_once` in all, one of them over a slow link."""

    carrier: DuplexCarrier

    def __init__(self, learner: Learner, carrier: DuplexCarrier, *, first: int = 1, at_once: int = 2) -> None:
        super().__init__(learner, carrier, first=first, at_once=at_once)
        self._deals: dict[int, Deal] = {}
        self._gathered: Message | None = None  # the last message whose snapshot a deal has taken over

    def expire(self, partner: int) -> None:
        mine = self._end(partner)
        if mine is None:
            return
        if isinstance(mine, Ready):
            self.tally.unconfirmed += 1
        else:
            self.tally.expired += 1
        self.carrier.send(self._message(Cancel, partner, mine.initiator, mine.number))

    def _admits(self, partner: int) -> bool:
        if not super()._admits(partner):
            return False
        return not (self.carrier.slow(partner) and any(map(self.carrier.slow, self.under_way)))

    def _open(self, kind: type[Message], partner: int) -> bool:
        self._deals.setdefault(partner, Deal(self.step))
        opened = super()._open(kind, partner)
        if partner not in self.under_way:
            self._deals.pop(partner, None)
        return opened

    def _answer(self, request: Message) -> None:
        partner = request.sender
        if not self._admits(partner) or self.lost or self.shut:
            self._reply(Busy, request)
            return
        accepted = self._reply(Accept, request)  # first, so that both sides take their snapshots at the same time
        mine = self.carrier.take()
        self._deals[partner] = Deal(self.learner.steps, mine)
        answer = self._message(Answer, partner, request.initiator, request.number, mine)
        self.under_way[partner] = answer
        if not (accepted and self._send(answer)):
            self._end(partner)

    def _continue(self, message: Message) -> None:
        partner, mine = message.sender, self.under_way.get(message.sender)
        if isinstance(message, Gone):
            if mine is not None:
                self.expire(partner)
        elif mine is None or not self._expected(message, mine):
            self.tally.ignored += 1
        elif isinstance(message, Accept):
            self._offer(message)
        elif isinstance(message, Cancel):
            self.tally.expired += 1
            self._end(partner)
        elif isinstance(mine, Ready):
            self._finish(partner)
        elif isinstance(mine, Offer | Answer):
            self._gather(message)
        else:
            super()._continue(message)

    def _expected(self, message: Message, mine: Message) -> bool:
        deal = self._deals[message.sender]
        again = deal.ready if isinstance(message, Ready) else message.snapshot is not None and deal.theirs is not None
        same = (mine.initiator, mine.number) == (message.initiator, message.number)
        return same and isinstance(message, FOLLOWS[type(mine)]) and not again

    def _offer(self, accept: Message) -> None:
        partner, deal = accept.sender, self._deals[accept.sender]
        if not self.carrier.room:
            self.expire(partner)
            return
        deal.mine = self.carrier.take()
        offer = self._message(Offer, partner, accept.initiator, accept.number, deal.mine)
        self.under_way[partner] = offer
        if not self._send(offer):
            self.expire(partner)

    def _gather(self, message: Message) -> None:
        """One more of what this side waits for has come; whatever completes the set moves the exchange on."""
        partner, deal = message.sender, self._deals[message.sender]
        if isinstance(message, Ready):
            deal.ready = True
        else:
            deal.theirs = self._gathered = message
        if isinstance(message, Offer):
            self.under_way[partner] = ready = self._message(Ready, partner, message.initiator, message.number)
            if not self._send(ready):
                self._end(partner)
                self.tally.expired += 1
        elif deal.ready and deal.theirs is not None:
            self._finish(partner, self._message(Commit, partner, message.initiator, message.number))

    def _finish(self, partner: int, commit: Message | None = None) -> None:
        """Mix; the initiator sends its commit first. If that cannot be sent, nobody mixes."""
        deal = self._deals[partner]
        assert deal.mine is not None
        assert deal.theirs is not None
        completed = commit is None or self._send(commit)
        if completed:
            self.step = deal.step
            self._mix(deal.mine, deal.theirs)
        else:
            self.tally.expired += 1
        self._end(partner, completed=completed)

    def _end(self, partner: int, *, completed: bool = False) -> Message | None:
        ended, deal = self.under_way.pop(partner, None), self._deals.pop(partner, None)
        if deal is not None:
            if deal.mine is not None:
                self.carrier.free(deal.mine)
            if deal.theirs is not None:
                self.carrier.release(deal.theirs)
            self.carrier.concluded(partner, completed)
        self._expose()
        return ended

    def _send(self, message: Message) -> bool:
        delivered = self.carrier.send(message)
        if delivered and message.snapshot is not None:
            self.tally.bytes_sent += message.snapshot.numel() * self.carrier.wire_dtype.itemsize
        return delivered

    def _expose(self) -> None:
        self.carrier.expose(any(deal.mine is not None for deal in self._deals.values()))

    def _keeps(self, message: Message) -> bool:
        return message is self._gathered  # `_end` releases it, perhaps before this is asked
