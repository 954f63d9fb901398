"""A learner's exchange thread: carries the messages of `protocol.Exchange`, so that training waits for nobody."""

from __future__ import annotations

import json
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adp2sgd.exchange.protocol import Answer, Busy, Copy, Exchange, Message, Model, Request
from adp2sgd.exchange.shared import NO_SLOT, Datagram, Inbox, Layout, Memory, Outbox, Post, decode, encode
from adp2sgd.learner import Learner
from adp2sgd.progress import Count, Key

BEAT_S = 0.2  # between two reports to the supervisor
SUPERVISOR = "supervisor"
OBSERVER = "observer"  # the supervisor's other socket, for looks at θ


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a learner sits in the run: its number and start, and how it reaches the others."""

    learner: int
    start: int
    mail: str  # the folder of the run's sockets
    descriptors: list[int]

    @property
    def others(self) -> list[int]:
        return [k for k in range(len(self.descriptors)) if k != self.learner]


class Exchanger(threading.Thread):
    """Started once; ends with `close`, after the exchange under way.

    `reached` is set once the run's step count is reached, as far as this learner has heard; `over` once the supervisor
    says that the run is over. `go` is set when training may begin; the run's seconds count from `zero`.
    """

    def __init__(
        self,
        place: Place,
        learner: Learner,
        post: Post,
        *,
        target_steps: int,
        report: Callable[[], dict[str, Any]],
        snapshot: Callable[[Tensor], Tensor] | None = None,
        counts: Callable[[], dict[Key, Count]] | None = None,
    ) -> None:
        """`snapshot` copies what others are to see into a given tensor, by default the learner's state; `counts` gives
        the step counts that a look sees with it."""
        super().__init__(name="exchange", daemon=True)
        self.go, self.over, self.reached = threading.Event(), threading.Event(), threading.Event()
        self.wake = threading.Event()  # set with `over` or `reached`
        self.stranded = threading.Event()  # SYNC: set when another learner was lost
        self.zero = time.monotonic()
        self.seam = threading.RLock()  # held while what `snapshot` and `counts` give is replaced
        layout = Layout(len(learner.state), learner.state.dtype)
        self.deadline_s = layout.deadline_s
        memory = Memory(place.descriptors[place.learner], layout)
        self._outbox = Outbox(memory, learner, 4 * self.deadline_s, snapshot)
        self._inbox = Inbox(place.descriptors, layout, learner.state.device)
        first = (place.start << 32) + 1  # numbers of an earlier start may still be under way
        self.exchange = Exchange(learner, first=first, snapshot=self._take, send=self._send)
        self._learner = learner
        self._post = post
        self._place = place
        self._target_steps = target_steps
        self._report = report
        self._counts = counts or learner.progress.counts
        self._wanted: tuple[type[Message], tuple[int, ...], int] | None = None  # what, of whom, at which own step
        self._next: list[int] = []  # whom to ask after the exchange under way
        self._step = 0  # at which these were wanted
        self._news = False
        self._closing = False
        self._idle = threading.Event()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._seen: Message | None = None  # the exchange under way when its deadline was set
        self._expires = 0.0
        self._next_beat = 0.0

    def meet(self, partners: Iterable[int]) -> None:
        """Open the partners' memories now, which takes long on a GPU. For before the thread starts."""
        for partner in partners:
            self._inbox.memory(partner)

    def want(self, *partners: int) -> None:
        """Exchange with the first of `partners` soon, unless an exchange is under way, and with the others one after
        the other, until one is busy or `want` is called again. Returns at once."""
        self._wanted = (Request, partners, self._learner.steps)
        os.eventfd_write(self._bell, 1)

    def fetch(self, partner: int) -> bool:
        """Wait for the partner's model and take it over; False if it does not give one. For before training."""
        self._idle.clear()
        self._wanted = (Copy, (partner,), 0)
        os.eventfd_write(self._bell, 1)
        self._idle.wait(2 * self.deadline_s)
        return not self.exchange.lost

    def spread(self, *, everybody: bool) -> None:
        """Tell the supervisor how things stand and the others the step counts, because training has ended."""
        self._news = everybody
        self._next_beat = 0.0
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Refuse new exchanges, complete the one under way, end."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self.join()
        os.close(self._bell)

    def leave(self) -> int:
        """Put the last model where the supervisor finds it: into the slot that is returned. After `close`."""
        while not self._outbox.free:  # partners may still read what they were sent
            time.sleep(0.01)
        self._outbox.take()
        return self._outbox.slot

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._post, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        try:
            while not self._closing or self.exchange.occupied:
                self._turn(poll)
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # a learner that cannot exchange is no learner: the supervisor starts another

    def _turn(self, poll: select.poll) -> None:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * self._patience())}
        if self._bell in ready:
            os.eventfd_read(self._bell)
            self._begin()
        if self._post.fileno() in ready:
            for data in self._post.receive():
                self._handle(decode(data))
        self._keep_time()
        while self._next and not self.exchange.occupied:
            self._ask(Request, self._next.pop(0))

    def _begin(self) -> None:
        wanted, self._wanted = self._wanted, None
        if self._news:
            self._news = False
            self._tell_everybody()
        if wanted is not None:
            kind, (first, *self._next), self._step = wanted
            self._ask(kind, first)

    def _ask(self, kind: type[Message], partner: int) -> None:
        if self._closing or not self._outbox.free:
            return
        message = self.exchange.ask(partner, self._step) if kind is Request else self.exchange.catch_up(partner)
        if message is not None and not self._post.send(str(partner), encode(message)):
            self.exchange.expire()  # nobody is there
            self._idle.set()

    def _handle(self, datagram: Datagram) -> None:
        message = datagram.message
        if message is None:
            self._obey(json.loads(datagram.note))
        elif type(message) is Message:
            self._learner.progress.merge(message.progress)
        else:
            self._receive(message, datagram)
        if self._learner.progress.total >= self._target_steps:
            self.reached.set()
            self.wake.set()

    def _receive(self, message: Message, datagram: Datagram) -> None:
        opened: Message | None = message
        if datagram.slot != NO_SLOT:
            opened = self._inbox.open(message, datagram.slot, datagram.sequence)
        if opened is None:
            self.exchange.tally.ignored += 1
            return
        if isinstance(message, Busy):
            self._next.clear()  # learners that ask again at once could all be busy for ever
        # one slot stays for the commit of an exchange that was begun
        self.exchange.shut = self._closing or len(self._outbox.free) <= isinstance(message, Copy)
        reply = self.exchange.receive(opened)
        self._outbox.memory.open = isinstance(self.exchange.current, Answer)
        if datagram.slot != NO_SLOT:
            self._inbox.memory(message.sender).release(datagram.slot, datagram.sequence)
        if isinstance(reply, Answer):
            self._outbox.kept = self._outbox.slot
        if reply is not None and not self._deliver(reply) and isinstance(reply, Answer):
            self.exchange.current = None  # the initiator is gone and knows of nothing
            self._outbox.memory.open = False
        if not isinstance(self.exchange.current, Answer):
            self._outbox.kept = NO_SLOT
        if not self.exchange.occupied:
            self._idle.set()

    def _take(self) -> Tensor:
        return self._outbox.take()

    def _send(self, commit: Message) -> bool:
        """The commit, before this side mixes: if the learner dies now, that leaves a half-exchange."""
        self._outbox.memory.open = True
        return self._deliver(commit)

    def _deliver(self, message: Message) -> bool:
        if message.snapshot is None:
            return self._post.send(str(message.receiver), encode(message))
        slot = self._outbox.slot
        delivered = self._post.send(str(message.receiver), encode(message, slot, self._outbox.memory.sequence(slot)))
        if not delivered:
            self._outbox.take_back()
        return delivered

    def _tell_everybody(self) -> None:
        me, counts = self._place.learner, self._learner.progress.counts()
        for other in self._place.others:
            news = Message(sender=me, receiver=other, initiator=me, number=0, progress=counts)
            self._post.send(str(other), encode(news))

    def _obey(self, note: dict[str, Any]) -> None:
        if note["do"] == "go":
            self.zero = note["zero"]
            self.go.set()
        elif note["do"] == "over":
            if note.get("lost"):
                self.stranded.set()
            self.over.set()
            self.wake.set()
            self.go.set()
        elif note["do"] == "show":
            self._show(note["number"])

    def _show(self, number: int) -> None:
        """A snapshot for a look at θ. This is no exchange: nothing is mixed, and nothing is counted."""
        me, outbox = self._place.learner, self._outbox
        room = len(outbox.free) >= 2  # one stays for a commit, as above
        kind = Model if room and not self._closing and not self.exchange.lost else Busy
        with self.seam:
            reply = kind(sender=me, receiver=me, initiator=me, number=number, progress=self._counts())
            if kind is Model:
                outbox.take()
        if kind is Busy:
            self._post.send(OBSERVER, encode(reply))
        elif not self._post.send(OBSERVER, encode(reply, outbox.slot, outbox.memory.sequence(outbox.slot))):
            outbox.take_back()

    def _patience(self) -> float:
        """Seconds until something is due."""
        due = self._next_beat if self._seen is None else min(self._next_beat, self._expires)
        return max(0.0, due - time.monotonic())

    def _keep_time(self) -> None:
        now, current = time.monotonic(), self.exchange.current
        if current is not self._seen:
            # the responder waits longer, so that it does not give up on a commit that is under way
            self._expires = now + self.deadline_s * (2 if isinstance(current, Answer) else 1)
            self._seen = current
        elif current is not None and now > self._expires:
            self.exchange.expire()
            self._outbox.memory.open = False
            self._outbox.kept = NO_SLOT
            self._seen = None
            self._idle.set()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._post.send(SUPERVISOR, json.dumps(self._report()).encode())
