"""The process that learners are forked from: it has imported everything, has done nothing with it, and runs no thread.

So a learner starts in milliseconds instead of seconds, and all share one copy of the program in memory. The fork server
is also the learners' parent: it says how each of them ended. When the supervisor goes, by whatever way, the fork server
sees its line closed, and kills and reaps all learners; when the fork server itself is killed, the kernel kills them.

Its first message says which descriptors follow, and names the folder of the run's sockets, which it removes at the end.
All learners inherit the memories and the task, and each its own records. All other messages are orders.
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
MOST_DESCRIPTORS = 200  # in one message; the kernel allows 253
PR_SET_PDEATHSIG = 1
REAP_S = 0.02


class ForkServer:
    """The supervisor's end of the line. The process warms up while the supervisor prepares."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Ctrl-C, and a scheduler's SIGTERM, reach the whole group, also while this process imports; the supervisor
            # decides what they mean.
            deaf = (
                "import signal; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]"
            )
            program = f"{deaf}; from adp2sgd.engine.processes.forkserver import main; main({theirs.fileno()})"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            command = [sys.executable, "-P", "-c", program]  # -P: the module path is this process's, without "."
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def give(self, memories: list[int], task: int, records: list[int], mail: str) -> None:
        """The descriptors that learners inherit: all `memories`, the `task`, and each its own of `records`."""
        descriptors = [*memories, task, *records]
        self.line.send(json.dumps({"learners": len(memories), "mail": mail}).encode())
        for first in range(0, len(descriptors), MOST_DESCRIPTORS):
            socket.send_fds(self.line, [b"descriptors"], descriptors[first : first + MOST_DESCRIPTORS])

    def spawn(self, order: dict[str, Any]) -> None:
        """Start the learner `order["learner"]`; its pid comes with `reports`."""
        self.line.send(json.dumps(order).encode())

    def reports(self) -> Iterator[dict[str, Any]]:
        """What has happened: {learner, pid} for a start, {learner, pid, code} for an end, {gone} for its own end."""
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
    """The fork server's own loop, until the supervisor closes the line."""
    children: dict[int, int] = {}
    mail, descriptors = _received(line)
    while True:
        ready, _, _ = select.select([line], [], [], REAP_S)
        if ready:
            data = b""
            with contextlib.suppress(ConnectionResetError):
                data = line.recv(LARGEST)
            if not data:
                break
            order = json.loads(data)
            pid = _fork(order, descriptors, line)
            children[pid] = order["learner"]
            _tell(line, {"learner": order["learner"], "pid": pid})
        _reap(line, children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if mail:
        shutil.rmtree(mail, ignore_errors=True)


def _received(line: socket.socket) -> tuple[str, list[int]]:
    """The folder and the descriptors that `ForkServer.give` sent; nothing if the supervisor went away before."""
    data = line.recv(LARGEST)
    if not data:
        return "", []
    given, found = json.loads(data), list[int]()
    while len(found) < 2 * given["learners"] + 1:
        data, descriptors, _, _ = socket.recv_fds(line, 64, MOST_DESCRIPTORS)
        if not data:
            break
        found += descriptors
    return given["mail"], found


def _reap(line: socket.socket, children: dict[int, int]) -> None:
    for pid, learner in list(children.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del children[pid]
            _tell(line, {"learner": learner, "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(line: socket.socket, report: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        line.send(json.dumps(report).encode())


def _fork(order: dict[str, Any], descriptors: list[int], line: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the fork server died before the line above
        line.close()
        os.register_at_fork(after_in_child=_end_on_sigterm)
        code = _live(order, descriptors)
    except BaseException as error:
        print_trace(error, private=order["private"])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_on_sigterm() -> None:
    """What a learner's task forks, a pool for instance, ends as usual."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _live(order: dict[str, Any], descriptors: list[int]) -> int:
    """With the descriptors of its own records, and of nobody else's."""
    from adp2sgd.engine.processes.learner_process import live

    count = len(descriptors) // 2
    memories, task, records = descriptors[:count], descriptors[count], descriptors[count + 1 :]
    own = records.pop(order["learner"])
    for other in records:
        os.close(other)
    return live(order, memories, task, own)


def main(descriptor: int) -> None:
    """Of the fork server's own process; `descriptor` is its end of the line."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # and not SIG_IGN, which whatever a task starts would inherit
    os.dup2(2, 1)  # standard output belongs to the supervisor's figures
    line = socket.socket(fileno=descriptor)
    line.set_inheritable(False)
    import adp2sgd.engine.processes.learner_process  # noqa: F401

    tend(line)
    os._exit(0)  # there is nothing to tidy up, and an interpreter with torch in it takes a second to do so
