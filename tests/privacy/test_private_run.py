"""Private runs end to end: what they promise, caps, kills, seeds."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adp2sgd.config import Config, Data, Optimizer, Privacy, Speeds
from adp2sgd.engine import simulate
from adp2sgd.privacy import ledger
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.mechanism import SampledGaussian
from conftest import adp2sgd
from private_run import PRIVATE


def test_each_learner_reports_the_privacy_of_its_own_steps(tmp_path: Path) -> None:
    run = simulate(PRIVATE.replace(speeds=Speeds(kind="one-slow", factor=10)), tmp_path / "run")
    slow, *fast = run.learners
    assert all(each.epsilon_spent > slow.epsilon_spent for each in fast)
    assert run.guarantee.epsilon == max(each.epsilon for each in run.learners)
    assert run.guarantee.epsilon_spent == max(each.epsilon_spent for each in run.learners)
    step = SampledGaussian(2.0, 20 / 200)
    for each in run.learners:
        assert each.epsilon_spent == pytest.approx(epsilon(step, each.steps, 1e-4).epsilon)
        assert each.epsilon == pytest.approx(epsilon(step, each.max_steps, 1e-4).epsilon)
        assert each.max_steps == math.ceil(40 * 1.25)
        held = ledger.read(tmp_path / f"run/learner-{each.learner}/ledger.jsonl")
        assert dict(held.spent().parts) == {step: each.steps}
    assert "not this run" in str(run.guarantee)
    assert run.seeded


def test_a_budget_stops_each_learner_at_its_cap_and_averaging_goes_on() -> None:
    """ε = 8 at z = 2 and rate .08192 is 1,412 steps; the learner that is four times slower gets there too."""
    settings_ = Config(
        task="quadratic",
        learners=2,
        epochs=500,
        batch_size=256,
        seed=0,
        device="cpu",
        evaluate_every=1000,
        checkpoint_every=0,
        options={"records": 2 * 3125, "dimension": 2},
        optimizer=Optimizer(lr=0.01),
        speeds=Speeds(kind="one-slow", factor=4),
        privacy=Privacy(mode="private", epsilon=8.0, noise_multiplier=2.0, delta=1e-5, clip_norm=1.0),
    )
    run = simulate(settings_)
    assert [each.steps for each in run.learners] == [1412] * 2
    assert [each.max_steps for each in run.learners] == [1412] * 2
    assert all(7.9 < each.epsilon_spent <= 8.0 for each in run.learners)
    assert run.learners[1].exchanges > 4 * 1412  # the fast one went on averaging while the slow one trained


def test_sync_goes_on_with_a_learner_that_has_spent_its_budget() -> None:
    uneven = PRIVATE.replace(
        algorithm="sync",
        data=Data(sizes=(1, 4, 4, 4)),
        privacy=Privacy(mode="private", epsilon=2.0, noise_multiplier=2.0, delta=1e-4),
    )
    run = simulate(uneven)
    assert run.learners[0].steps == run.learners[0].max_steps < run.learners[1].steps
    assert max(each.epsilon for each in run.learners) <= 2.0


def test_epsilon_alone_calibrates_noise_for_the_planned_steps_with_headroom() -> None:
    run = simulate(PRIVATE.replace(privacy=Privacy(mode="private", epsilon=3.0, delta=1e-4, headroom=1.5)))
    assert all(each.max_steps == 60 for each in run.learners)
    assert all(2.99 < each.epsilon <= 3.0 for each in run.learners)
    assert run.guarantee.epsilon_spent < 2.9


def test_the_papers_noise_and_no_noise_say_that_they_guarantee_nothing() -> None:
    for privacy in (Privacy(mode="paper", sigma=1.0), Privacy()):
        run = simulate(PRIVATE.replace(privacy=privacy, epochs=1))
        assert run.guarantee is None
        assert run.guarantee_why
        assert all(each.epsilon is None for each in run.learners)


def test_a_seeded_private_run_repeats_and_an_unseeded_one_does_not(tmp_path: Path) -> None:
    assert simulate(PRIVATE).loss == simulate(PRIVATE).loss
    unseeded = PRIVATE.replace(seed=None)
    first_run, second_run = simulate(unseeded), simulate(unseeded)
    assert first_run.loss != second_run.loss
    assert "entropy" in first_run.noise_source
    assert "not this run" not in str(first_run.guarantee)


def test_privacy_costs_nothing_more_with_momentum_decay_or_partners() -> None:
    plain = simulate(PRIVATE.replace(optimizer=Optimizer(lr=0.1)))
    rich = simulate(PRIVATE)
    assert plain.guarantee.epsilon == rich.guarantee.epsilon


@pytest.mark.parametrize("seed", [0, None])
def test_kill_9_in_the_middle_of_a_block_never_hides_a_draw(seed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(PRIVATE.replace(seed=seed, epochs=20, checkpoint_every=0.2).to_toml())
    command = [sys.executable, "-m", "adp2sgd", "simulate", str(path), "--out", str(tmp_path / "run"), "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 90
    while not (tmp_path / "run/simulation.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(seed or 1).uniform(0.05, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "run/result.json").exists()
    held = [dict(ledger.read(p).spent().parts) for p in sorted(tmp_path.glob("run/learner-*/ledger.jsonl"))]
    assert all(sum(each.values()) > 0 for each in held)
    resumed = adp2sgd("simulate", "--resume", str(tmp_path / "run"), "--json", "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    run = json.loads(resumed.stdout)
    for number, each in enumerate(run["learners"]):
        after = sum(dict(ledger.read(tmp_path / f"run/learner-{number}/ledger.jsonl").spent().parts).values())
        if seed is None:  # the lost block counts as spent, on top of all steps that the result knows
            assert after >= each["steps"]
            assert after >= sum(held[number].values())
            assert after <= each["max_steps"]
        else:  # the same draws, repeated: charged once
            assert after == each["steps"]


def test_digits_learn_privately() -> None:
    """The README's claim: 4 learners, at least 88 % at ε ≤ 3.3 and δ = 1e-4."""
    from adp2sgd.cli.demo import PRIVATE_DIGITS

    run = simulate(PRIVATE_DIGITS)
    assert run.guarantee.epsilon <= 3.3
    assert run.accuracy is not None
    assert run.accuracy >= 0.88
