"""`adp2sgd report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are compared.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--out", help="The file to write (default: report.html in the first run's folder)."),
    ] = None,
    kind: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--format", help="html, markdown, json, png or pdf (default: as the file's name ends)."),
    ] = None,
) -> None:
    """One self-contained page about one run, or about several compared: curves, learners, graph, budget, timeline."""
    from adp2sgd.cli import view

    with view.waiting("reading the runs"):
        from adp2sgd.report.write import write

        target = write(runs, out, kind)
    print(target)
