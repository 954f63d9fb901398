"""Arguments and options that several commands share, and the configuration that they choose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from adp2sgd.config import Config


def _keys(incomplete: str) -> Iterator[str]:
    """For the shell's completion: the configuration's fields that begin so."""
    from adp2sgd.config import keys

    yield from (f"{key}=" for key in keys() if key.startswith(incomplete))


Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Set one field of the configuration; A.B= unsets it. May be repeated.",
        autocompletion=_keys,
    ),
]
ConfigFile = Annotated[Optional[Path], typer.Argument(help="A TOML file. Without it, the defaults.")]  # noqa: UP045
Trust = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="MODULE:FUNCTION", help="Import this function, which the configuration's file names as its task."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def configuration(file: Path | None, settings: list[str], trust: str | None) -> Config:
    """The configuration in a file, changed by settings. Notes about dropped fields go to standard error."""
    from adp2sgd.cli import view
    from adp2sgd.config import Config, load_config, naming

    chosen, notes = (Config() if file is None else load_config(file)).changed(settings)
    for note in notes:
        view.note(note)
    return naming(chosen, trust)
