"""What a person sees in the terminal: progress on standard error, figures on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adp2sgd.files import to_json

if TYPE_CHECKING:  # tables of figures need no PyTorch, which takes seconds to load
    from adp2sgd.config import Config
    from adp2sgd.run_folder import LearnerResult, Run


def waiting(what: str = "loading PyTorch", quiet: bool = False) -> AbstractContextManager[object]:
    """A turning sign while something takes seconds; nothing if not on a terminal."""
    return Console(stderr=True, quiet=quiet).status(what)


def quality(accuracy: float | None, loss: float | None) -> str:
    if accuracy is not None:
        return f"accuracy {accuracy:.1%}"
    return "not evaluated" if loss is None else f"loss {loss:.4f}"


def named(config: Config, label: str | None = None) -> str:
    """A run in a few words."""
    count = f"{config.learners:,} learner{'s' if config.learners != 1 else ''}"
    return f"{label or f'{config.task} {config.algorithm}'}, {count}"


def note(text: str) -> None:
    """A remark beside the result, on standard error."""
    Console(stderr=True).print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    print(to_json(value, indent=1))


def say(text: str) -> None:
    """A line on standard output. A terminal gets it broken between words, a pipe as it is."""
    console = Console()
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = (),
    dispensable: Sequence[str] = (),
) -> None:
    """A table on standard output; figures to the right, the first column and those named in `left` to the left.

    On a terminal that is too narrow the `dispensable` columns are left out, the first ones first. Where that is not
    enough, cells go on in the next line.
    """
    console, rows = Console(), [list(row) for row in rows]
    if not console.is_terminal:
        console.width = 160
    kept = fitting(columns, rows, console.width, dispensable)
    shown = [[row[place] for place in kept] for row in rows]
    names = [columns[place] for place in kept]
    console.print(plain_table(names, shown, left=(columns[0], *left), title=title))


SPACING = 3  # characters between two columns of a table


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, dispensable: Sequence[str]) -> list[int]:
    """The places of those columns that `width` characters hold; of all others the first `dispensable` go first."""
    kept = list(range(len(columns)))
    sizes = [max(text_width(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    for name in dispensable:
        if sum(sizes[place] + SPACING for place in kept) - SPACING <= width:
            break
        kept = [place for place in kept if columns[place] != name]
    return kept


def plain_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str], title: str | None = None
) -> Table:
    """Columns with a line under their names."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def text_width(text: str) -> int:
    """Columns of a terminal that the text takes."""
    return int(cell_len(text))


def print_run(run: Run) -> None:
    """A run's result: one line for the whole, one row per learner, and what its privacy is worth."""
    say(
        f"{run.task} {run.algorithm}: {quality(run.accuracy, run.loss)} after {run.epochs:.4g} epochs "
        f"({run.global_steps:,} steps) in {run.seconds:,.1f} s ({run.clock}); consensus {run.consensus:.3g}"
    )
    measured = "loss" if run.accuracy is None else "accuracy"
    columns = ["learner", "steps", "share", "staleness", "exchanges", "busy", measured]
    private = any(each.epsilon is not None for each in run.learners)
    rows = []
    for each in run.learners[:32]:
        row = [each.name, f"{each.steps:,}", f"{each.share:.1%}"]
        row += [f"{each.staleness_mean:.1f} / {each.staleness_max}", f"{each.exchanges:,}", f"{each.busy:,}"]
        row += [quality(each.accuracy, each.loss).removeprefix(f"{measured} ")]
        row += [epsilon(each)] if private else []
        rows.append(row)
    more = len(run.learners) - len(rows)
    title = "learners; staleness: mean / max" + (f" (and {more} more in result.json)" if more else "")
    table(title, columns + ["ε"] * private, rows, dispensable=("busy", "share", "exchanges", "staleness"))
    for site, figures in run.sites.items():
        how = quality(figures.get("accuracy"), figures.get("loss"))
        say(f"site {site}: {how} on {figures['records']} held-out records")
    say(privacy_line(run))
    for note in run.notes:
        say(f"note: {note}")
    if run.folder:
        say(f"folder: {run.folder}")


def epsilon(learner: LearnerResult) -> str:
    """What a learner has spent of its budget; a ledger may have become unreadable."""
    if learner.epsilon is None or learner.epsilon_spent is None:
        return "unknown"
    return f"{learner.epsilon_spent:.2f} of {learner.epsilon:.2f}"


def privacy_line(run: Run) -> str:
    """The guarantee in words, or why there is none."""
    return f"guarantee: none ({run.guarantee_why})" if run.guarantee is None else f"guarantee: {run.guarantee}"
