"""The descent on one vector: torch's rules to the bit, schedules, the exponential average, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adp2sgd.config import Config, Optimizer
from adp2sgd.engine import checkpoint, simulate
from adp2sgd.engine.simulation.simulate import Simulation
from adp2sgd.errors import ConfigError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.privatize import Gradient
from adp2sgd.learner import Learner
from adp2sgd.run_folder import Folder
from adp2sgd.tasks import resolve
from conftest import make_learner

ADAM: dict[str, Any] = {"kind": "adam", "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01}
TORCH: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, ADAM),
    "adamw": (torch.optim.AdamW, {**ADAM, "kind": "adamw"}),
}


def step(learner: Learner) -> None:
    learner.begin()
    learner.update(learner.gradient())


@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("name", ["quadratic", "digits/cnn"])
def test_a_lone_learner_is_torchs_optimizer_to_the_bit(kind: str, name: str) -> None:
    task = resolve(name, {})
    optimizer, options = TORCH[kind]
    torch.manual_seed(5)
    learner = make_learner(0, task, **options)
    torch.manual_seed(5)
    reference = task.model()
    plain = optimizer(reference.parameters(), **{key: value for key, value in options.items() if key != "kind"})
    for _ in range(20):
        learner.begin()
        batch = task.train.take(learner.sampler.rows)
        learner.update(learner.gradient())
        plain.zero_grad()
        assert len(batch)
        task.loss(reference(task.prepare(batch.inputs)), batch.targets).sum().backward()
        for parameter in reference.parameters():
            parameter.grad /= 10
        plain.step()
    assert torch.equal(learner.weights, FlatModel(reference).weights)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.0, 0.4, 0.4, 0.4, 0.4]), ("linear", [0, 0.4, 0.3, 0.2, 0]), ("cosine", [0, 0.4, 0.3414, 0.2, 0])],
)
def test_named_schedules_follow_the_warm_up_and_end_with_the_run(schedule: str, expected: list[float]) -> None:
    settings = Optimizer(lr=0.4, schedule=schedule, warmup={"epochs": 2})  # type: ignore[arg-type]
    assert [round(settings.rate(epoch, 10), 4) for epoch in (0, 2, 4, 6, 10)] == expected
    assert settings.rate(1, 10) == 0.2
    assert settings.rate(11, 10) == settings.rate(10, 10)  # overshoot


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "lion"}, 'optimizer.kind = "lion" is unknown.*sgd, adam, adamw'),
        ({"schedule": "cosin"}, 'optimizer.schedule = "cosin" is unknown.*constant, linear, cosine'),
        ({"schedule": "cosine", "decay": 0.9}, "exclude each other"),
        ({"kind": "adam", "momentum": 0.9}, "set optimizer.betas"),
        ({"betas": (0.9, 1.0)}, "optimizer.betas"),
        ({"ema": 1.0}, "optimizer.ema = 1.0"),
        ({"eps": 0.0}, "optimizer.eps = 0.0"),
    ],
)
def test_what_is_impossible_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Optimizer(**wrong)


def test_the_schedule_is_that_of_global_progress() -> None:
    """`make_learner` has 5 steps per epoch, and no last epoch unless one is given."""
    learner = make_learner(0, schedule=((1.0, 0.5),))
    for _ in range(5):
        learner.update(Gradient(torch.ones_like(learner.weights)))
    before = learner.weights.clone()
    learner.update(Gradient(torch.ones_like(learner.weights)))
    assert torch.allclose(before - learner.weights, torch.full_like(before, 0.5))


def test_the_exponential_average_is_what_is_evaluated_and_exported() -> None:
    settings = Config(
        task="digits/mlp", learners=2, epochs=2, seed=0, device="cpu", optimizer=Optimizer(lr=0.5, ema=0.9)
    )
    plain = settings.replace(optimizer=Optimizer(lr=0.5))
    averaged, last = simulate(settings), simulate(plain)
    assert averaged.loss != last.loss
    assert averaged.learners[0].steps == last.learners[0].steps
    learner = make_learner(0, ema=0.75)
    expected = learner.state.clone()
    for number in range(1, 40):
        step(learner)
        decay = min(0.75, number / (number + 9))
        expected = decay * expected + (1 - decay) * learner.state
    assert torch.allclose(learner.evaluated(), expected, rtol=1e-12)
    assert not torch.allclose(learner.evaluated(), learner.snapshot())


@pytest.mark.parametrize("kind", TORCH)
def test_another_learners_model_comes_without_a_past(kind: str) -> None:
    learner = make_learner(0, **TORCH[kind][1], ema=0.9)
    fresh = make_learner(0, **TORCH[kind][1], ema=0.9)
    for _ in range(5):
        step(learner)
    assert any(bool(value.any()) for value in learner.optimizer.state.values())
    model = torch.randn_like(learner.state)
    learner.adopt(model)
    fresh.state.copy_(model)
    assert torch.equal(learner.evaluated(), model)
    for each in (learner, fresh):
        each.update(Gradient(torch.ones_like(model)))
    assert torch.equal(learner.state, fresh.state)
    assert bool(learner.optimizer.state.get("steps", torch.ones(())) == 1)


@pytest.mark.parametrize("kind", TORCH)
def test_a_checkpoint_restores_the_optimizer_to_the_bit(kind: str, tmp_path: Path) -> None:
    options = {**TORCH[kind][1], "ema": 0.9}
    whole, again = make_learner(0, **options), make_learner(0, **options)
    for _ in range(7):
        step(whole)
    (tmp_path / "run").mkdir()
    folder = Folder(tmp_path / "run")
    checkpoint.save(folder, whole, whole.snapshot(), {})
    saved = checkpoint.load(folder, 0)
    assert saved is not None
    checkpoint.restore(again, saved)
    again.steps = whole.steps
    for learner in (whole, again):
        for _ in range(7):
            step(learner)
    assert torch.equal(whole.state, again.state)
    assert torch.equal(whole.evaluated(), again.evaluated())


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_simulation_resumes_with_the_optimizers_state(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = Optimizer(kind=kind, lr=0.01, weight_decay=0.01, ema=0.9, schedule="cosine")
    settings = Config(
        task="digits/mlp", learners=3, epochs=1, seed=0, device="cpu", checkpoint_every=0.2, optimizer=optimizer
    )
    whole = simulate(settings, tmp_path / "whole")
    done, advance = 0, Simulation._step_done

    def fail(self: Simulation, member: object) -> None:
        nonlocal done
        done += 1
        if done == 30:
            raise OSError("power cut")
        advance(self, member)  # type: ignore[arg-type]

    monkeypatch.setattr(Simulation, "_step_done", fail)
    with pytest.raises(OSError, match="power cut"):
        simulate(settings, tmp_path / "parts")
    monkeypatch.undo()
    resumed = simulate(settings, tmp_path / "parts", resume=True)
    assert done == 30
    assert math.isfinite(resumed.loss or math.nan)
    assert (resumed.loss, resumed.consensus) == (whole.loss, whole.consensus)
