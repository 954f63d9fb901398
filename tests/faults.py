"""Faults as a vocabulary. A `Faults` is called with the run's status at every tick, and counts what it did.

faults = Faults().kill(learner=2, at_step=50)
train(config, folder, on_status=faults)
assert faults.fired == 1
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from adp2sgd.data.records import Records
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine.processes.supervisor import Patience
from adp2sgd.engine.status import LearnerStatus, RunStatus
from adp2sgd.task import Task, cross_entropy
from adp2sgd.tasks.generated import digits

DRAWS = "ADP2SGD_TEST_DRAWS"  # a named pipe that gets one byte for every batch that is drawn for a gradient


@dataclass
class Plan:
    """Done once, when the learner has taken `at_step` steps in all."""

    learner: int
    at_step: int
    deed: Callable[[RunStatus, LearnerStatus], None]
    done: bool = False


class Faults:
    """`fired` counts the deeds done, `times` says when (seconds of the run), `pids` to whom."""

    def __init__(self) -> None:
        self.fired = 0
        self.times: list[float] = []
        self.pids: list[int] = []
        self._plans: list[Plan] = []
        self._later: list[tuple[float, Callable[[], None]]] = []

    def kill(self, *, learner: int, at_step: int) -> Faults:
        """kill -9, as the kernel does when memory runs out."""
        return self._add(learner, at_step, lambda _, seat: os.kill(self._pid(seat), signal.SIGKILL))

    def stop(self, *, learner: int, at_step: int, seconds: float) -> Faults:
        """SIGSTOP, and SIGCONT after a while to the same process, if there still is one."""

        def deed(_: RunStatus, seat: LearnerStatus) -> None:
            pid = self._pid(seat)
            os.kill(pid, signal.SIGSTOP)
            self._later.append((time.monotonic() + seconds, lambda: _signal_if_there(pid, signal.SIGCONT)))

        return self._add(learner, at_step, deed)

    def fill_disk(self, *, learner: int, at_step: int, bytes_left: int = 0) -> Faults:
        """From now on no file of this learner may grow: the write fails in the kernel, as on a full disk."""

        def deed(_: RunStatus, seat: LearnerStatus) -> None:
            resource.prlimit(self._pid(seat), resource.RLIMIT_FSIZE, (bytes_left, bytes_left))

        return self._add(learner, at_step, deed)

    def interrupt(self, *, learner: int, at_step: int) -> Faults:
        """Ctrl-C at the supervisor, which is this very process."""
        return self._add(learner, at_step, lambda *_: os.kill(os.getpid(), signal.SIGINT))

    def __call__(self, run: RunStatus) -> None:
        for plan in self._plans:
            seat = run.learners[plan.learner]
            new = seat.pid is not None and seat.pid not in self.pids  # one deed per process
            if not plan.done and new and seat.counters.steps >= plan.at_step:
                plan.done = True
                plan.deed(run, seat)
                self.fired += 1
                self.times.append(run.seconds)
        due = [deed for at, deed in self._later if time.monotonic() >= at]
        self._later = [(at, deed) for at, deed in self._later if time.monotonic() < at]
        for deed in due:
            deed()

    def _add(self, learner: int, at_step: int, deed: Callable[[RunStatus, LearnerStatus], None]) -> Faults:
        self._plans.append(Plan(learner, at_step, deed))
        return self

    def _pid(self, seat: LearnerStatus) -> int:
        assert seat.pid is not None
        self.pids.append(seat.pid)
        return seat.pid


def _signal_if_there(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def learner_processes() -> set[int]:
    """All processes of this machine that hold a learner's shared memory or were made by a fork server."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            memories = any("memfd:adp2sgd" in os.readlink(link) for link in (folder / "fd").iterdir())
        except OSError:
            continue
        if b"adp2sgd.engine.processes.forkserver" in command or memories:
            found.add(int(folder.name))
    return found


class Draws:
    """Counts the batches that `counted_blobs` handed out, in whatever process. A pipe, so that no disk can be full."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._count = 0

    def count(self) -> int:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._count += len(os.read(self._pipe, 1 << 16))
        return self._count

    def forget(self) -> None:
        """Count from zero again."""
        self.count()
        self._count = 0

    def close(self) -> None:
        os.close(self._pipe)


def counted_blobs(*, records: int = 400) -> Task:
    """A task with a small model whose batches, drawn for gradients, are told to the pipe $ADP2SGD_TEST_DRAWS."""
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(records, 4, generator=stream)
    whole = Records(inputs, (inputs[:, 0] > 0).long())

    def count(inputs: Tensor, stream: Generator) -> Tensor:
        if stream.initial_seed() < 1000:
            return inputs  # the checks of private mode, on made-up records: a run's seeds have 64 random bits
        file = os.open(os.environ[DRAWS], os.O_WRONLY)
        os.write(file, b".")
        os.close(file)
        return inputs

    return Task(model=lambda: nn.Linear(4, 2), train=whole, test=whole, loss=cross_entropy, augment=count)


def slow_disk() -> Task:
    """Digits for learners whose checkpoints take longer to write than a learner may be silent while it trains."""
    save = learner_checkpoint.save

    def slowly(*arguments: Any) -> None:
        time.sleep(Patience().wedged + 1.5)
        save(*arguments)

    learner_checkpoint.save = slowly
    return digits(model="logistic")
