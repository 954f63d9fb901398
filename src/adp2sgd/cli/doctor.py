"""`adp2sgd doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from adp2sgd.cli.options import Json


def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs are to be kept.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Try what runs need on this machine: packages, PyTorch, GPUs, disk, file locks, shared memory, open files.

    The exit code is 1 if something is bad.
    """
    from adp2sgd.cli import view

    with view.waiting("trying PyTorch, disk and memory"):
        from adp2sgd.doctor import BAD, examine

        found = examine(folder)
    if json:
        view.print_json([asdict(each) for each in found])
    else:
        rows = [(each.name, each.state, each.found + (f"; {each.fix}" if each.fix else "")) for each in found]
        view.table("this machine", ["check", "state", "found"], rows, left=["state", "found"])
    if any(each.state == BAD for each in found):
        raise typer.Exit(1)
