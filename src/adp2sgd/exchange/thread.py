"""A learner's exchange thread: drives its `Exchange` over a carrier in real time, so that training waits for nobody."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence

from adp2sgd.exchange.protocol import Busy, Exchange, Message

IDLE_S = 1.0  # between two looks at the clock while nothing happens


class ExchangeThread(threading.Thread):
    """Started once; ends with `close`, after the exchanges under way."""

    def __init__(self, exchange: Exchange, *, on_message: Callable[[Message], None] | None = None) -> None:
        """`on_message` is called, in this thread, after each message that arrived."""
        super().__init__(name="exchange", daemon=True)
        self.exchange = exchange
        self._on_message = on_message or (lambda _: None)
        self._wanted: tuple[tuple[int, ...], int] | None = None  # with whom to exchange, at which own step
        self._next: list[int] = []  # whom to ask after the exchange under way
        self._step = 0  # at which these were wanted
        self._wanted_copy: int | None = None
        self._copying: int | None = None  # from whom a model is under way
        self._news: tuple[int, ...] = ()  # whom to tell the step counts
        self._reached: dict[int, bool] = {}  # whether the last news could be sent to them
        self._copied = threading.Event()
        self._closing = False
        self._deadlines: dict[int, tuple[Message, float]] = {}  # partner → the message sent to it, when to give up

    def want(self, *partners: int) -> None:
        """Exchange with the first of `partners` soon, unless an exchange is under way, and with the others one after
        the other, until one is busy or `want` is called again. Returns at once."""
        self._wanted = (partners, self.exchange.learner.steps)
        self.exchange.carrier.wake()

    def fetch(self, partner: int) -> bool:
        """Wait for the partner's model and take it over; False if it does not give one. For before training."""
        self._copied.clear()
        self._wanted_copy = partner
        self.exchange.carrier.wake()
        self._copied.wait(2 * self.exchange.carrier.deadline_s(partner))
        return not self.exchange.lost

    def spread(self, partners: Iterable[int]) -> None:
        """Tell others the step counts that this learner knows. Returns at once."""
        self._news = tuple(partners)
        self.exchange.carrier.wake()

    def reaches(self, partners: Sequence[int]) -> bool:
        """Whether any of them could be reached last; they are told the step counts soon, which is the next try."""
        self.spread(partners)
        return any(self._reached.get(partner, True) for partner in partners)

    def close(self) -> None:
        """Answer `busy` to new exchanges, complete those under way, end."""
        self._closing = True
        self.exchange.carrier.wake()
        self.join()

    def run(self) -> None:
        try:
            while not self._closing or self.exchange.under_way:
                self._turn()
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # a learner that cannot exchange is of no use: whoever watches starts another

    def _turn(self) -> None:
        messages = self.exchange.carrier.receive(self._patience_s())
        self.exchange.shut = self._closing
        for message in messages:
            if isinstance(message, Busy):
                self._next.clear()  # learners that ask again at once could all be busy for ever
            self.exchange.receive(message)
            self._on_message(message)
        self._begin()
        self._keep_time()

    def _begin(self) -> None:
        news, self._news = self._news, ()
        for peer in news:
            self._reached[peer] = self.exchange.tell(peer)
        wanted, self._wanted = self._wanted, None
        copy, self._wanted_copy = self._wanted_copy, None
        if self._closing:
            return
        if copy is not None:
            self.exchange.catch_up(copy)
            self._copying = copy
        if wanted is not None:
            (first, *self._next), self._step = wanted
            self.exchange.ask(first, self._step)
        while self._next and not self.exchange.occupied:
            self.exchange.ask(self._next.pop(0), self._step)

    def _patience_s(self) -> float:
        """Seconds until a deadline is due."""
        due = min((at for _, at in self._deadlines.values()), default=time.monotonic() + IDLE_S)
        return max(0.0, due - time.monotonic())

    def _keep_time(self) -> None:
        now, exchange = time.monotonic(), self.exchange
        for partner, sent in list(exchange.under_way.items()):
            known, due = self._deadlines.get(partner, (None, 0.0))
            if known is not sent:
                # The responder waits longer, so that it does not give up on a commit that is under way.
                patience = exchange.carrier.deadline_s(partner) * (1 if sent.sender == sent.initiator else 2)
                self._deadlines[partner] = (sent, now + patience)
            elif now > due:
                exchange.expire(partner)
        self._deadlines = {partner: kept for partner, kept in self._deadlines.items() if partner in exchange.under_way}
        if self._copying is not None and self._copying not in exchange.under_way:
            self._copying = None
            self._copied.set()
