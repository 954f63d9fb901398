"""Configuration → task, shards, graph and learners, alike for every engine."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adp2sgd import topology
from adp2sgd.config import Config
from adp2sgd.data import shards
from adp2sgd.data.batches import Batches, PoissonBatches, ReshuffledBatches
from adp2sgd.engine.evaluate import evaluate
from adp2sgd.errors import ConfigError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.privatize import GradientStep, PlainStep
from adp2sgd.learner import Learner
from adp2sgd.privacy.streams import Streams
from adp2sgd.progress import Progress
from adp2sgd.record import LearnerResult, Point, Run, versions
from adp2sgd.task import Task, resolve

NO_GUARANTEE = {
    "none": "the gradients carry no noise",
    "paper": "the paper's noise is added to gradients that are not clipped, so one record's influence is unbounded",
}


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that the engines share before the first step."""

    config: Config
    seed: int  # of what is public: partition, initial weights, partners, delays
    device: torch.device
    task: Task
    shards: tuple[Tensor, ...]
    graph: topology.Graph
    model: FlatModel
    steps_per_epoch: float
    target_steps: int  # all learners together; the same for SYNC and ADPSGD
    notes: tuple[str, ...] = ()

    def epoch(self, global_steps: int) -> float:
        return global_steps / self.steps_per_epoch


def prepare(config: Config, seed: int | None = None) -> Setup:
    """Load the task, split its records and build the model, all from the public seed (the configuration's if it has
    one, else the given one of a run that resumes, else a fresh one)."""
    if config.seed is not None:
        seed = config.seed
    elif seed is None:
        seed = secrets.randbits(32)
    device = pick_device(config.device)
    graph = topology.build(config.topology, config.learners, seed)
    task = resolve(config.task, config.options)
    rows = shards.split(task.train, config.data, config.learners, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FlatModel(task.model(), device)
    steps_per_epoch = len(task.train) / config.batch_size
    rounds = math.ceil(config.epochs * steps_per_epoch / config.learners - 1e-9)
    return Setup(config, seed, device, task, rows, graph, model, steps_per_epoch, max(1, rounds) * config.learners)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device = "{name}" is unknown; use auto, cpu, cuda or cuda:N') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device = "{name}" but this machine has no usable GPU; use device = "cpu"')
    return device


def make_learner(setup: Setup, number: int, folder: Path, *, start: int = 0) -> Learner:
    """Learner `number`, at the initial weights; its ledger lies in `folder`."""
    config = setup.config
    streams = Streams(config.seed, number)
    records = setup.task.train.take(setup.shards[number]).to(setup.device)
    return Learner(
        number=number,
        task=setup.task,
        model=setup.model,
        records=records,
        batches=_batches(config, len(records), streams),
        gradient_step=_gradient_step(setup),
        optimizer=config.optimizer,
        progress=Progress(number, start, limit=setup.target_steps),
        steps_per_epoch=setup.steps_per_epoch,
        streams=streams,
    )


def _batches(config: Config, records: int, streams: Streams) -> Batches:
    kind = ReshuffledBatches if config.privacy.mode == "paper" else PoissonBatches
    return kind(records, config.batch_size, streams)


def _gradient_step(setup: Setup) -> GradientStep:
    privacy = setup.config.privacy
    return PlainStep(setup.task.loss, privacy.sigma or 0.0)


def finish(
    setup: Setup,
    learners: Sequence[Learner],
    results: tuple[LearnerResult, ...],
    curve: tuple[Point, ...],
    *,
    theta: Tensor,
    clock: str,
    folder: str,
) -> Run:
    """What a run reports, from what its learners did."""
    config, last = setup.config, curve[-1]
    return Run(
        task=config.task,
        algorithm=config.algorithm,
        accuracy=last.accuracy,
        loss=last.loss,
        seconds=last.seconds,
        clock=clock,
        global_steps=last.global_steps,
        overshoot=max(0, last.global_steps - setup.target_steps),
        epochs=last.epoch,
        consensus=last.consensus,
        seeded=config.seed is not None,
        guarantee="none",
        guarantee_why=NO_GUARANTEE.get(config.privacy.mode),
        noise_source=learners[0].noise_source,
        learners=results,
        sites=_by_site(setup, theta),
        curve=curve,
        notes=setup.notes,
        versions=versions(),
        folder=folder,
    )


def _by_site(setup: Setup, theta: Tensor) -> dict[str, dict[str, float | int | None]]:
    sites, names = setup.task.test.sites, setup.task.test.site_names
    if sites is None:
        return {}
    figures = {}
    for number, name in enumerate(names):
        rows = torch.nonzero(sites == number).flatten()
        if len(rows):
            metrics = evaluate(setup.model, setup.task, theta, rows)
            figures[name] = {"accuracy": metrics.accuracy, "loss": metrics.loss, "records": len(rows)}
    return figures
