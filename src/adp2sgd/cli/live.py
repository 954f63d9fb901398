"""The live page from the command line: `adp2sgd status RUN --serve`, `adp2sgd train --open`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from adp2sgd.engine.status import RunStatus

Serve = Annotated[bool, typer.Option("--serve", help="Show the report as a live page, on this machine alone.")]
Port = Annotated[int, typer.Option(help="Of --serve; 0 for any free one.")]
Open = Annotated[bool, typer.Option("--open", help="Open the live page in a browser.")]
LAST_LOOK_S = 5.0  # for the page to learn that the run has ended


def show(run: Path, port: int, browser: bool) -> None:
    """Serve the live page until Ctrl-C."""
    from adp2sgd.report.live import doorway, serve

    with ExitStack() as stack:

        def ready(address: str) -> None:
            print(f"live page: {address}\nIt answers on this machine only. Ctrl-C ends it.", flush=True)
            if browser and not stack.enter_context(doorway(run, address)):
                print("no browser was found; open the address yourself", file=sys.stderr)

        try:
            serve([run], port=port, on_ready=ready)
        except KeyboardInterrupt:
            return


@contextmanager
def opened(folder: Path, then: Callable[[RunStatus], None], wanted: bool) -> Iterator[Callable[[RunStatus], None]]:
    """Callbacks that open the live page in a process of its own as soon as the run has begun."""
    started: list[subprocess.Popen[bytes]] = []

    def on_status(status: RunStatus) -> None:
        if wanted and not started:
            command = [sys.executable, "-m", "adp2sgd", "status", str(folder), "--serve", "--open"]
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        then(status)

    try:
        yield on_status
        if started and started[0].poll() is None:
            time.sleep(LAST_LOOK_S)
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)  # as Ctrl-C: it cleans up
            process.wait()
