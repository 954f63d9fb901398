"""The command line: verbs → library calls. Errors are one line and exit code 2; a bug shows its traceback."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from adp2sgd.errors import Adp2sgdError

app = typer.Typer(
    help="Train one model across many sites that keep their data: asynchronous, decentralized, differentially private.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=VALUE", help="Change one field of the configuration; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"adp2sgd {version('adp2sgd')}")
        raise typer.Exit


@app.callback()
def options(
    data_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where data sets lie (default: $ADP2SGD_DATA, then the user's cache)."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    import os

    if data_dir is not None:
        os.environ["ADP2SGD_DATA"] = str(data_dir)


@app.command(epilog="Example: adp2sgd simulate experiments/ring8.toml --set learners=16 --json")
def simulate(
    config: Annotated[Optional[Path], typer.Argument(help="A TOML file; without it, the defaults.")] = None,  # noqa: UP045
    settings: Settings = [],  # noqa: B006
    out: Annotated[Optional[Path], typer.Option(help="The run's folder (default: runs/NAME).")] = None,  # noqa: UP045
    resume: Annotated[Optional[Path], typer.Option(help="Go on with an interrupted run in this folder.")] = None,  # noqa: UP045
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a configuration in virtual time, all learners in this process."""
    from adp2sgd import engine, view
    from adp2sgd.config import Config, load
    from adp2sgd.errors import ConfigError
    from adp2sgd.record import Folder

    if resume is not None:
        if config is not None or settings or out is not None:
            raise ConfigError("--resume goes on with the run's own configuration; remove the other arguments")
        chosen, folder = Folder.open(resume).settings, resume
    else:
        chosen = (Config() if config is None else load(config)).with_settings(settings)
        folder = out or _run_folder(chosen.task, chosen.algorithm)
    with view.progress(chosen, quiet=quiet) as on_status:
        run = engine.simulate(chosen, folder, resume=resume is not None, on_status=on_status)
    view.print_json(run.to_dict()) if json else view.print_run(run)


@app.command(epilog="Example: adp2sgd topology ring --learners 16 --partner sender-receiver --json")
def topology(
    graph: Annotated[str, typer.Argument(help="ring, torus, complete, hypercube, exponential, random-regular or star")],
    learners: Annotated[int, typer.Option(help="How many.")] = 8,
    partner: Annotated[str, typer.Option(help="neighbour or sender-receiver")] = "neighbour",
    degree: Annotated[int, typer.Option(help="Of random-regular.")] = 4,
    json: Json = False,
) -> None:
    """How quickly a graph spreads information: the spectral quantities of one exchange."""
    from adp2sgd import config, view
    from adp2sgd import topology as graphs

    settings = config.Config(learners=learners, topology=config.Topology(graph=graph, partner=partner, degree=degree))
    built = graphs.build(settings.topology, learners)
    figures = {
        "graph": graph,
        "learners": learners,
        "partner": partner,
        "degree": built.degree,
        "edges": len(built.edges),
        "connected": True,
        "rho": built.rho,
        "rho_bar": built.rho_bar,
    }
    if json:
        view.print_json(figures)
    else:
        view.table(f"{graph} of {learners} learners", ["quantity", "value"], [(k, str(v)) for k, v in figures.items()])


@app.command(epilog="Example: adp2sgd models --json")
def models(json: Json = False) -> None:
    """The built-in models with their sizes."""
    from dataclasses import asdict

    from adp2sgd import view
    from adp2sgd.models import catalogue

    found = catalogue()
    if json:
        view.print_json([asdict(each) for each in found])
        return
    rows = [(m.name, f"{m.parameters:,}", f"{m.mib:.2f}", f"{m.multiply_adds / 1e6:,.1f} M") for m in found]
    view.table("models", ["name", "parameters", "MiB", "multiply-adds"], rows)


@app.command(epilog="Example: adp2sgd demo")
def demo(json: Json = False) -> None:
    """SYNC against ADPSGD on handwritten digits, 8 learners, one of them 10 times slower. Takes seconds."""
    from adp2sgd import demo as story

    story.play(as_json=json)


def _run_folder(task: str, algorithm: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in (task, algorithm))
    folder = Path("runs") / f"{name}-{stamp}"
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{stamp}-{number}"
    return folder


def main() -> None:
    """Entry point: our own errors and wrong usage are one line on standard error."""
    command = typer.main.get_command(app)
    try:
        sys.exit(command.main(standalone_mode=False))
    except Adp2sgdError as error:
        _fail(str(error), error.exit_code)
    except typer.Abort:
        _fail("interrupted", 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage, found by typer
            _fail(f"{error.format_message()} (see --help)", 2)
        raise


def _fail(message: str, code: Any) -> None:
    print(f"adp2sgd: error: {message}", file=sys.stderr)
    sys.exit(code)
