"""What a person sees in the terminal: progress on standard error, figures on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from adp2sgd.config import Config
from adp2sgd.files import to_json

if TYPE_CHECKING:  # tables of figures need no PyTorch, which takes seconds to load
    from adp2sgd.engine.status import RunStatus
    from adp2sgd.run_folder import LearnerResult, Run


def waiting(what: str = "loading PyTorch", quiet: bool = False) -> AbstractContextManager[object]:
    """A turning sign while something takes seconds; nothing if not on a terminal."""
    return Console(stderr=True, quiet=quiet).status(what)


@contextmanager
def progress(config: Config, label: str | None = None, quiet: bool = False) -> Iterator[Callable[[RunStatus], None]]:
    """A bar with learners, epochs, virtual time and accuracy; plain lines at each tenth if not on a terminal."""
    console = Console(stderr=True)
    name = label or f"{config.task} {config.algorithm}"
    head = f"{name}, {config.learners} learner{'s' if config.learners != 1 else ''}"
    if quiet:
        yield lambda _: None
    elif not console.is_terminal:
        yield _plain_lines(console, head, config.epochs)
    else:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(f"{head} · preparing data, model and checks", total=None)
            yield lambda status: bar.update(
                task,
                completed=status.global_steps,
                total=status.target_steps,
                description=f"{head} · {_status(status, config.epochs)}",
            )


def _plain_lines(console: Console, head: str, epochs: float) -> Callable[[RunStatus], None]:
    shown: list[int] = []

    def show(status: RunStatus) -> None:
        tenth = 10 * status.global_steps // status.target_steps
        if tenth not in shown:
            shown.append(tenth)
            console.print(f"{head} · {_status(status, epochs)}", highlight=False, soft_wrap=True)

    return show


def _status(status: RunStatus, epochs: float) -> str:
    text = f"epoch {status.epoch:.1f}/{epochs:g} · {status.seconds:,.1f} s virtual"
    if status.point is not None:
        text += f" · {quality(status.point.accuracy, status.point.loss)}"
    return text


def quality(accuracy: float | None, loss: float | None) -> str:
    if accuracy is not None:
        return f"accuracy {accuracy:.1%}"
    return "not evaluated" if loss is None else f"loss {loss:.4f}"


def print_json(value: Any) -> None:
    print(to_json(value, indent=1))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on standard output; figures to the right, the first column to the left."""
    shown = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        shown.add_column(column, justify="right" if position else "left")
    for row in rows:
        shown.add_row(*map(escape, row))
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(shown)


def print_run(run: Run) -> None:
    """A run's result: one line for the whole, one row per learner, and what its privacy is worth."""
    print(
        f"{run.task} {run.algorithm}: {quality(run.accuracy, run.loss)} after {run.epochs:.4g} epochs "
        f"({run.global_steps:,} steps) in {run.seconds:,.1f} s ({run.clock}); consensus {run.consensus:.3g}"
    )
    columns = ["learner", "steps", "share", "staleness mean / max", "exchanges", "busy", "quality"]
    private = any(each.epsilon is not None for each in run.learners)
    rows = []
    for each in run.learners[:32]:
        row = [" ".join(filter(None, (str(each.learner), each.site))), f"{each.steps:,}", f"{each.share:.1%}"]
        row += [f"{each.staleness_mean:.1f} / {each.staleness_max}", f"{each.exchanges:,}", f"{each.busy:,}"]
        row += [quality(each.accuracy, each.loss)]
        row += [epsilon(each)] if private else []
        rows.append(row)
    more = len(run.learners) - len(rows)
    table("learners" + (f" (and {more} more in result.json)" if more else ""), columns + ["ε"] * private, rows)
    for site, figures in run.sites.items():
        how = quality(figures.get("accuracy"), figures.get("loss"))
        print(f"site {site}: {how} on {figures['records']} held-out records")
    print(privacy_line(run))
    for note in run.notes:
        print(f"note: {note}")
    if run.folder:
        print(f"record: {run.folder}")


def epsilon(learner: LearnerResult) -> str:
    """What a learner has spent of its budget; a ledger may have become unreadable."""
    if learner.epsilon is None or learner.epsilon_spent is None:
        return "unknown"
    return f"{learner.epsilon_spent:.2f} of {learner.epsilon:.2f}"


def privacy_line(run: Run) -> str:
    """The guarantee in words, or why there is none."""
    return f"guarantee: none ({run.guarantee_why})" if run.guarantee is None else f"guarantee: {run.guarantee}"
