"""What directs a site survives its callbacks; a private site waits for a first neighbour."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from adp2sgd.engine.interrupt import Interrupt
from adp2sgd.engine.peers.direction import SiteDirection
from adp2sgd.engine.peers.worker import SiteWorker
from adp2sgd.errors import StopRun


def directed(error: Exception) -> tuple[SiteDirection, list[int]]:
    """A direction whose callback raises `error` at every status, and its looks at the membership."""
    looks: list[int] = []

    def on_status(_: Any) -> None:
        raise error

    worker: Any = SimpleNamespace(
        session=SimpleNamespace(seconds=0.0), wake=threading.Event(), reached=threading.Event(),
        membership=SimpleNamespace(look=lambda: looks.append(1)), background=SimpleNamespace(metrics={}),
        attendance=SimpleNamespace(status=lambda: None, close=lambda: None),
    )  # fmt: skip
    return SiteDirection(worker, Interrupt(), on_status), looks


@pytest.mark.parametrize("error", [StopRun("enough"), ValueError("a fault of the callback")])
def test_a_callback_that_raises_ends_the_run_but_not_the_direction(error: Exception) -> None:
    control, looks = directed(error)
    control.start()
    assert control.over.wait(5)
    assert control.is_alive()
    seen = len(looks)
    threading.Event().wait(1.5)
    assert len(looks) > seen, "revocations are looked at until the end"
    control.close()
    assert control.stopped == ("enough" if isinstance(error, StopRun) else None)
    assert control.failure is (None if isinstance(error, StopRun) else error)


@pytest.mark.parametrize(
    ("steps", "alone", "waits"), [(0, False, True), (0, True, False), (7, False, False), (None, False, False)]
)
def test_only_a_private_run_without_a_step_waits(steps: int | None, alone: bool, waits: bool) -> None:
    waited: list[str] = []
    budget = None if steps is None else SimpleNamespace(steps=steps)
    worker: Any = SimpleNamespace(
        learner=SimpleNamespace(budget=budget), terms=SimpleNamespace(alone=alone), state="starting"
    )
    worker._wait_for_links = lambda _: waited.append(worker.state)
    SiteWorker._wait_for_the_first(worker)
    assert waited == (["waiting for a first neighbour"] if waits else [])
    assert worker.state == "starting"
