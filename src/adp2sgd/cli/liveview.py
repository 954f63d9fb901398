"""What a person sees while real learners train: a table per learner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from adp2sgd.engine.status import LearnerStatus, RunStatus

COLUMNS = ("learner", "state", "steps", "steps/s", "staleness", "exchanges", "busy", "held-out", "ε spent")
REDRAW_S = 0.25
LINE_S = 10.0  # between two plain lines, unless a tenth of the run has passed


@contextmanager
def watching(quiet: bool = False) -> Iterator[Callable[[RunStatus], None]]:
    """Yields what `train` is to call with its status; shows on standard error."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif not console.is_terminal:
        yield _Lines(console.print)
    else:
        with Live("preparing data, model and checks", console=console, transient=True, auto_refresh=False) as live:
            yield _Redrawing(live.update)


class _Redrawing:
    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self._next = 0.0

    def __call__(self, run: RunStatus) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_S
            self._update(table(run), refresh=True)


class _Lines:
    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._tenth = -1
        self._next = 0.0
        self._told = 0

    def __call__(self, run: RunStatus) -> None:
        for note in run.notes[self._told :]:
            self._say(f"note: {note}", highlight=False, soft_wrap=True)
        self._told = len(run.notes)
        tenth = 10 * run.global_steps // run.target_steps
        if tenth != self._tenth or time.monotonic() > self._next:
            self._tenth, self._next = tenth, time.monotonic() + LINE_S
            self._say(headline(run), highlight=False, soft_wrap=True)


def headline(run: RunStatus) -> str:
    """The run in one line."""
    states = [each.state for each in run.learners]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    line = (
        f"{run.task} {run.algorithm} · epoch {run.epoch:.1f}/{run.epochs:g} · {run.seconds:,.1f} s · "
        f"{run.rate:,.1f} steps/s · {counts}"
    )
    if run.point is not None:
        loss, accuracy = run.point.loss, run.point.accuracy
        found = "not evaluated" if loss is None else f"loss {loss:.4f}"
        found = found if accuracy is None else f"accuracy {accuracy:.1%}"
        line += f" · θ at epoch {run.point.epoch:.1f}: {found}"
    return line


def table(run: RunStatus) -> Table:
    """One row per learner."""
    from rich.table import Table

    shown = Table(title=headline(run), title_justify="left")
    for position, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if position < 2 else "right")
    for each in run.learners:
        shown.add_row(*row(each))
    return shown


def row(status: LearnerStatus) -> tuple[str, ...]:
    """A learner's cells, in the order of COLUMNS."""
    counters = status.counters
    state = "averaging only" if status.state == "averaging" else status.state
    loss, accuracy = status.loss, status.accuracy
    quality = "" if loss is None else f"{loss:.3f}" + ("" if accuracy is None else f" {accuracy:.1%}")
    spent = "" if status.epsilon_spent is None else f"{status.epsilon_spent:.2f} of {status.epsilon:.2f}"
    return (
        " ".join(filter(None, (str(status.learner), status.site))),
        state,
        f"{counters.steps:,}",
        f"{status.rate:.1f}",
        f"{counters.staleness_mean:.1f}",
        f"{counters.exchanges:,}",
        f"{counters.busy:,}",
        quality,
        spent,
    )
