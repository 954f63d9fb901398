"""What a person sees while learners train, in every engine: on a terminal a bar with the time left and a row per
learner, elsewhere plain lines. All of it on standard error, and nothing wider than the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adp2sgd.cli.view import fitting, plain_table, quality

if TYPE_CHECKING:
    from adp2sgd.engine.status import LearnerStatus, RunStatus

COLUMNS = ("learner", "state", "steps", "steps/s", "staleness", "exchanges", "busy", "held-out", "ε spent")
DISPENSABLE = ("busy", "exchanges", "staleness", "steps/s", "held-out")  # where the terminal is too narrow
REDRAW_S = 0.25
LINE_S = 10.0  # between two plain lines, unless a tenth of the run has passed
AROUND = 7  # lines of the terminal that are not learners' rows

Show = Callable[["RunStatus"], None]


@contextmanager
def watching(head: str, *, quiet: bool = False) -> Iterator[Show]:
    """Yields what an engine is to call with its status. `head`: the run in a few words."""
    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif not console.is_terminal:
        yield Lines(head, console)
    else:
        preparing = f"{head} · preparing data, model and checks"
        with Live(preparing, console=console, transient=True, auto_refresh=False) as live:
            live.refresh()
            yield Screen(head, live)


class Pace:
    """How long a run will still take, from the steps since it was first seen."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def left(self, run: RunStatus) -> float | None:
        """Seconds of real time; None while nothing can be said."""
        now = time.monotonic()
        if self._began is None:
            self._began = now, run.global_steps
        done = run.global_steps - self._began[1]
        if done <= 0 or now - self._began[0] < 1:
            return None
        return (run.target_steps - run.global_steps) * (now - self._began[0]) / done


def duration(seconds: float) -> str:
    """A duration as a person says it: 42 s, 5 min, 3.1 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Screen:
    """Redraws the terminal at most every REDRAW_S seconds."""

    def __init__(self, head: str, live: Live) -> None:
        self._head, self._live, self._pace, self._next = head, live, Pace(), 0.0

    def __call__(self, run: RunStatus) -> None:
        left = self._pace.left(run)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_S
            self._live.update(picture(self._head, run, left, self._live.console), refresh=True)


class Lines:
    """A line at each tenth of the run, and at least every LINE_S seconds; notes as they come."""

    def __init__(self, head: str, console: Console) -> None:
        self._head, self._console, self._pace = head, console, Pace()
        self._tenth, self._next, self._told = -1, 0.0, 0

    def __call__(self, run: RunStatus) -> None:
        for note in run.notes[self._told :]:
            self._say(f"note: {note}")
        self._told = len(run.notes)
        left, tenth = self._pace.left(run), 10 * run.global_steps // run.target_steps
        if tenth != self._tenth or time.monotonic() > self._next:
            self._tenth, self._next = tenth, time.monotonic() + LINE_S
            self._say(headline(self._head, run, left))

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def headline(head: str, run: RunStatus, left: float | None) -> str:
    """The run in one line."""
    clock = " virtual" if run.clock == "virtual" else ""
    parts = [head, f"epoch {run.epoch:.1f}/{run.epochs:g}", f"{run.seconds:,.1f} s{clock}"]
    if run.rate:
        parts.append(f"{run.rate:,.1f} steps/s")
    states = [each.state for each in run.learners]
    parts.append(", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states)))
    if run.point is not None:
        parts.append(f"θ at epoch {run.point.epoch:.1f}: {quality(run.point.accuracy, run.point.loss)}")
    if left is not None:
        parts.append(f"about {duration(left)} left")
    return " · ".join(filter(None, parts))


def picture(head: str, run: RunStatus, left: float | None, console: Console) -> RenderableType:
    """The whole screen: the run in a line, a bar with the time left, and the learners."""
    done = min(1.0, run.global_steps / run.target_steps)
    end = f" {done:4.0%}" + ("" if left is None else f" · about {duration(left)} left")
    bar = Table.grid(expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(ProgressBar(total=run.target_steps, completed=run.global_steps), end)
    return Group(Text(headline(head, run, None)), bar, table(run, console.width, console.height - AROUND))


def table(run: RunStatus, width: int, height: int) -> RenderableType:
    """One row per learner, as many as `height` lines hold, with the columns that `width` holds."""
    shown = run.learners if len(run.learners) <= height else run.learners[: max(1, height - 1)]
    cells = [row(each) for each in shown]
    told = [place for place, column in enumerate(zip(*cells, strict=True)) if not place or any(column)]
    names, cells = [COLUMNS[place] for place in told], [tuple(each[place] for place in told) for each in cells]
    kept = fitting(names, cells, width, DISPENSABLE)
    lines = [[each[place] for place in kept] for each in cells]
    rows = plain_table([names[place] for place in kept], lines, left=("learner", "state"))
    more = len(run.learners) - len(shown)
    return Group(rows, Text(f" and {more:,} more learners")) if more else rows


def row(status: LearnerStatus) -> tuple[str, ...]:
    """A learner's cells, in the order of COLUMNS."""
    counters = status.counters
    loss, accuracy = status.loss, status.accuracy
    held_out = "" if loss is None else f"{loss:.3f}" + ("" if accuracy is None else f" {accuracy:.1%}")
    spent = ""
    if status.drawn is not None:
        spent = "–" if status.epsilon_spent is None else f"{status.epsilon_spent:.2f}"
        spent += "" if status.epsilon is None else f" of {status.epsilon:.2f}"
    return (
        status.name,
        "averaging only" if status.state == "averaging" else status.state,
        f"{counters.steps:,}",
        f"{status.rate:.1f}" if status.rate else "",
        f"{counters.staleness_mean:.1f}",
        f"{counters.exchanges:,}",
        f"{counters.busy:,}",
        held_out,
        spent,
    )
