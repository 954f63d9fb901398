"""Folders of runs for the report's tests: real ones, and large ones in the same format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from adp2sgd import simulate
from adp2sgd.config import Config, Data, Optimizer, Privacy, Speeds, Topology
from adp2sgd.files import to_json
from adp2sgd.run_folder import Folder, LearnerResult, Point, Run

SMALL = Config(
    task="quadratic",
    learners=4,
    epochs=6,
    batch_size=8,
    seed=1,
    device="cpu",
    options={"records": 400, "dimension": 3},
    optimizer=Optimizer(lr=0.1),
    topology=Topology(graph="ring"),
    speeds=Speeds(kind="one-slow", learner=2, factor=4.0),
)
PRIVATE = SMALL.replace(privacy=Privacy(mode="private", epsilon=3.0, delta=1e-5), data=Data(partition="iid"))


def make(path: Path, config: Config = SMALL) -> Path:
    """A real run."""
    simulate(config, path)
    return path


def make_large(path: Path, learners: int = 16, events: int = 100_000) -> Path:
    """As many events as a long run leaves, with a learner that dies and comes back."""
    config = SMALL.replace(learners=learners, seed=None, speeds=Speeds())
    folder = Folder.create(path, config)
    each = events // learners
    random = np.random.default_rng(0)
    for learner in range(learners):
        seconds = np.cumsum(random.gamma(20, 0.005, each))
        starts = np.zeros(each, dtype=int)
        if learner == 5:
            seconds[each // 2 :] += 30.0
            starts[each // 2 :] = 1
        rows = zip(range(1, each + 1), seconds.tolist(), starts.tolist(), strict=True)
        folder.append_events(learner, [_step(step, second, start, learners) for step, second, start in rows])
    curve = tuple(
        Point(global_steps=k, epoch=k / 100, seconds=k / 160, metrics={"loss": 5000 / (k + 1000)}, consensus=1 / k)
        for k in range(1, events, events // 2000)
    )
    folder.write_points(curve)
    folder.write_result(_result(path, curve, learners, each))
    return path


def _step(step: int, seconds: float, start: int, learners: int) -> str:
    event = {"step": step, "global_step": step * learners, "seconds": seconds, "staleness": learners - 1 + step % 3}
    return to_json({**event, "start": start, "gradient_norm": 0.9908556342124939})


def _result(path: Path, curve: tuple[Point, ...], learners: int, steps: int) -> Run:
    told = tuple(
        LearnerResult(
            learner=k, steps=steps, share=1 / learners, staleness_mean=float(learners), staleness_max=learners + 1,
            exchanges=2 * steps, busy=7, unconfirmed=0, bytes_sent=10**6, metrics={"loss": 0.1},
            restarts=int(k == 5), partners={(k + 1) % learners: steps, (k - 1) % learners: steps},
        )
        for k in range(learners)
    )  # fmt: skip
    return Run(
        task="quadratic", algorithm="adpsgd", metrics={"loss": 0.1}, monitor="-loss", clock="real",
        seconds=curve[-1].seconds, global_steps=steps * learners, overshoot=0, epochs=6.0, consensus=0.01,
        seeded=False, guarantee=None,
        guarantee_why="the gradients carry no noise", noise_source="none", learners=told, sites={}, curve=curve,
        notes=(), versions={"torch": "2"}, folder=str(path),
    )  # fmt: skip
