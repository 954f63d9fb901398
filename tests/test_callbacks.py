"""Callbacks: the same in both engines; they may stop a run, which ends with model, result and guarantee."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adp2sgd import EarlyStopping, MLflow, RunStatus, SaveBest, StopRun, TensorBoard, simulate, train
from adp2sgd.config import Config, Optimizer, Privacy, Speeds
from adp2sgd.errors import Adp2sgdWarning, ConfigError
from adp2sgd.run_folder import read_result
from adp2sgd.tasks import resolve

DIGITS = Config(
    task="digits/mlp", learners=2, epochs=20, seed=0, device="cpu", evaluate_every=0.5, optimizer=Optimizer(lr=0.2)
)
PRIVATE = DIGITS.replace(privacy=Privacy(mode="private", epsilon=3.0, delta=1e-4))
REAL = DIGITS.replace(epochs=200, seed=None, speeds=Speeds(step_s=0.005, pad=True))


def after(epoch: float) -> Callable[[RunStatus], None]:
    def stop(status: RunStatus) -> None:
        if status.epoch >= epoch and status.curve:
            raise StopRun("enough")

    return stop


@pytest.mark.parametrize(
    ("engine", "config"), [(simulate, DIGITS), (simulate, DIGITS.replace(algorithm="sync")), (simulate, PRIVATE)]
)
def test_a_stopped_simulation_ends_with_all_that_a_run_leaves(engine: Any, config: Config, tmp_path: Path) -> None:
    run = engine(config, tmp_path / "run", on_status=after(1.0))
    assert 1.0 <= run.epochs < 2.0
    assert (tmp_path / "run/model/weights.safetensors").exists()
    assert read_result(tmp_path / "run") == run
    (note,) = [note for note in run.notes if "callback" in note]
    assert "(enough)" in note
    if config.privacy.mode == "private":
        assert "ε at the cap" in note
        assert run.guarantee.epsilon_spent == run.guarantee.epsilon > run.learners[0].epsilon_spent
    else:
        assert run.guarantee is None


@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ["adpsgd", "sync"])
def test_a_stopped_run_of_processes_ends_with_all_that_a_run_leaves(algorithm: str, tmp_path: Path) -> None:
    seen: list[RunStatus] = []
    run = train(REAL.replace(algorithm=algorithm), tmp_path / "run", on_status=[seen.append, after(1.0)])
    assert 1.0 <= run.epochs < 100
    assert all(each.state == "ended" for each in run.learners)
    assert any("callback stopped the run" in note for note in run.notes)
    assert read_result(tmp_path / "run") == run
    model = resolve(REAL.task, {}).model()
    model.load_state_dict(load_file(tmp_path / "run/model/weights.safetensors"))
    shown = next(status for status in reversed(seen) if status.model is not None)
    assert shown.model is not None
    assert shown.model().keys() == model.state_dict().keys()


@pytest.mark.processes
def test_a_stop_before_the_first_step_waits_for_it(tmp_path: Path) -> None:
    def stop(status: RunStatus) -> None:
        raise StopRun

    run = train(REAL, tmp_path / "run", on_status=stop)
    assert run.epochs < 100
    assert any("no reason given" in note for note in run.notes)


def test_other_errors_of_a_callback_are_the_callers_own(tmp_path: Path) -> None:
    def fail(status: RunStatus) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(PRIVATE, tmp_path / "run", on_status=[lambda _: None, fail])


def test_early_stopping_waits_for_its_patience() -> None:
    """With a learning rate of almost 0 nothing improves by more than `least`."""
    still = DIGITS.replace(optimizer=Optimizer(lr=1e-9))
    run = simulate(still, on_status=EarlyStopping(4, least=0.01, monitor="-loss"))
    assert len(run.curve) == 5
    assert any("4 evaluations without an improvement" in note for note in run.notes)
    learning = simulate(DIGITS.replace(epochs=3), on_status=EarlyStopping(4))
    assert learning.epochs == pytest.approx(3, abs=0.1)
    with pytest.raises(ConfigError, match='monitor = "recall" is not a metric'):
        simulate(DIGITS, on_status=EarlyStopping(monitor="recall"))


def test_the_best_model_is_kept_and_is_as_good_as_said(tmp_path: Path) -> None:
    """The learning rate is so high at the end that the last model is not the best."""
    rough = DIGITS.replace(epochs=3, optimizer=Optimizer(lr=0.2, schedule=((2.0, 50.0),)))
    best = SaveBest(tmp_path / "best.safetensors")
    run = simulate(rough, on_status=best)
    task = resolve(rough.task, {})
    model = task.model()
    model.load_state_dict(load_file(best.path))
    right = model.eval()(task.prepare(task.test.inputs)).argmax(1) == task.test.targets
    assert float(right.double().mean()) == pytest.approx(best.best)
    assert best.best == max(point.accuracy for point in run.curve) > (run.accuracy or 0)


@pytest.mark.parametrize("callback", [EarlyStopping(), SaveBest("unused.safetensors")])
def test_selection_under_privacy_warns(callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(Adp2sgdWarning, match="ε does not cover"):
        simulate(PRIVATE.replace(epochs=1), on_status=callback)


def test_tensorboard_reads_the_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = simulate(DIGITS.replace(epochs=2), on_status=TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    told = {event.step: event.value for event in events.Scalars("theta/accuracy")}
    expected = {point.global_steps: point.accuracy for point in run.curve}
    assert len(told) >= 3
    assert all(value == pytest.approx(expected[step]) for step, value in told.items())


def test_mlflow_reads_the_curve(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run = simulate(DIGITS.replace(epochs=2), on_status=MLflow(tmp_path / "mlruns"))
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("adp2sgd").experiment_id])
    told = {metric.step: metric.value for metric in client.get_metric_history(kept.info.run_id, "theta/accuracy")}
    expected = {point.global_steps: point.accuracy for point in run.curve}
    assert len(told) >= 3
    assert all(value == pytest.approx(expected[step]) for step, value in told.items())
    assert kept.data.params["task"] == DIGITS.task


def test_the_names_of_a_model_need_no_loading() -> None:
    """Also for tied weights, frozen ones and buffers; the model itself stays as it is."""
    from adp2sgd.engine.setup import prepare

    setup = prepare(Config(task="digits/cnn", learners=1, seed=0, device="cpu", options={"norm": "batch"}))
    model = setup.compute.model
    theta = torch.randn(len(model.weights) + len(model.buffers))
    before = model.weights.clone()
    named = setup.compute.named(theta)
    assert torch.equal(model.weights, before)
    model.load(theta)
    assert named.keys() == model.module.state_dict().keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in model.module.state_dict().items())
