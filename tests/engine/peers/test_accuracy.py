"""Four hospitals over TLS learn as well as the one-machine engine: 20 paired seeds on the heart data."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hospitals import NAMES, Hospitals, fixture_hospitals, fixture_made_data  # noqa: F401
from safetensors.torch import load_file

from adp2sgd import config, engine
from adp2sgd.engine.evaluate import evaluate
from adp2sgd.flat import FlatModel
from adp2sgd.tasks import resolve

SEEDS = 20
T_95 = 1.729  # one-sided, 19 degrees of freedom: false alarms in 5 % of runs if the true difference is the limit
LIMIT = -0.015
EPOCHS = 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_sites_are_as_accurate_as_the_one_machine_engine(
    hospitals: Callable[..., Hospitals], real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    data = real_data("heart")
    task = resolve("heart/logistic", {"data_dir": str(data)})

    def by_sites(seed: int) -> float:
        run = {"epochs": EPOCHS, "consortium": {"total_samples": len(task.train), "init_seed": seed}}
        made = hospitals(f"seed-{seed}", data=data, **run)
        made.start()
        made.wait()
        model = FlatModel(task.model())
        accuracies = []
        for name in NAMES:
            model.module.load_state_dict(load_file(made.folder(name) / "model.safetensors"))
            found = evaluate(model, task, torch.cat([model.weights, model.buffers]).clone())
            accuracies.append(float(found["accuracy"] or 0.0))
        return statistics.mean(accuracies)

    def by_one_machine(seed: int) -> float:
        settings = config.Config(
            task="heart/logistic", learners=4, epochs=EPOCHS, batch_size=16, seed=seed, device="cpu",
            evaluate_every=EPOCHS, options={"data_dir": str(data)}, data=config.Data(partition="site"),
            topology=config.Topology(graph="complete"), optimizer=config.Optimizer(lr=0.1),
        )  # fmt: skip
        run = engine.train(settings)
        assert run.accuracy is not None
        return run.accuracy

    pairs = [(by_sites(seed), by_one_machine(seed)) for seed in range(SEEDS)]
    differences = [sites - machine for sites, machine in pairs]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / SEEDS**0.5
    figures = {
        "sites": statistics.mean(sites for sites, _ in pairs), "machine": statistics.mean(each for _, each in pairs),
        "difference": mean, "lower": mean - T_95 * error, "pairs": pairs,
    }  # fmt: skip
    if (keep := os.environ.get("ADP2SGD_TEST_FIGURES")) is not None:
        Path(keep).write_text(json.dumps(figures, indent=1))
    assert figures["lower"] > LIMIT, figures
