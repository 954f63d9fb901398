"""One site's learner among its peers: the common worker, over TLS links. At the end it settles with neighbours."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adp2sgd.config import Config
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.engine.peers.attendance import WAITING, Attendance
from adp2sgd.engine.peers.direction import SiteDirection
from adp2sgd.engine.peers.introduction import Introduction, stated_epsilon
from adp2sgd.engine.peers.membership import Membership
from adp2sgd.engine.peers.session import Session
from adp2sgd.engine.peers.settle import Settling
from adp2sgd.engine.site import Site
from adp2sgd.engine.status import PublicStatus, RunStatus
from adp2sgd.engine.worker import LINGER_S, LOOK_AROUND_S, Worker
from adp2sgd.exchange.duplex import DuplexExchange
from adp2sgd.exchange.handshake import Address
from adp2sgd.exchange.network import NetworkCarrier
from adp2sgd.identity.credentials import Credentials
from adp2sgd.run_folder import Folder

MEET_FRESH_S = 2.0  # how long a new site waits for a neighbour that may be ahead of it
MEET_AGAIN_S = 10.0  # how long a site that comes back waits for a neighbour before it uses its own checkpoint
COPY_S = 10.0  # how long it asks those that are there
ALONE_S = 30.0  # how long a site that may not step any more waits for neighbours that it has lost
WIRES = {"float32": None, "bfloat16": torch.bfloat16}  # None: as the model


@dataclass(frozen=True, kw_only=True)
class Place:
    """`others`: the site's neighbours, who are all that it has links with."""

    learner: int
    start: int
    others: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """Under which a site takes part."""

    run: Config  # as in run.toml, without anything of this site
    credentials: Credentials
    model: dict[str, str]  # `model_facts` at the initial weights
    listen: tuple[Address, ...]
    alone: bool = False  # a private run may begin before a neighbour is met


class SiteWorker(Worker):
    """`met_at` tells when each neighbour was last exchanged with (monotonic seconds)."""

    carrier: NetworkCarrier
    control: SiteDirection

    def __init__(
        self,
        site: Site,
        compute: Compute,
        folder: Folder,
        terms: Terms,
        session: Session,
        *,
        interrupt: Interrupt,
        on_status: Callable[[RunStatus], None],
    ) -> None:
        self.terms, self.session = terms, session
        self._interrupt, self._on_status = interrupt, on_status
        self.settling = Settling(terms.run.consortium.tolerance)
        self.met_at: dict[int, float] = {}
        edges = site.plan.graph.edges
        others = sorted({i + j - site.number for i, j in edges if site.number in (i, j)})
        place = Place(learner=site.number, start=session.start, others=others)
        super().__init__(site, compute, folder, place, mode="comeback" if session.start else "fresh")

    def connect(self) -> None:
        terms, me = self.terms, self.place.learner
        self.introduction = Introduction(
            terms.credentials, terms.run, terms.model, self.learner.progress, self._public_status
        )
        self.attendance = Attendance(self, terms.credentials.roster.names)
        self.carrier = NetworkCarrier(
            self.learner, me, self.introduction,
            listen=terms.listen, dtype=WIRES[terms.run.consortium.wire], on_event=self.attendance.note,
        )  # fmt: skip
        self.membership = Membership(terms.credentials, self.introduction, self.carrier, me, set(self.place.others))
        self.exchange = DuplexExchange(self.learner, self.carrier, first=self.first_number)
        self.exchange.watch = self._watch_exchange
        self.control = SiteDirection(self, self._interrupt, self._on_status)

    @property
    def linked(self) -> list[int]:
        """The neighbours that can be reached now."""
        return [each.peer.number for each in self.carrier.status() if each.up]

    @property
    def linger_s(self) -> float:
        return LINGER_S if self.linked or not self._expected else ALONE_S

    @property
    def _expected(self) -> list[int]:
        """Neighbours that came, have not stopped, and may come back."""
        came = self.attendance.came
        return [k for k in self.place.others if k in came and not self.learner.progress.stopped(k)]

    def wait_for_the_others(self) -> None:
        """Settle: only average, until neighbours are close; keep answering until nobody asks."""
        self.state = "settling"
        self.settling.begin()
        turn = 0
        while not self.control.over.wait(LOOK_AROUND_S / 4):
            self._look_around()
            linked = self.linked
            deadline_s = max((self.carrier.deadline_s(each) for each in linked), default=ALONE_S / 10)
            waits = bool(self._expected) and not linked
            if self._quiet_for(0.0) and self.settling.over(linked, deadline_s, waits=waits):
                return
            wanted = self.settling.open(linked)
            if wanted and not self.exchange.occupied:
                self.exchanges.want(wanted[turn % len(wanted)])
                turn += 1

    def find_model(self) -> None:
        """A site that comes back, or comes late, copies a neighbour's model first. The counts of its checkpoint hold in
        any case."""
        self._wait_for_the_first()
        if self.mode == "fresh":
            self._wait_for_links(MEET_FRESH_S)
            if self.learner.progress.total and self.linked:
                self._copy_late()
            return
        saved = learner_checkpoint.load(self.folder, self.place.learner)
        if saved is not None and saved.tensors:
            self.learner.progress.restore(saved.counts)
        self._wait_for_links(MEET_AGAIN_S)
        super().find_model()

    def rest(self) -> None:
        self.control.beat()

    def _public_status(self) -> PublicStatus:
        budget, stopped = self.learner.budget, self.learner.progress.stopped(self.place.learner)
        if budget is None:
            return PublicStatus(site=self.terms.credentials.name, stopped=stopped)
        policy, run = budget.plan.policy, self.terms.run
        epsilon = policy.epsilon
        if epsilon != self.config.privacy.epsilon:  # that one was chosen, and tells nothing of the records
            epsilon = stated_epsilon(epsilon, run.consortium.epsilon)
        return PublicStatus(site=self.terms.credentials.name, stopped=stopped, epsilon=epsilon, delta=policy.delta)

    def _copy_late(self) -> None:
        self.exchange.lost = True
        if self._copy_from_somebody():
            self.notes.append(f"came when others had taken {self.learner.progress.total:,} steps, and copied a model")
        self.exchange.lost = False

    def _copy_from_somebody(self) -> bool:
        """Neighbours may be busy, and those that come back themselves have no model to give."""
        end = time.monotonic() + COPY_S
        while (linked := self.linked) and time.monotonic() < end and not self.control.over.wait(0.02):
            random.shuffle(linked)
            if any(self.exchanges.fetch(other) for other in linked):
                return True
        return False

    def _wait_for_the_first(self) -> None:
        """A private run that has no step yet spends nothing before it has met a neighbour: started first and alone, a
        site would spend its whole ε on a model of its own."""
        budget = self.learner.budget
        if budget is None or budget.steps or self.terms.alone:
            return
        before, self.state = self.state, WAITING
        self._wait_for_links(math.inf)
        self.state = before

    def _wait_for_links(self, seconds: float) -> None:
        """Until one neighbour is there; not at all without neighbours."""
        end = time.monotonic() + seconds
        while self.place.others and not self.linked and time.monotonic() < end:
            if self.control.over.wait(0.02):
                return

    def _watch_exchange(self, partner: int, mine: Tensor, theirs: Tensor) -> None:
        self.met_at[partner] = time.monotonic()
        self.settling.note(partner, mine, theirs)
