"""What a run would do, before it is run: sizes, steps, privacy, bytes, memory and time. Draws from no budget.

One step is measured, on synthetic records in the shape of the task's. Everything else follows from the plan.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adp2sgd import tree
from adp2sgd.config import Config
from adp2sgd.data import shards
from adp2sgd.data.records import Records
from adp2sgd.engine.plan import Plan, make_plan
from adp2sgd.engine.setup import Setup, prepare
from adp2sgd.engine.site import Site, make_learner
from adp2sgd.engine.threads import suited_threads
from adp2sgd.errors import ConfigError
from adp2sgd.gradient.proof import synthetic
from adp2sgd.privacy.plan import plan as privacy_plan
from adp2sgd.task import Task

MEASURED_S, MOST_STEPS = 1.0, 50  # of the measured step: repeated for so long, and so often at most


@dataclass(frozen=True, kw_only=True)
class Share:
    """A learner's part: its records and, in private mode, what it may spend."""

    learner: str
    records: int
    epsilon: float | None = None  # at the cap
    noise_multiplier: float | None = None
    max_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A run with some number of learners. `train_s` and `simulate_s`: real time without start-up and evaluation."""

    learners: int
    steps: int  # of all learners together
    steps_per_learner: int
    sample_rate: float  # of the smallest learner: batch_size / records
    shares: tuple[Share, ...]
    simulate_s: float
    train_s: float
    bytes_per_second: float  # that one learner sends in `train`, at one exchange per step


@dataclass(frozen=True, kw_only=True)
class Check:
    """What `adp2sgd check` says. `memory_bytes`: of one learner beside the program itself, where it can be measured."""

    task: str
    algorithm: str
    privacy: str
    device: str
    records: int
    held_out: int
    parameters: int
    bytes_per_exchange: int  # each way
    record_bytes: int  # the training records of all learners, as stored
    memory_bytes: int | None
    step_s: float
    forecasts: tuple[Forecast, ...]
    notes: tuple[str, ...]


def check(config: Config, learners: Sequence[int] = ()) -> Check:
    """Load the task, check everything that a run would check, measure one step and compute the rest.

    `learners`: numbers of learners to compare; the configuration's own where there are none.
    """
    setup = prepare(config)
    try:
        return _check(setup, learners)
    finally:
        setup.close()


def _check(setup: Setup, learners: Sequence[int]) -> Check:
    step_s, memory = _measure(setup)
    config, task, model = setup.plan.config, setup.task, setup.compute.model
    counts = tuple(dict.fromkeys(learners)) or (config.learners,)
    exchanged = len(model.weights) + (0 if setup.plan.private else len(model.buffers))
    size = exchanged * model.weights.element_size()
    return Check(
        task=config.task,
        algorithm=config.algorithm,
        privacy=config.privacy.mode,
        device=str(setup.compute.device),
        records=len(task.train),
        held_out=len(task.test),
        parameters=sum(p.numel() for p in model.module.parameters()),
        bytes_per_exchange=size,
        record_bytes=len(task.train) * _bytes_of_a_record(task),
        memory_bytes=memory,
        step_s=step_s,
        forecasts=tuple(_forecast(setup, count, step_s, size) for count in counts),
        notes=(*setup.notes, *_notes(config)),
    )


def _bytes_of_a_record(task: Task) -> int:
    """As it is stored: input and target."""
    inputs, targets = task.train.blank()
    return sum(part.element_size() * part.shape[1:].numel() for part in (*tree.tensors(inputs), targets))


def _notes(config: Config) -> list[str]:
    if config.privacy.mode == "private" and config.privacy.ledger is not None:
        return ["ε is that of a ledger which has spent nothing; adp2sgd privacy spent tells what yours holds"]
    return []


def _forecast(setup: Setup, learners: int, step_s: float, size: int) -> Forecast:
    config, train = setup.plan.config, setup.task.train
    if learners != config.learners and config.data.partition == "site":
        raise ConfigError(
            f"--learners {learners} does not fit the data, whose {config.learners} sites are a learner each; remove "
            "it, or add --set data.partition=iid"
        )
    fitting = config.replace(learners=learners)
    plan = make_plan(fitting, total_samples=len(train), seed=setup.plan.seed)
    sizes = [len(rows) for rows in shards.split(train, config.data, learners, plan.seed)]
    names = setup.site_names if learners == config.learners else (None,) * learners
    called = [name or str(number) for number, name in enumerate(names)]
    cores = torch.cuda.device_count() if setup.compute.device.type == "cuda" else len(os.sched_getaffinity(0))
    at_once = max(1, min(learners, cores))
    return Forecast(
        learners=learners,
        steps=plan.target_steps,
        steps_per_learner=plan.planned_steps,
        sample_rate=min(1.0, config.batch_size / min(sizes)),
        shares=tuple(_share(plan, name, count) for name, count in zip(called, sizes, strict=True)),
        simulate_s=plan.target_steps * step_s,
        train_s=plan.target_steps * step_s / at_once,
        bytes_per_second=size * at_once / (step_s * learners),
    )


def _share(plan: Plan, name: str, records: int) -> Share:
    config = plan.config
    if not plan.private:
        return Share(learner=name, records=records)
    budget = privacy_plan(
        config.privacy, records=records, batch_size=config.batch_size, planned_steps=plan.planned_steps
    )
    return Share(
        learner=name,
        records=records,
        epsilon=budget.spent_after(budget.max_steps).epsilon,
        noise_multiplier=budget.mechanism.noise_multiplier,
        max_steps=budget.max_steps,
    )


def _measure(setup: Setup) -> tuple[float, int | None]:
    """Seconds of a step, and the memory that a learner takes; on synthetic records and a ledger that is thrown away."""
    config, task = setup.plan.config, setup.task
    count = max(config.batch_size, min(map(len, setup.shards)))
    inputs, targets = task.train.blank()
    records = Records(tree.each(lambda part: synthetic(part, count), inputs), synthetic(targets, count))
    privacy = config.privacy.replace(ledger=None, runs=None)
    alone = config.replace(learners=1, privacy=privacy, seed=None, data=config.data.replace(partition="iid", sizes=()))
    plan = make_plan(alone, total_samples=count)
    with tempfile.TemporaryDirectory() as folder, _peak() as peak:
        site = Site(plan, 0, None, replace(task, train=records))
        learner = make_learner(site, setup.compute, Path(folder))
        try:
            with suited_threads(len(setup.compute.model.weights), config.batch_size):
                learner.rehearse()
                began, steps = time.perf_counter(), 0
                while learner.may_step and steps < MOST_STEPS and time.perf_counter() - began < MEASURED_S:
                    learner.begin()
                    learner.update(learner.gradient())
                    steps += 1
                if setup.compute.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / max(1, steps)
        finally:
            if learner.budget is not None:
                learner.budget.close()
    copies = 3 * learner.state.nbytes  # of an exchange, and of a checkpoint
    return seconds, None if not peak else peak[0] + copies


@contextmanager
def _peak() -> Iterator[list[int]]:
    """By how much the memory of this process grows at most, in bytes; nothing where the system does not tell."""
    grown: list[int] = []
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    before = _resident("VmRSS")
    yield grown
    after = _resident("VmHWM")
    if before is not None and after is not None:
        grown.append(max(0, after - before))


def _resident(name: str) -> int | None:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    return None
