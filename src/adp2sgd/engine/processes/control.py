"""A learner's connection to its supervisor: it reports five times a second, follows orders and shows its model.

The line is apart from the exchange with other learners. The socket and the slot that it uses are its own.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adp2sgd.engine.status import LearnerStatus
from adp2sgd.exchange.shared import Post
from adp2sgd.files import replacing
from adp2sgd.progress import Count, Key, to_rows

BEAT_S = 0.2  # between two reports to the supervisor
LAST_WORDS_S = 2.0  # how long a report that must arrive is repeated, before it is left in a file
LAST_WORDS = "last_words.json"
SUPERVISOR = "supervisor"
OBSERVER = "observer"  # the supervisor's other socket, for looks at θ


def line_of(learner: int) -> str:
    """The name of the socket that a learner listens to its supervisor on."""
    return f"control-{learner}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a learner sits in the run: its number and start, and how it reaches the others."""

    learner: int
    start: int
    mail: str  # the folder of the run's sockets
    descriptors: list[int]  # of all learners' shared memories

    @property
    def others(self) -> list[int]:
        return [k for k in range(len(self.descriptors)) if k != self.learner]


def last_words(post: Post, report: dict[str, Any], folder: Path | None = None) -> None:
    """Send the supervisor a report that must arrive. If it does not listen, the report is left in `folder`."""
    end = time.monotonic() + LAST_WORDS_S
    while not post.send(SUPERVISOR, json.dumps(report).encode()):
        if time.monotonic() > end:
            if folder is not None:
                with suppress(OSError), replacing(folder / LAST_WORDS, private=True) as part:
                    part.write_text(json.dumps(report), encoding="utf-8")
            return
        time.sleep(0.01)


class Control(threading.Thread):
    """`go` is set when training may begin; the run's seconds count from `zero`. `over` is set when it must end."""

    def __init__(
        self,
        post: Post,
        *,
        report: Callable[[], tuple[LearnerStatus, int]],
        show: Callable[[], tuple[int, dict[Key, Count]] | None],
        on_over: Callable[[], None],
    ) -> None:
        """`report` gives the learner's status and the global count that it has heard; `show` puts its model where the
        supervisor finds it and gives the sequence number and the step counts behind it, or None if it has no model."""
        super().__init__(name="control", daemon=True)
        self.go, self.over = threading.Event(), threading.Event()
        self.stranded = threading.Event()  # SYNC: set when another learner was lost
        self.zero = time.monotonic()
        self._post = post
        self._report = report
        self._show = show
        self._on_over = on_over
        self._closing = False
        self._next_beat = 0.0

    def beat(self) -> None:
        """Report now; from any thread."""
        status, total = self._report()
        self._post.send(SUPERVISOR, json.dumps({"status": asdict(status), "total": total}).encode())

    def close(self) -> None:
        self._closing = True
        self.join()

    def run(self) -> None:
        while not self._closing:
            now = time.monotonic()
            if now >= self._next_beat:
                self._next_beat = now + BEAT_S
                self.beat()
            ready, _, _ = select.select([self._post], [], [], min(BEAT_S / 4, max(0.0, self._next_beat - now)))
            for sender, data in self._post.receive() if ready else ():
                if sender in (SUPERVISOR, OBSERVER):
                    self._obey(json.loads(data))

    def _obey(self, order: dict[str, Any]) -> None:
        if order["do"] == "go":
            self.zero = order["zero"]
            self.go.set()
        elif order["do"] == "over":
            if order["lost"]:
                self.stranded.set()
            self.over.set()
            self._on_over()
            self.go.set()
        elif order["do"] == "show":
            self._answer_look(order)

    def _answer_look(self, order: dict[str, Any]) -> None:
        """Show the model for evaluation. This is not an exchange: nothing is mixed or counted."""
        reply: dict[str, Any] = {"learner": order["learner"], "number": order["number"]}
        if (shown := self._show()) is not None:
            sequence, counts = shown
            reply |= {"sequence": sequence, "counts": to_rows(counts)}
        self._post.send(OBSERVER, json.dumps(reply).encode())
