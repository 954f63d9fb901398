"""Cells that train: the paper's recipes, their small forms, and what is kept of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adp2sgd import config
from adp2sgd.engine import simulate
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.theta import mean_of
from adp2sgd.task import Augment
from conftest import ROOT
from made_records import QUICK
from reproduction import convergence, paper, render, tables, training
from reproduction.cells import Choice, measured, run_all
from reproduction.studies import STUDIES


def test_quick_training_learns_and_says_how_each_learner_did(tmp_path: Path) -> None:
    sync = measured(training.cell("table1", "resnet18", "sync", 1.0, 0, QUICK), tmp_path)
    assert sync["accuracy"] > 0.9
    assert len(sync["single_learners"]["accuracy"]) == 4
    assert sync["accuracy_recomputed"] == pytest.approx(sync["accuracy"], abs=0.05)
    assert sync["guarantee"] is None
    private = training.cell("table1", "resnet18", "adpsgd", 2.0, 0, replace(QUICK, private=True, epochs=1.0))
    record = measured(private, tmp_path)
    assert record["guarantee"]["epsilon"] > 0
    assert record["config"]["options"]["norm"] == "group"


def test_statistics_are_recomputed_over_the_records_as_they_are_or_as_training_sees_them(tmp_path: Path) -> None:
    settings = config.Config(task="digits/cnn", options={"norm": "batch"}, learners=2, epochs=1, seed=0, device="cpu")
    simulate(settings, tmp_path / "run")
    setup, theta = prepare(settings), mean_of(training._states(tmp_path / "run", settings)).theta

    def statistics(augment: Augment | None) -> tuple[float, Tensor]:
        loss = training.recomputed(setup, theta, augment)["loss"]
        return loss, setup.compute.model.buffers.clone()

    (plain, means), (same, as_plain) = statistics(None), statistics(lambda batch, _: batch)
    assert (plain, means.tolist()) == (same, as_plain.tolist())
    darker, moved = statistics(lambda batch, _: batch - 1)
    assert darker != plain
    assert not torch.equal(moved, means)
    (noisy, drawn), (again, as_drawn) = (
        statistics(lambda batch, generator: batch + torch.randn(batch.shape, generator=generator)) for _ in range(2)
    )
    assert (noisy, drawn.tolist()) == (again, as_drawn.tolist())  # a cell's figures do not depend on chance


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    cell = training.cell("case3", "resnet18", "sync", 1.0, 0, QUICK, variant="doubled", large_batch=True)
    settings = cell.measure.args[0]  # type: ignore[attr-defined]
    wild = settings.replace(optimizer=settings.optimizer.replace(lr=1e30, schedule=()))
    record = measured(replace(cell, measure=partial(training._measure, wild, False)), tmp_path)
    assert "diverged" in record["diverged"]
    assert record["accuracy"] is None
    assert "diverged" in render.markdown(STUDIES["case3"].tables([record])[0])


def test_the_large_batch_of_case_3_is_the_experiments_configuration() -> None:
    doubled = training.doubled(training.recipe("efficientnet_b0", Choice(device="cpu")))
    given = config.load_config(ROOT / "experiments" / "paper_case3.toml")
    assert (doubled.task, doubled.batch_size) == (given.task, given.batch_size)
    assert doubled.optimizer == given.optimizer


def test_paper_mode_has_momentum_and_plain_sgd_is_labelled(tmp_path: Path) -> None:
    choice = replace(QUICK, epochs=1.0)
    usual, plain = (
        training.cell("table1", "resnet18", "sync", 1.0, 0, replace(choice, momentum=momentum))
        for momentum in (None, 0.0)
    )
    assert [cell.measure.args[0].optimizer.momentum for cell in (usual, plain)] == [0.9, 0.0]  # type: ignore[attr-defined]
    assert usual.name.replace("-momentum0.9", "") == plain.name
    asked = training.cell("table1", "resnet18", "sync", 1.0, 0, replace(choice, momentum=0.9))
    assert asked.identity == usual.identity
    records = run_all([usual, plain], tmp_path, quiet=True, say=lambda _: None)
    assert records[0]["loss"] != records[1]["loss"]
    [table] = STUDIES["table1"].tables(records)
    assert [row[0] for row in table.rows] == ["cnn, plain SGD", "cnn, momentum 0.9"]
    pictures = render.figures(STUDIES["table1"], records, tmp_path / "pictures")
    assert [path.stem for path in pictures] == ["quick-cnn-momentum0.9-epochs1", "quick-cnn-epochs1"]


@pytest.mark.parametrize("model", ["resnet18", "lstm"])
@pytest.mark.parametrize("quick", [True, False])
def test_every_recipe_of_the_paper_has_momentum_and_private_mode_has_none(model: str, quick: bool) -> None:
    for private, momentum in ((False, paper.MOMENTUM), (True, 0.0)):
        choice = Choice(quick=quick, device="cpu", private=private)
        cell = training.cell("study", model, "adpsgd", 1.0, 0, choice)
        assert cell.measure.args[0].optimizer.momentum == momentum  # type: ignore[attr-defined]
        assert cell.identity.get("momentum", 0.0) == momentum
    for case in ("case1", "case2", "case3"):
        assert config.load_config(ROOT / "experiments" / f"paper_{case}.toml").optimizer.momentum == paper.MOMENTUM


def test_a_stretched_schedule_keeps_its_course() -> None:
    for model in ("resnet18", "lstm"):
        full = training.recipe(model, Choice(device="cpu"))
        short = training.stretched(full.optimizer, 0.2)
        for share in (0.0, 0.3, 0.5, 0.6, 0.9, 0.999):
            assert short.rate(0.2 * share * full.epochs) == pytest.approx(full.optimizer.rate(share * full.epochs))


def test_the_papers_sizes_are_the_models() -> None:
    from adp2sgd import models

    for name, known in paper.MODELS.items():
        info = models.describe(name)
        assert (info.parameters, info.mib) == (known.parameters, pytest.approx(known.mib, abs=0.011))


def test_predicted_consensus_by_hand() -> None:
    """Two learners that average at every step, no shard bias: x = w₀ − w₁ is renewed by ±lr·noise at each step."""
    from adp2sgd.engine.setup import prepare

    setup = prepare(convergence._settings("complete", 2, 100, 0.1, 1.0, config.Speeds()))
    means, variance = convergence._shards(setup)
    found = convergence.predicted_consensus(setup, 0.001, 1.0)
    noise = variance / 8 + 10 / 64
    assert found == pytest.approx(0.001**2 * noise / 4, rel=0.01)  # (1/2)·(x/2)²·2, x = lr·noise
    assert abs(means).max() < 0.1


@pytest.mark.processes
def test_real_learners_race_in_real_time(tmp_path: Path) -> None:
    choice = replace(QUICK, processes=True, epochs=0.3)
    cells = [cell for cell in STUDIES["case2"].cells(choice) if cell.identity["variant"] == "slow"]
    records = run_all(cells, tmp_path, quiet=True, say=lambda _: None)
    for record in records:
        assert len(record["curve"]["seconds"]) >= 2
        assert record["curve"]["seconds"][-1] == pytest.approx(record["real_seconds"], abs=0.001)
        assert record["curve"]["seconds"] == sorted(set(record["curve"]["seconds"]))
    found = tables.race({record["cell"]["algorithm"]: record for record in records})
    assert found is not None
    assert 0 < found.sync_s <= records[0]["real_seconds"]
    assert 0 < found.adpsgd_s <= records[1]["real_seconds"]
    assert found.ideal == pytest.approx((3 + 1 / 10) / (4 / 10))


@pytest.mark.parametrize("algorithm", ["sync", "adpsgd"])
def test_bfloat16_trains_as_well(algorithm: str) -> None:
    settings = training.recipe("resnet18", replace(QUICK, epochs=3.0)).replace(algorithm=algorithm, epochs=3.0)
    exact, rough = (simulate(settings.replace(precision=each)) for each in ("float32", "bfloat16"))
    assert exact.loss != rough.loss
    assert rough.accuracy == pytest.approx(exact.accuracy, abs=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_steps_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: the same run with steps recorded as a CUDA graph and with every step launched anew."""
    from adp2sgd import device

    settings = training.recipe("resnet18", QUICK).replace(device="cuda")
    recorded = simulate(settings)
    monkeypatch.setattr(device, "SETTLED", 10**9)
    plain = simulate(settings)
    assert recorded.loss == pytest.approx(plain.loss, rel=1e-3)
