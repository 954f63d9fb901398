"""What directs a site's worker in place of a supervisor: it may begin at once, and ends when its people say so.

The thread also writes the status, passes on rosters, and keeps the curve of held-out figures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.engine.status import RunStatus
from adp2sgd.errors import StopRun
from adp2sgd.metrics import Figures
from adp2sgd.run_folder import Point

if TYPE_CHECKING:
    from adp2sgd.engine.peers.worker import SiteWorker

BEAT_S = 0.25
MEMBERSHIP_S = 1.0  # between two looks at roster and revocations


class SiteDirection(threading.Thread):
    """Beats a few times a second, from the first thread that starts until `close`.

    `stopped` says why a callback ended the run. `failure` is the first other error of a callback or of this thread.
    Each of them ends the run; the main thread raises `failure`.
    """

    def __init__(self, worker: SiteWorker, interrupt: Interrupt, on_status: Callable[[RunStatus], None]) -> None:
        super().__init__(name="direction", daemon=True)
        self.go, self.over = threading.Event(), threading.Event()
        self.go.set()
        self.zero = time.monotonic() - worker.session.seconds
        self._worker, self._interrupt, self._on_status = worker, interrupt, on_status
        self.stopped: str | None = None
        self.failure: Exception | None = None
        self._closing = threading.Event()
        self._mutex = threading.Lock()
        self._looked_at = 0.0
        self._seen: Figures | None = None

    def beat(self) -> None:
        with self._mutex:
            self._guarded(self._report)

    def run(self) -> None:
        while not self._closing.wait(BEAT_S):
            if self._interrupt.requested:
                self._end()
            now = time.monotonic()
            if now - self._looked_at > MEMBERSHIP_S:
                self._looked_at = now
                self._guarded(self._worker.membership.look)
            self.beat()

    def close(self) -> None:
        self._closing.set()
        self.join()
        self.beat()
        self._worker.attendance.close()

    def _guarded(self, act: Callable[[], None]) -> None:
        """An error must not end this thread: it also hears of interrupts and revocations."""
        try:
            act()
        except StopRun as stop:
            if self.stopped is None and not self._worker.reached.is_set():  # a run that is complete was not stopped
                self.stopped = str(stop) or "no reason given"
            self._end()
        except Exception as error:
            self.failure = self.failure or error
            self._end()

    def _end(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self._worker.wake.set()

    def _report(self) -> None:
        self._keep_curve()
        self._on_status(self._worker.attendance.status())

    def _keep_curve(self) -> None:
        metrics = self._worker.background.metrics
        if not metrics or metrics is self._seen:
            return
        self._seen, plan = metrics, self._worker.plan
        steps = self._worker.learner.progress.total
        point = Point(
            global_steps=steps,
            epoch=plan.epoch(steps),
            seconds=time.monotonic() - self.zero,
            metrics=metrics,
            consensus=self._worker.settling.consensus,
            learners=1,
        )
        self._worker.attendance.curve.append(point)
        self._worker.folder.append_point(point)
