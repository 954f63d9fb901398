"""Sites as processes of one machine, for demonstrations and tests: each is forked from a process that has imported
everything and runs no thread, so that it starts at once. In use, a site is started by `adp2sgd join`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from adp2sgd.engine.peers.join import join
from adp2sgd.errors import Adp2sgdError

PR_SET_PDEATHSIG = 1


class ForkedSites:
    """Starts sites and reaps them. They die with this process, however it ends."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}  # site → pid
        self.codes: dict[str, int] = {}  # site → exit code of its last process

    def start(self, name: str, run: Path, site: Path, out: Path, log: Path) -> int:
        """As `adp2sgd join run --site site --out out`, with all that it prints in `log`."""
        self.reap()
        self.codes.pop(name, None)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _live(run, site, out, log)
        self.running[name] = pid
        return pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.running[name], number)

    def reap(self) -> dict[str, int]:
        """The exit codes of all sites that have ended."""
        for name, pid in list(self.running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.running[name]
                self.codes[name] = os.waitstatus_to_exitcode(status)
        return self.codes

    def close(self) -> None:
        for name, pid in list(self.running.items()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.running[name]


def _live(run: Path, site: Path, out: Path, log: Path) -> None:
    """The life of a forked process; it never returns."""
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(file, stream)
        join(run, site, out)
        code = 0
    except Adp2sgdError as error:
        print(f"adp2sgd: error: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Obey one JSON order per line of standard input, and answer each with one line: for tests."""
    sites = ForkedSites()
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "start":
                paths = [Path(order[key]) for key in ("run", "site", "out", "log")]
                answer: dict[str, object] = {"pid": sites.start(order["name"], *paths)}
            else:
                answer = {"codes": sites.reap()}
            print(json.dumps(answer), flush=True)
    finally:
        sites.close()
