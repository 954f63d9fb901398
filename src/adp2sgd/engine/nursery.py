"""The process that learners are forked from: it has imported everything, has done nothing with it, and runs no thread.

So a learner starts in milliseconds instead of seconds, and all share one copy of the program in memory. The nursery
is also the learners' parent: it says how each of them ended. When the supervisor goes, by whatever way, the nursery
sees its line closed, and kills and reaps all learners; when the nursery itself is killed, the kernel kills them.

Its first message is the descriptors of the shared memories, which every learner inherits, and the folder of the run's
sockets, which it removes at the end; all others are orders.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from adp2sgd.errors import print_trace

LARGEST = 1 << 18
PR_SET_PDEATHSIG = 1
REAP_S = 0.02


class Nursery:
    """The supervisor's end of the line. The process warms up while the supervisor prepares."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Ctrl-C, and a scheduler's SIGTERM, reach the whole group, also while this process imports; the supervisor
            # decides what they mean.
            deaf = (
                "import signal; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]"
            )
            program = f"{deaf}; from adp2sgd.engine.nursery import main; main({theirs.fileno()})"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            command = [sys.executable, "-P", "-c", program]  # -P: the module path is this process's, without "."
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def give(self, descriptors: list[int], mail: str) -> None:
        """Before the first `spawn`."""
        socket.send_fds(self.line, [mail.encode()], descriptors)

    def spawn(self, order: dict[str, Any]) -> None:
        """Start the learner `order["learner"]`; its pid comes with `reports`."""
        self.line.send(json.dumps(order).encode())

    def reports(self) -> Iterator[dict[str, Any]]:
        """What has happened: {learner, pid} for a start, {learner, pid, code} for an end, {gone} for the nursery's."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self.line.recv(LARGEST, socket.MSG_DONTWAIT)
                except ConnectionResetError:
                    data = b""
                if not data:
                    yield {"gone": True}
                    return
                yield json.loads(data)

    def close(self) -> None:
        """End all learners that still run."""
        self.line.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def tend(line: socket.socket) -> None:
    """The nursery's own loop, until the supervisor closes the line."""
    children: dict[int, int] = {}
    mail, descriptors, _, _ = socket.recv_fds(line, LARGEST, 250)
    while True:
        ready, _, _ = select.select([line], [], [], REAP_S)
        if ready:
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = line.recv(LARGEST)
            if not data:
                break
            order = {**json.loads(data), "descriptors": descriptors}
            pid = _fork(order, line)
            children[pid] = order["learner"]
            _tell(line, {"learner": order["learner"], "pid": pid})
        _reap(line, children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if mail:
        shutil.rmtree(mail.decode(), ignore_errors=True)


def _reap(line: socket.socket, children: dict[int, int]) -> None:
    for pid, learner in list(children.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del children[pid]
            _tell(line, {"learner": learner, "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(line: socket.socket, report: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        line.send(json.dumps(report).encode())


def _fork(order: dict[str, Any], line: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the nursery died before the line above
        line.close()
        os.register_at_fork(after_in_child=_end_on_sigterm)
        code = _live(order)
    except BaseException as error:
        print_trace(error, private=order["private"])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_on_sigterm() -> None:
    """What a learner's task forks, a pool for instance, ends as usual."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _live(order: dict[str, Any]) -> int:
    from adp2sgd.engine.life import live

    return live(order)


def main(descriptor: int) -> None:
    """Of the nursery's own process; `descriptor` is its end of the line."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # and not SIG_IGN, which whatever a task starts would inherit
    os.dup2(2, 1)  # standard output belongs to the supervisor's figures
    line = socket.socket(fileno=descriptor)
    line.set_inheritable(False)
    import adp2sgd.engine.life  # noqa: F401

    tend(line)
    os._exit(0)  # there is nothing to tidy up, and an interpreter with torch in it takes a second to do so
