"""The commands `simulate` and `train`: one configuration, two engines, the same options."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from adp2sgd.cli.live import Open, opened
from adp2sgd.cli.options import ConfigFile, Json, Quiet, Settings, Trust, configuration
from adp2sgd.errors import ConfigError

if TYPE_CHECKING:
    from adp2sgd.config import Config

RunFolder = Annotated[Optional[Path], typer.Option(help="The run's folder (default: runs/TASK-ALGORITHM-TIME).")]  # noqa: UP045
Resume = Annotated[Optional[Path], typer.Option(help="Continue the interrupted run in this folder.")]  # noqa: UP045


def command(engine: str, summary: str) -> Callable[..., None]:
    """The command that runs a configuration in an engine, which is the name of a function of `adp2sgd.engine`."""

    def run(
        config: ConfigFile = None,
        settings: Settings = [],  # noqa: B006
        out: RunFolder = None,
        resume: Resume = None,
        trust: Trust = None,
        json: Json = False,
        quiet: Quiet = False,
        browser: Open = False,
    ) -> None:
        from adp2sgd.cli import view

        with view.waiting(quiet=quiet):
            from adp2sgd import engine as engines
            from adp2sgd.cli.liveview import watching

        chosen, folder = _chosen(config, settings, out, resume, trust)
        drive: Callable[..., Any] = getattr(engines, engine)
        with watching(view.named(chosen), quiet=quiet) as shown, opened(folder, shown, browser) as on_status:
            result = drive(chosen, folder, resume=resume is not None, on_status=on_status)
        view.print_json(result.to_dict()) if json else view.print_run(result)

    run.__doc__ = summary
    return run


simulate = command("simulate", "Run a configuration in virtual time, with all learners in this process.")
train = command("train", "Run a configuration in real time on this machine, with one process per learner.")


def _chosen(
    config: Path | None, settings: list[str], out: Path | None, resume: Path | None, trust: str | None
) -> tuple[Config, Path]:
    """The configuration of a new run or of the one that continues, and its folder."""
    from adp2sgd.config import naming
    from adp2sgd.run_folder import Folder

    if out is not None and not str(out).strip(". "):
        raise ConfigError(f"--out {str(out)!r} is no folder for a run; give a name such as runs/first")
    if resume is None:
        chosen = configuration(config, settings, trust)
        return chosen, out or _run_folder(chosen.task, chosen.algorithm)
    if config is not None or out is not None:
        raise ConfigError("--resume continues with the run's own configuration; remove the other arguments")
    return naming(Folder.open(resume).settings.with_settings(settings), trust), resume


def _run_folder(task: str, algorithm: str) -> Path:
    """A name of its own, also beside runs that begin in the same second."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in (task, algorithm))
    return Path("runs") / f"{name}-{stamp}-{os.getpid()}"
