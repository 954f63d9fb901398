"""What a person sees while real learners train: a table per learner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adp2sgd.engine.supervisor import Seat, Supervisor

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("learner", "state", "steps", "steps/s", "staleness", "exchanges", "busy", "held-out", "ε spent")
REDRAW_S = 0.25
LINE_S = 10.0  # between two plain lines, unless a tenth of the run has passed


@contextmanager
def watching(quiet: bool = False) -> Iterator[Callable[[Supervisor], None]]:
    """Yields what `train` is to call with its supervisor; shows on standard error."""
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
        self._spending = Spending()

    def __call__(self, supervisor: Supervisor) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_S
            self._update(table(supervisor, self._spending), refresh=True)


class _Lines:
    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._tenth = -1
        self._next = 0.0
        self._told = 0

    def __call__(self, supervisor: Supervisor) -> None:
        for note in supervisor.notes[self._told :]:
            self._say(f"note: {note}", highlight=False, soft_wrap=True)
        self._told = len(supervisor.notes)
        tenth = 10 * supervisor.global_steps // supervisor.setup.target_steps
        if tenth != self._tenth or time.monotonic() > self._next:
            self._tenth, self._next = tenth, time.monotonic() + LINE_S
            self._say(headline(supervisor), highlight=False, soft_wrap=True)


def headline(supervisor: Supervisor) -> str:
    """The run in one line."""
    setup = supervisor.setup
    states = [seat.state for seat in supervisor.seats]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    rate = sum(seat.status.get("rate", 0.0) for seat in supervisor.seats)
    line = (
        f"{setup.config.task} {setup.config.algorithm} · epoch {setup.epoch(supervisor.global_steps):.1f}/"
        f"{setup.config.epochs:g} · {supervisor.seconds:,.1f} s · {rate:,.1f} steps/s · {counts}"
    )
    if supervisor.curve:
        last = supervisor.curve[-1]
        found = "not evaluated" if last.loss is None else f"loss {last.loss:.4f}"
        found = found if last.accuracy is None else f"accuracy {last.accuracy:.1%}"
        line += f" · θ at epoch {last.epoch:.1f}: {found}"
    return line


class Spending:
    """ε spent, learner by learner. It takes a while to compute, so that it is brought up to date now and then."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._next = 0.0

    def __call__(self, supervisor: Supervisor, seat: Seat) -> str:
        began, drawn = time.monotonic(), seat.status.get("drawn")
        if supervisor.plans and drawn and began >= self._next:
            plan = supervisor.plans[seat.learner]
            spent, cap = plan.spent_after(drawn).epsilon, plan.spent_after(plan.max_steps).epsilon
            self._known[seat.learner] = f"{spent:.2f} of {cap:.2f}"
            self._next = time.monotonic() + 50 * (time.monotonic() - began)
        return self._known.get(seat.learner, "")


def table(supervisor: Supervisor, spending: Spending) -> Table:
    """One row per learner."""
    from rich.table import Table

    shown = Table(title=headline(supervisor), title_justify="left")
    for position, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if position < 2 else "right")
    for seat in supervisor.seats:
        shown.add_row(*row(seat), spending(supervisor, seat))
    return shown


def row(seat: Seat) -> tuple[str, ...]:
    """A learner's cells, in the order of COLUMNS, the last one apart."""
    totals, status = seat.totals, seat.status
    state = "averaging only" if seat.state == "averaging" else seat.state
    loss, accuracy = status.get("loss"), status.get("accuracy")
    quality = "" if loss is None else f"{loss:.3f}" + ("" if accuracy is None else f" {accuracy:.1%}")
    return (
        str(seat.learner),
        state,
        f"{totals['steps']:,}",
        f"{status.get('rate', 0.0):.1f}",
        f"{totals['staleness_total'] / max(1, totals['steps']):.1f}",
        f"{totals['exchanges']:,}",
        f"{totals['busy']:,}",
        quality,
    )
