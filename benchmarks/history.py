"""What planning a run costs after many runs on the same ledger, against the first one.

    python benchmarks/history.py [--runs 1000] [--learners 8] [--json]

Every earlier run has a mechanism of its own, so nothing merges. The later run has `learners` sites, each with such a
ledger and another number of records.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

from adp2sgd.config import Privacy
from adp2sgd.privacy.accountant import renyi
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.ledger import Ledger
from adp2sgd.privacy.mechanism import SampledGaussian
from adp2sgd.privacy.plan import plan

NAMES = {"dataset": "benchmark", "site": "one"}


def planned(folder: Path, run: str, privacy: Privacy, learner: int) -> float:
    """Seconds until a learner's budget is open, with nothing cached but the other learners' work."""
    home = folder / str(learner) / run
    home.mkdir(parents=True)
    start = time.perf_counter()
    own = Budget.open(
        folder / str(learner) / "ledger.jsonl",
        privacy,
        **NAMES,
        records=1000 + learner,
        batch_size=50,
        planned_steps=200,
        plan_path=home / "plan.json",
        seeded=False,
    )
    took = time.perf_counter() - start
    with closing(own):
        own.draw()
    return took


def fill(path: Path, runs: int) -> None:
    sync, os.fsync = os.fsync, lambda _: None  # the history is made here, not measured
    with Ledger.open(path, **NAMES) as ledger:
        for number in range(runs):
            ledger.reserve(1, SampledGaussian(20 + number / 100, 0.05))
            ledger.draw()
    os.fsync = sync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    privacy = Privacy(mode="private", epsilon=8.0, delta=1e-5, ledger="unused", runs=4)
    with tempfile.TemporaryDirectory() as scratch:
        folder, learners = Path(scratch), range(chosen.learners)
        first = [planned(folder, "first", privacy, learner) for learner in learners]
        for learner in learners:
            fill(folder / str(learner) / "ledger.jsonl", chosen.runs)
        plan.cache_clear()
        renyi.cache_clear()
        later = [planned(folder, "later", privacy, learner) for learner in learners]
    figures = {
        "earlier_runs": chosen.runs,
        "learners": chosen.learners,
        "first_s": sum(first),
        "later_s": sum(later),
        "ratio": sum(later) / sum(first),
        "later_one_learner_s": later[0],
    }
    print(json.dumps(figures, indent=1) if chosen.json else "  ".join(f"{k} {v:.4g}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
