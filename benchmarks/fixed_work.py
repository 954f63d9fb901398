"""What `privacy.fixed_work` costs, and what the time of a step still tells of its batch.

    python benchmarks/fixed_work.py [--task digits/mlp] [--batch 64] [--clipper auto] [--steps 300] [--wall] [--json]

One learner without it and one with it take steps in turns in one process. Time is the process's CPU time, or with
`--wall` the clock on the wall, from the draw of a batch to its noisy gradient. `correlation` is that of the ranks of
time and records drawn; for independent ones it is within 2/√steps of zero 19 times out of 20. `ratio` is of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from adp2sgd.config import Config, Privacy
from adp2sgd.engine.setup import make_learner, prepare
from adp2sgd.learner import Learner


def learner_for(chosen: argparse.Namespace, folder: Path, *, fixed: bool) -> Learner:
    privacy = Privacy(mode="private", epsilon=3.0, delta=1e-5, clipper=chosen.clipper, fixed_work=fixed)
    config = Config(task=chosen.task, learners=1, batch_size=chosen.batch, epochs=1000, device="cpu", privacy=privacy)
    folder.mkdir()
    return make_learner(prepare(config), 0, folder)


def measure(learners: dict[bool, Learner], steps: int, *, wall: bool) -> dict[bool, list[tuple[int, float]]]:
    """Records drawn and seconds of each step, for each learner."""
    clock = time.perf_counter if wall else time.process_time
    found: dict[bool, list[tuple[int, float]]] = {fixed: [] for fixed in learners}
    for step in range(steps + 10):  # the first ten warm up
        for fixed, learner in learners.items():
            began = clock()
            learner.begin()
            learner.gradient()
            took = clock() - began
            learner.steps += 1
            if step >= 10:
                drawn = learner.sampler.batches.counted(learner.sampler.rows)
                found[fixed].append((len(learner.sampler.rows) if drawn is None else drawn, took))
    return found


def correlation(steps: list[tuple[int, float]]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr([drawn for drawn, _ in steps], [took for _, took in steps]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits/mlp")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--clipper", default="auto", choices=["auto", "loop"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        learners = {fixed: learner_for(chosen, Path(scratch) / str(fixed), fixed=fixed) for fixed in (False, True)}
        found = measure(learners, chosen.steps, wall=chosen.wall)
    medians = {fixed: statistics.median(took for _, took in steps) for fixed, steps in found.items()}
    result = {
        "task": chosen.task,
        "clipper": chosen.clipper,
        "batch": chosen.batch,
        "rows": learners[True].sampler.batches.rows,
        "correlation": {str(fixed): correlation(steps) for fixed, steps in found.items()},
        "ms": {str(fixed): 1e3 * median for fixed, median in medians.items()},
        "ratio": medians[True] / medians[False],
    }
    if chosen.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{chosen.task}, {chosen.clipper}: batches of {chosen.batch} in steps of {result['rows']} rows")
    for fixed, steps in found.items():
        name = "fixed work" if fixed else "as drawn"
        print(f"{name:12} {1e3 * medians[fixed]:8.2f} ms, correlation of time and batch {correlation(steps):+.3f}")
    print(f"ratio {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
