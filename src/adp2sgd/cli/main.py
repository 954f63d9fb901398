"""The command line: verbs → library calls. Errors are one line; a bug shows its traceback.

Exit codes: 2 for wrong input, 1 for a run that fails, 130 for one that was interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from adp2sgd.cli import inspect, model, training
from adp2sgd.cli.certs import certs
from adp2sgd.cli.check import check
from adp2sgd.cli.doctor import doctor
from adp2sgd.cli.init import init
from adp2sgd.cli.options import Json
from adp2sgd.cli.privacy import privacy
from adp2sgd.cli.report import report
from adp2sgd.cli.sites import sites
from adp2sgd.errors import DEBUG, Adp2sgdError, debugging, print_debug, print_users_error

INTERRUPTED = 130
app = typer.Typer(
    help="Train one model across many sites that keep their data: asynchronous, decentralized, differentially private.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from adp2sgd.cli.version import versions

        print(versions())
        raise typer.Exit


@app.callback()
def options(
    data_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The folder of data sets (default: $ADP2SGD_DATA, then the user's cache)."),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of any error (as ADP2SGD_DEBUG=1 does).")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            help="Print the versions of adp2sgd, Python, torch and CUDA, and exit.",
        ),
    ] = False,
) -> None:
    if data_dir is not None:
        os.environ["ADP2SGD_DATA"] = str(data_dir)
    if debug:
        os.environ[DEBUG] = "1"


def demo(
    sites: Annotated[
        bool, typer.Option("--sites", help="Four hospitals over TLS instead, one killed and restarted.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare SYNC, ADPSGD and A(DP)²SGD on handwritten digits, with one slow learner. Takes seconds."""
    from adp2sgd.cli import view

    if sites:
        with view.waiting():
            from adp2sgd.cli import demo_sites
        demo_sites.play(as_json=json)
        return
    with view.waiting():
        from adp2sgd.cli import demo as story

    story.play(as_json=json)


VERBS: tuple[tuple[str, Callable[..., None], str, str], ...] = (  # name, function, summary in a line, example
    ("demo", demo, "See what asynchrony and privacy cost, in seconds.", "--sites"),
    (
        "init",
        init,
        "Write a first configuration for data of your own.",
        "patients.csv --label ill --site clinic",
    ),
    (
        "check",
        check,
        "Say what a run would do: steps, ε, bytes, memory, time.",
        "experiments/ring8.toml --learners 4,16,64",
    ),
    (
        "simulate",
        training.simulate,
        "Train in virtual time, in one process.",
        "experiments/ring8.toml --set learners=16 --json",
    ),
    (
        "train",
        training.train,
        "Train in real time, with one process per learner.",
        "experiments/ring8.toml --set learners=4 --set speeds.kind=one-slow",
    ),
    (
        "report",
        report,
        "Write a page about a run, or compare several.",
        "runs/first runs/second -o comparison.html",
    ),
    ("predict", model.predict, "Say what a finished model makes of new data.", "runs/first new.csv -o predicted.csv"),
    ("evaluate", model.evaluate, "Measure a finished model on labelled data.", "runs/first --data 2024.csv --json"),
    ("export", model.export, "Hand a finished model on, with a model card.", "runs/first --format onnx"),
    (
        "topology",
        inspect.topology,
        "Show how quickly a graph spreads information.",
        "ring --learners 16 --partner sender-receiver --json",
    ),
    ("models", inspect.models, "List the built-in models with their sizes.", "--json"),
    (
        "explain",
        inspect.explain,
        "Show how private gradients of each layer are taken.",
        "experiments/cifar10_cnn_private.toml",
    ),
    ("doctor", doctor, "Try what runs need on this machine.", ""),
)
for verb, function, summary, example in VERBS:
    app.command(verb, short_help=summary, epilog=f"Example: adp2sgd {verb} {example}".rstrip())(function)
app.add_typer(privacy, name="privacy")
app.add_typer(certs, name="certs")
app.add_typer(sites)  # join, status


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
        code = command.main(prog_name=program, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        if code == INTERRUPTED:  # by typer, which says nothing
            _fail(program, "interrupted", INTERRUPTED)
        sys.exit(code)
    except Adp2sgdError as error:
        if debugging():
            print_debug(error)
        _fail(program, str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail(program, "interrupted", INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EPIPE) and not _can_print():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to print goes nowhere
            _fail(program, f"cannot write to standard output ({error.strerror})", 1)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(2)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage, found by typer
            _fail(program, f"{error.format_message()} (see --help)", 2)
        if debugging() or not print_users_error(error, program):
            raise
        sys.exit(1)


def _can_print() -> bool:
    try:
        os.write(1, b"\n")
    except OSError:
        return False
    return True


def _fail(program: str, message: str, code: Any) -> None:
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(code)
