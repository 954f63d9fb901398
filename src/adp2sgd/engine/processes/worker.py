"""A learner's process under a supervisor: exchanges go through shared memory, reports through a socket of its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from adp2sgd.engine.compute import Compute
from adp2sgd.engine.processes.control import Control, Place, last_words
from adp2sgd.engine.site import Site
from adp2sgd.engine.worker import Worker
from adp2sgd.exchange.protocol import Exchange
from adp2sgd.exchange.shared import Post, SharedCarrier
from adp2sgd.progress import Count, Key, to_rows
from adp2sgd.run_folder import Folder


class ProcessWorker(Worker):
    """One learner of `train`, for ADPSGD."""

    place: Place
    control: Control
    carrier: SharedCarrier

    def __init__(
        self,
        site: Site,
        compute: Compute,
        folder: Folder,
        place: Place,
        posts: tuple[Post, Post],
        order: dict[str, Any],
    ) -> None:
        """`posts`: the learner's sockets, for other learners and for the supervisor."""
        self.posts = posts
        super().__init__(site, compute, folder, place, mode=order["mode"], exchanging=order["exchange"])

    def connect(self) -> None:
        mail, line = self.posts
        self.carrier = SharedCarrier(
            self.learner, mail, self.place.descriptors, snapshot=self.snapshot, shown=self.evaluated
        )
        self.exchange = Exchange(self.learner, self.carrier, first=self.first_number)
        self.control = Control(line, report=self.report, show=self.show, on_over=self.wake.set)

    def meet(self) -> None:
        if self.compute.device.type == "cuda":
            for partner in self.plan.graph.neighbours[self.place.learner]:
                self.carrier.meet(partner)

    def show(self) -> tuple[int, dict[Key, Count]] | None:
        """Put the model where the supervisor finds it."""
        if self.exchange.lost:
            return None
        with self.seam:
            return self.carrier.show(), self.counts()

    def rest(self) -> None:
        self.carrier.show()
        status, total = self.report()
        report = {"status": asdict(status), "total": total, "counts": to_rows(self.learner.progress.counts())}
        last_words(self.posts[1], report, self.folder.learner(self.place.learner))
