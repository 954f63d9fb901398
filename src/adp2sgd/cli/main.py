"""The command line: verbs → library calls. Errors are one line; a bug shows its traceback.

Exit codes: 2 for wrong input, 1 for a run that fails, 130 for one that was interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from adp2sgd.cli.certs import certs
from adp2sgd.cli.live import Open, opened
from adp2sgd.cli.model import finished
from adp2sgd.cli.privacy import Json, privacy
from adp2sgd.cli.report import report
from adp2sgd.cli.sites import sites
from adp2sgd.errors import Adp2sgdError, ConfigError

app = typer.Typer(
    help="Train one model across many sites that keep their data: asynchronous, decentralized, differentially private.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(privacy, name="privacy")
app.add_typer(certs, name="certs")
app.add_typer(sites)  # join, status
app.add_typer(finished)  # predict, evaluate, export
app.command(epilog="Example: adp2sgd report runs/first runs/second -o comparison.html")(report)

INTERRUPTED = 130
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=VALUE", help="Change one field of the configuration; may be repeated."),
]
ConfigFile = Annotated[Optional[Path], typer.Argument(help="A TOML file; without it, the defaults.")]  # noqa: UP045
RunFolder = Annotated[Optional[Path], typer.Option(help="The run's folder (default: runs/TASK-ALGORITHM-TIME).")]  # noqa: UP045
Resume = Annotated[Optional[Path], typer.Option(help="Go on with an interrupted run in this folder.")]  # noqa: UP045
Trust = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="MODULE:FUNCTION", help="Import this function, which the configuration's file names as its task."
    ),
]
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
    if data_dir is not None:
        os.environ["ADP2SGD_DATA"] = str(data_dir)


@app.command(epilog="Example: adp2sgd simulate experiments/ring8.toml --set learners=16 --json")
def simulate(
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
    out: RunFolder = None,
    resume: Resume = None,
    trust: Trust = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a configuration in virtual time, all learners in this process."""
    from adp2sgd.cli import view

    with view.waiting(quiet=quiet):
        from adp2sgd import engine

    chosen, folder = _chosen(config, settings, out, resume, trust)
    with view.progress(chosen, quiet=quiet) as on_status:
        run = engine.simulate(chosen, folder, resume=resume is not None, on_status=on_status)
    view.print_json(run.to_dict()) if json else view.print_run(run)


@app.command(epilog="Example: adp2sgd train experiments/ring8.toml --set learners=4 --set speeds.kind=one-slow")
def train(
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
    out: RunFolder = None,
    resume: Resume = None,
    trust: Trust = None,
    json: Json = False,
    quiet: Quiet = False,
    browser: Open = False,
) -> None:
    """Run a configuration in real time on this machine, one process per learner."""
    from adp2sgd.cli import view

    with view.waiting(quiet=quiet):
        from adp2sgd import engine
        from adp2sgd.cli.liveview import watching

    chosen, folder = _chosen(config, settings, out, resume, trust)
    with watching(quiet) as shown, opened(folder, shown, browser) as on_status:
        run = engine.train(chosen, folder, resume=resume is not None, on_status=on_status)
    view.print_json(run.to_dict()) if json else view.print_run(run)


@app.command(epilog="Example: adp2sgd topology ring --learners 16 --partner sender-receiver --json")
def topology(
    graph: Annotated[str, typer.Argument(help="ring, torus, complete, hypercube, exponential, random-regular or star")],
    learners: Annotated[int, typer.Option(help="How many.")] = 8,
    partner: Annotated[str, typer.Option(help="neighbour or sender-receiver")] = "neighbour",
    degree: Annotated[int, typer.Option(help="Of random-regular.")] = 4,
    exchanges: Annotated[int, typer.Option(help="That an initiator starts per step.")] = 1,
    json: Json = False,
) -> None:
    """How quickly a graph spreads information: the spectral quantities of one step's exchanges."""
    from adp2sgd import config
    from adp2sgd import topology as graphs
    from adp2sgd.cli import view

    if graph not in graphs.GRAPHS:
        raise ConfigError(f'graph "{graph}" is unknown; use one of: {", ".join(graphs.GRAPHS)}')
    wanted = config.Topology(graph=graph, partner=partner, degree=degree, exchanges=exchanges)
    settings = config.Config(learners=learners, topology=wanted)
    with view.waiting(f"eigenvalues of {learners:,} learners"):
        built = graphs.build(settings.topology, learners)
        figures = {
            "graph": graph,
            "learners": learners,
            "partner": partner,
            "exchanges": exchanges,
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

    from adp2sgd.cli import view

    with view.waiting("building the models"):
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
    from adp2sgd.cli import view

    with view.waiting():
        from adp2sgd.cli import demo as story

    story.play(as_json=json)


@app.command(epilog="Example: adp2sgd explain experiments/cifar10_cnn_private.toml")
def explain(
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
    trust: Trust = None,
    json: Json = False,
) -> None:
    """How the per-record gradients of each layer would be taken in private mode, and why."""
    from dataclasses import asdict

    from adp2sgd.cli import view
    from adp2sgd.config import Config, load_config, naming

    chosen = naming((Config() if config is None else load_config(config)).with_settings(settings), trust)
    with view.waiting(f"building {chosen.task}"):
        from adp2sgd.engine.setup import explain_gradients

        rows = explain_gradients(chosen)
    if json:
        view.print_json([asdict(row) for row in rows])
    else:
        shown = [(row.layer, f"{row.parameters:,}", row.rule, row.why) for row in rows]
        view.table("per-record gradients", ["layer", "parameters", "rule", "why"], shown)


def _chosen(
    config: Path | None, settings: list[str], out: Path | None, resume: Path | None, trust: str | None
) -> tuple[Any, Path]:
    """The configuration of a new run or of the one that goes on, and its folder."""
    from adp2sgd.config import Config, load_config, naming
    from adp2sgd.run_folder import Folder

    if out is not None and not str(out).strip(". "):
        raise ConfigError(f"--out {str(out)!r} is no folder for a run; give a name such as runs/first")
    if resume is None:
        chosen = naming((Config() if config is None else load_config(config)).with_settings(settings), trust)
        return chosen, out or _run_folder(chosen.task, chosen.algorithm)
    if config is not None or settings or out is not None:
        raise ConfigError("--resume goes on with the run's own configuration; remove the other arguments")
    return naming(Folder.open(resume).settings, trust), resume


def _run_folder(task: str, algorithm: str) -> Path:
    """A name of its own, also beside runs that begin in the same second."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in (task, algorithm))
    return Path("runs") / f"{name}-{stamp}-{os.getpid()}"


def main() -> None:
    """Entry point of `adp2sgd`."""
    run(app, "adp2sgd")


def run(application: typer.Typer, program: str) -> None:
    """Run a command line and exit: our own errors and wrong usage are one line on standard error."""
    command = typer.main.get_command(application)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without ε is no reason to fail
    try:
        code = command.main(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        if code == INTERRUPTED:  # by typer, which says nothing
            _fail(program, "interrupted", INTERRUPTED)
        sys.exit(code)
    except Adp2sgdError as error:
        _fail(program, str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail(program, "interrupted", INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or _can_print():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to print goes nowhere
        _fail(program, f"cannot write to standard output ({error.strerror})", 1)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(2)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage, found by typer
            _fail(program, f"{error.format_message()} (see --help)", 2)
        raise


def _can_print() -> bool:
    try:
        os.write(1, b"\n")
    except OSError:
        return False
    return True


def _fail(program: str, message: str, code: Any) -> None:
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(code)
