"""`adp2sgd join` and `adp2sgd status`: one site of a run, beside its own data."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from adp2sgd.cli.live import Open, Port, Serve, show
from adp2sgd.cli.options import Json

if TYPE_CHECKING:
    from adp2sgd.engine.status import LearnerStatus, RunStatus

sites = typer.Typer()


@sites.command(epilog="Example: adp2sgd join run.toml --site heart/sites/cleveland/site.toml")
def join(
    run: Annotated[Path, typer.Argument(help="The consortium's run.toml, the same at every site.")],
    site: Annotated[Path, typer.Option(help="This site's own site.toml, which never leaves it.")],
    out: Annotated[Optional[Path], typer.Option(help="The run's folder (default: runs/RUN-SITE).")] = None,  # noqa: UP045
    trust: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="MODULE:FUNCTION", help="Import this function, which run.toml names as its task."),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Begin a private run without waiting for a first neighbour.")
    ] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Take part in a run as one site. The same command again goes on after any interruption."""
    from adp2sgd.cli import view

    with view.waiting(quiet=quiet):
        from adp2sgd.cli.liveview import watching
        from adp2sgd.config import load_site
        from adp2sgd.engine.peers.join import join as take_part

    with watching(f"{run.stem} at {load_site(site).name}", quiet=quiet) as on_status:
        result = take_part(run, site, out, trust=trust, alone=alone, on_status=on_status)
    view.print_json(result.to_dict()) if json else view.print_run(result)


@sites.command(
    short_help="Show how a run stands, also while it goes on.",
    epilog="Example: adp2sgd status runs/heart-cleveland --serve --open",
)
def status(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    json: Json = False,
    serve: Serve = False,
    port: Port = 0,
    browser: Open = False,
) -> None:
    """Who is there, last exchanges, steps, and what of the own ε is spent. Works while the run goes on."""
    from adp2sgd.cli import view
    from adp2sgd.errors import ConfigError

    if serve or browser:
        show(run, port, browser)
        return
    with view.waiting():
        from adp2sgd.engine.status import read_status
        from adp2sgd.run_folder import Folder

    folder = Folder.open(run)
    found = read_status(folder)
    if found is None:
        raise ConfigError(f"{run} has no status yet; its run has not begun to train")
    running = folder.running
    if json:
        view.print_json({"running": running, **asdict(found)})
        return
    _print(run, found, running)


def _print(run: Path, found: RunStatus, running: bool) -> None:
    from adp2sgd.cli import view

    age = "" if found.written_at is None else f", {max(0.0, time.time() - found.written_at):.0f} s ago"
    print(f"{run}: {'running' if running else 'not running'}{age}; {found.task} {found.algorithm}")
    print(f"epoch {found.epoch:.2f} of {found.epochs:g}, {found.global_steps:,} of {found.target_steps:,} steps")
    columns = ["site", "state", "steps", "exchanges", "steps/s", "ε spent"]
    dispensable = ("steps/s", "exchanges")
    view.table("sites", columns, [_row(each) for each in found.learners], left=("state",), dispensable=dispensable)
    for each in found.learners:
        for note in each.notes:
            view.say(f"{each.name}: {note}")
    for note in found.notes:
        view.say(f"note: {note}")


def _row(each: LearnerStatus) -> tuple[str, ...]:
    spent = ""
    if each.epsilon is not None:  # another site states its cap alone
        told = f"{each.epsilon:.2f}"
        spent = f"at most {told}" if each.epsilon_spent is None else f"{each.epsilon_spent:.2f} of {told}"
    rate = f"{each.rate:.1f}" if each.rate else ""
    return (
        each.name,
        each.state,
        f"{each.counters.steps:,}",
        f"{each.counters.exchanges:,}",
        rate,
        spent,
    )
