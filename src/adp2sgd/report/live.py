"""The live page: the report of a run that goes on, for its owner's browser on this machine and nobody else.

The server listens on the loopback interface. Other users of the machine reach that too, so the address holds a random
token, without which every request is answered 404.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adp2sgd.errors import ConfigError
from adp2sgd.files import owner_only, to_json
from adp2sgd.report import page
from adp2sgd.report.logs import StepLogs
from adp2sgd.report.read import named_apart, read_run
from adp2sgd.report.run_data import RunData

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
SHARE = 0.04  # of a core's time that looking at a run may take
DOORWAY = "live.html"  # in the run's folder: leads a browser to the page
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Live:
    """The runs as a browser sees them. Looks at them at most as often as `SHARE` allows, for however many pages."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._folders = folders
        self._logs = StepLogs()
        self._mutex = threading.Lock()
        self._runs: list[RunData] = []
        self._wait_s = page.LIVE_S
        self._stale_at = 0.0

    def page(self) -> str:
        return page.page(self._look()[0], live=True)

    def update(self) -> dict[str, Any]:
        runs, wait_s = self._look()
        return {**page.update(runs), "wait_s": wait_s}

    def _look(self) -> tuple[list[RunData], float]:
        with self._mutex:
            began = time.monotonic()
            if began >= self._stale_at:
                self._runs = named_apart(read_run(each, self._logs) for each in self._folders)
                self._wait_s = max(page.LIVE_S, (time.monotonic() - began) / SHARE)
                self._stale_at = began + self._wait_s / 2
            return self._runs, self._wait_s


def application(live: Live, token: str) -> Starlette:
    """Two addresses: the page, and its news."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
    from starlette.routing import Route

    def guarded(answer: Callable[[], Response]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            given = str(request.path_params["token"])
            local = request.url.hostname in {HOST, "localhost"}  # no other site's name that resolves to this machine
            if not (local and secrets.compare_digest(given.encode(), token.encode())):
                return PlainTextResponse("not found", status_code=404, headers=HEADERS)
            response = answer()
            response.headers.update(HEADERS)
            return response

        return respond

    return Starlette(
        routes=[
            Route("/{token}/", guarded(lambda: HTMLResponse(live.page()))),
            Route("/{token}/update", guarded(lambda: Response(to_json(live.update()), media_type="application/json"))),
        ]
    )


def serve(folders: Sequence[str | Path], *, port: int = 0, on_ready: Callable[[str], None]) -> None:
    """Serve the live page of these runs until the process is interrupted. `on_ready` gets its address.

    `port`: 0 for any free one.
    """
    import uvicorn

    live = Live(folders)
    live.page()  # a folder that holds no run is refused before anything listens
    token = secrets.token_urlsafe(32)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be used ({error.strerror}); choose another, or leave it out"
            ) from None
        listener.listen()
        on_ready(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
        settings = uvicorn.Config(
            application(live, token), log_level="warning", access_log=False, server_header=False, lifespan="off"
        )
        uvicorn.Server(settings).run(sockets=[listener])


@contextmanager
def doorway(folder: Path, address: str) -> Iterator[bool]:
    """Open the page in a browser; False if there is none.

    The browser gets a file that leads to the address: other users can read the arguments of a process.
    """
    path = folder / DOORWAY
    path.unlink(missing_ok=True)
    with open(path, "w", encoding="utf-8", opener=owner_only) as file:
        where = escape(address)
        file.write(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={where}"><a href="{where}">live page</a>\n'
        )
    try:
        try:
            browser = webbrowser.get()
        except webbrowser.Error:
            yield False
            return
        # In a thread: some browsers return when they are closed, and the page is served after this.
        threading.Thread(target=browser.open, args=(path.resolve().as_uri(),), daemon=True).start()
        yield True
    finally:
        path.unlink(missing_ok=True)
