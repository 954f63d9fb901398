"""A plan needs no record, and a site only its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch

from adp2sgd.config import Config, Data, Optimizer, Privacy
from adp2sgd.data.batches import PoissonBatches
from adp2sgd.engine.plan import make_plan
from adp2sgd.engine.setup import prepare
from adp2sgd.randomness.streams import Streams

CONFIG = Config(
    task="heart/logistic",
    learners=4,
    epochs=2,
    batch_size=8,
    seed=3,
    device="cpu",
    data=Data(partition="site"),
    optimizer=Optimizer(lr=0.5),
    privacy=Privacy(mode="private", noise_multiplier=1.0, delta=1e-4),
)
ONE_SITE = """
import sys
from pathlib import Path
import torch
from adp2sgd.config import load_config
from adp2sgd.engine.compute import Compute
from adp2sgd.engine.plan import make_plan
from adp2sgd.engine.site import Site, make_learner
from adp2sgd.tasks import resolve

config, total, number = load_config(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
name, out = sys.argv[4], Path(sys.argv[5])
task = resolve(config.task, {**config.options, "hospitals": (name,)})
plan = make_plan(config, total_samples=total)
site = Site(plan, number, name, task)
learner = make_learner(site, Compute(plan, task, torch.device("cpu"), largest_shard=len(task.train)), out)
for _ in range(10):
    learner.begin()
    learner.update(learner.gradient())
learner.budget.close()
torch.save(learner.weights, out / "weights.pt")
"""


def test_a_plan_is_made_without_any_record() -> None:
    plan = make_plan(CONFIG, total_samples=699)
    assert plan.steps_per_epoch == 699 / 8
    assert plan.target_steps % 4 == 0
    assert plan.planned_steps == plan.target_steps / 4
    assert plan.graph.neighbours[0] == (1, 3)


def test_a_site_trains_where_no_other_sites_records_are(real_data: Callable[[str], Path], tmp_path: Path) -> None:
    """In a process of its own, with the other hospitals' files deleted: the same weights as where all are there."""
    folder = tmp_path / "data"
    copytree(real_data("heart"), folder)
    config = CONFIG.replace(options={"data_dir": str(folder)})
    whole = prepare(config)
    (tmp_path / "all").mkdir()
    together = whole.learner(2, tmp_path / "all")
    for _ in range(10):
        together.begin()
        together.update(together.gradient())
    assert together.budget is not None
    together.budget.close()
    for other in ("cleveland", "hungarian", "va"):
        (folder / "heart_disease" / f"processed.{other}.data").unlink()
    (tmp_path / "run.toml").write_text(config.to_toml())
    (tmp_path / "alone").mkdir()
    arguments = [tmp_path / "run.toml", whole.plan.total_samples, 2, "switzerland", tmp_path / "alone"]
    subprocess.run([sys.executable, "-c", ONE_SITE, *map(str, arguments)], check=True, timeout=120)
    alone = torch.load(tmp_path / "alone" / "weights.pt")
    assert torch.equal(alone, together.weights)
    ledgers = [(tmp_path / name / "ledger.jsonl").read_text().count("reserve") for name in ("all", "alone")]
    assert ledgers[0] == ledgers[1] > 0


def test_a_declared_number_of_records_fixes_rate_and_divisor_whatever_the_true_number() -> None:
    for records in (80, 120):
        batches = PoissonBatches(records, 16, Streams(0, 0), declared=100)
        assert (batches.rate, batches.expected) == (0.16, 16.0)
        drawn = sum(len(batches.draw(step)) for step in range(400)) / 400
        assert drawn == pytest.approx(0.16 * records, rel=0.05)  # five standard errors
