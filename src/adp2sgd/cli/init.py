"""The command `init`: a table's header, or an image folder's tree → a complete configuration.

On a terminal it asks for what only a person knows. Nothing is fitted, and no value of a record is shown.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, TypeVar

import typer

from adp2sgd.cli.draft import Draft
from adp2sgd.errors import Adp2sgdError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from adp2sgd.data.survey import Columns

Answer = TypeVar("Answer")
LEAVE_OUT = "-"


def init(
    data: Annotated[Path, typer.Argument(help="A table, a folder with one table per site, or a folder of images.")],
    label: Annotated[Optional[str], typer.Option(help="The column that the model learns to predict.")] = None,  # noqa: UP045
    site: Annotated[Optional[str], typer.Option(help="The column that names the owner of each record.")] = None,  # noqa: UP045
    target: Annotated[Optional[str], typer.Option(help="class, or number for a measurement.")] = None,  # noqa: UP045
    epsilon: Annotated[float, typer.Option(help="The privacy budget of each site.")] = 3.0,
    out: Annotated[Optional[Path], typer.Option(help="The file to write (default: DATA's name with .toml).")] = None,  # noqa: UP045
) -> None:
    """Write a first configuration for data of your own.

    On a terminal you are asked for the ranges and categories that privacy needs. Elsewhere they are left open and
    marked in the file. They are never taken from the records.
    """
    from adp2sgd.cli import view

    path = out or Path(f"{data.resolve().stem}.toml")
    if path.exists():
        raise ConfigError(f"{path} exists already; give another file with --out")
    words = [str(data), *_flag("--label", label), *_flag("--site", site), *_flag("--target", target)]
    command = shlex.join(["adp2sgd", "init", *words])
    with view.waiting("looking at the data"):
        from adp2sgd.data import survey

        table = survey.is_table(data)
        found = survey.survey_table(data, site) if table else survey.survey_images(data)
    if isinstance(found, survey.Columns):
        draft = _of_table(command, data, found, label, site, target)
    else:
        if label or site or target:
            raise ConfigError("--label, --site and --target are for tables; the folders of images tell class and site")
        draft = _of_images(command, data, found)
    draft.epsilon = epsilon
    path.write_text(draft.text(str(path)), encoding="utf-8")
    _report(path, draft)


def _flag(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


def _report(path: Path, draft: Draft) -> None:
    from adp2sgd.cli import view

    view.say(f"wrote {path}: {draft.records:,} records, {len(draft.sites) or 'no'} sites")
    if draft.open:
        view.say(f"fill in {len(draft.open)} fields there that only you know: {', '.join(draft.open)}")
    view.say(f"then: adp2sgd check {path}, and adp2sgd train {path}")


def _of_table(
    command: str, data: Path, found: Columns, label: str | None, site: str | None, target: str | None
) -> Draft:
    label = label or _ask_label(list(found.kinds))
    if label not in found.kinds:
        raise ConfigError(
            f"--label {label} is none of the table's columns{did_you_mean(label, found.kinds)}; correct it"
        )
    if target not in (None, "class", "number"):
        raise ConfigError(f'--target "{target}" is unknown; use class or number')
    if site is None and not found.sites:
        found, site = _ask_site(data, found, label)
    number = target == "number" or (target is None and found.kinds[label] == "measurement")
    options: dict[str, object] = {"path": str(data), "label": label}
    options |= {"target": "number"} if number else {"classes": []}
    options |= {"site": site} if site else {}
    written = {name: getattr(found.written, name) for name in ("encoding", "date_format")}
    written["decimal"] = "," if found.written.decimal == "," else None
    options |= {name: value for name, value in written.items() if value is not None}
    draft = Draft(
        command=command, task="table/logistic", sites=found.sites, records=found.records, options=options,
        kinds=found.kinds,
    )  # fmt: skip
    ignored = [name for name, kind in found.kinds.items() if kind == "identifier" and name not in (label, site)]
    for name, kind in found.kinds.items():
        if name in (*ignored, site) or (name == label and not number):
            continue
        (draft.categories if kind == "text" and name != label else draft.ranges)[name] = []
    _fill_in(draft, ignored)
    options |= {"ignore": ignored} if ignored else {}
    return draft


def _of_images(command: str, data: Path, found: object) -> Draft:
    from adp2sgd.data.survey import Tree

    assert isinstance(found, Tree)
    options: dict[str, object] = {"folder": str(data), "classes": list(found.classes)}
    options |= {"sites": True} if found.sites else {}
    options |= {"size": [32, 32], "channels": 3}
    return Draft(command=command, task="images/cnn", sites=found.sites, records=found.images, options=options)


# ------------------------------------------------------------ questions, on a terminal only


def _interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(question: str, read: Callable[[str], Answer]) -> Answer:
    """Ask until `read` takes the answer."""
    while True:
        answer = typer.prompt(question, default="", show_default=False, err=True).strip()
        try:
            return read(answer)
        except Adp2sgdError as error:
            print(f"  {error}", file=sys.stderr)


def _ask_label(columns: list[str]) -> str:
    if not _interactive():
        raise ConfigError("which column is the model to predict? name it with --label")

    def read(answer: str) -> str:
        if answer not in columns:
            raise ConfigError(f"{answer!r} is none of the columns{did_you_mean(answer, columns)}; correct it")
        return answer

    print(f"columns: {', '.join(columns)}", file=sys.stderr)
    return _ask("Which column is the model to predict?", read)


def _ask_site(data: Path, found: Columns, label: str) -> tuple[Columns, str | None]:
    from adp2sgd.data.survey import survey_table

    if not _interactive():
        return found, None

    def read(answer: str) -> str | None:
        if answer and (answer == label or answer not in found.kinds):
            raise ConfigError(f"{answer!r} is the label or no column{did_you_mean(answer, found.kinds)}; name another")
        return answer or None

    site = _ask("Which column names the site that owns a record? (Enter: none)", read)
    return (survey_table(data, site), site) if site else (found, None)


def _fill_in(draft: Draft, ignored: list[str]) -> None:
    """Ask for classes, ranges and categories; what is left empty stays open."""
    if not _interactive():
        return
    if draft.options.get("classes") == []:
        draft.options["classes"] = _ask(f"Classes of {draft.options['label']}, separated by commas:", _values)
    for name in list(draft.ranges):
        kind = draft.kinds[name]
        form = "for example 2015-01-01 2030-01-01" if kind == "date" else "for example 0 100"
        question = f"{name}: smallest and largest possible value, {form} (Enter: later, -: leave it out)"
        _keep(draft.ranges, name, _ask(question, partial(_bounds, kind)), ignored)
    for name in list(draft.categories):
        question = f"{name}: its categories, separated by commas (Enter: later, -: leave it out)"
        _keep(draft.categories, name, _ask(question, _categories), ignored)


def _bounds(kind: str, answer: str) -> list[object] | None:
    """A range; empty where it stays open, None where the column is left out."""
    from adp2sgd.data.survey import possible

    if answer in ("", LEAVE_OUT):
        return [] if not answer else None
    words = answer.replace(",", " ").split()
    if len(words) != 2:
        raise ConfigError("give two values, with a space between them; Enter leaves the range open")
    return possible(kind, *words)


def _categories(answer: str) -> list[object] | None:
    return None if answer == LEAVE_OUT else _values(answer)


def _keep(table: dict[str, Sequence[object]], name: str, values: list[object] | None, ignored: list[str]) -> None:
    if values is None:
        del table[name]
        ignored.append(name)
    else:
        table[name] = values


def _values(answer: str) -> list[object]:
    return [_value(word.strip()) for word in answer.split(",") if word.strip()]


def _value(word: str) -> object:
    return int(word) if word.isdecimal() else word
