"""`python -m reproduction STUDY`: run a study of the paper again, cell by cell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from adp2sgd.cli import view
from adp2sgd.cli.main import run
from adp2sgd.cli.options import Json, Quiet

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m reproduction table1 --model resnet18 --epochs 80 --noise 1 --noise 4")
def reproduce(
    study: Annotated[str, typer.Argument(help="table1, sizes, case1, case2, case3, speech, theory or privacy")],
    quick: Annotated[bool, typer.Option("--quick", help="A small form on handwritten digits, in minutes.")] = False,
    model: Annotated[list[str], typer.Option(help="Only this model; may be repeated.")] = [],  # noqa: B006
    epochs: Annotated[Optional[float], typer.Option(help="The schedule is stretched to them.")] = None,  # noqa: UP045
    noise: Annotated[list[float], typer.Option(help="Only this σ; may be repeated.")] = [],  # noqa: B006
    algorithm: Annotated[list[str], typer.Option(help="sync or adpsgd; may be repeated.")] = [],  # noqa: B006
    seed: Annotated[list[int], typer.Option(help="May be repeated.")] = [0],  # noqa: B006
    momentum: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Default: 0.9 in paper mode, 0 with --private. 0 is plain SGD."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Clip, sample, account: noise is a multiplier.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="Real learner processes, padded steps.")] = False,
    out: Annotated[Optional[Path], typer.Option(help="Results (default: reproduction/results).")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    jobs: Annotated[int, typer.Option(help="Cells at once, in processes of their own.", min=1)] = 1,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Fill reproduction/README.md and docs/reproduction.md anew.")
    ] = False,
    data_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where data sets lie (default: $ADP2SGD_DATA, then the user's cache)."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a study of the paper again, cell by cell. A finished cell is never run twice. An interrupted cell resumes;
    with --processes it starts again."""
    if data_dir is not None:
        os.environ["ADP2SGD_DATA"] = str(data_dir)
    with view.waiting(quiet=quiet):
        from reproduction import command
        from reproduction.cells import Choice

    choice = Choice(
        quick=quick,
        models=tuple(model),
        noise=tuple(noise),
        algorithms=tuple(algorithm),
        seeds=tuple(seed),
        epochs=epochs,
        momentum=momentum,
        private=private,
        processes=processes,
        device=device,
    )
    command.reproduce(study, choice, out=out, jobs=jobs, as_json=json, quiet=quiet, write_docs=write_docs)


if __name__ == "__main__":
    run(app, "reproduction")
