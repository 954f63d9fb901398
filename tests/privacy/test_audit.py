"""Audits: what an adversary really learns from what a run publishes, against what the run claims.

White box: one run holds many canaries in orthogonal directions, so that each coordinate of the published model is an
experiment of its own: with its canary, or without one. Black box: many short runs, each with the canary or without it.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta, binom, kstest, norm
from torch import Tensor, nn

from adp2sgd.config import Config, Optimizer, Privacy
from adp2sgd.data.records import Records
from adp2sgd.engine.setup import Setup, prepare
from adp2sgd.engine.simulation.simulate import Asynchronous, simulate
from adp2sgd.gradient import loop
from adp2sgd.model_folder import load_model
from adp2sgd.privacy.calibrate import noise_for
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.run_folder import SCRATCH, Folder
from adp2sgd.task import Task

CLIP = 0.5
FRESH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of run folders: not on a slow disk


def itself(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient is the same at all weights."""
    return outputs


def as_stored(inputs: Tensor) -> Tensor:
    return inputs


def unlabelled(model: Callable[[], nn.Module], inputs: Tensor) -> Task:
    whole = Records(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    held_out = whole.take(torch.arange(2))
    return Task(model=model, train=whole, test=held_out, loss=itself, prepare=as_stored)


# ---------------------------------------------------------------- white box


class Canaries(nn.Module):
    """Record i reads row i of two tables: its gradient, of norm 100, lies in its own direction and in two tensors."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(rows, 1), nn.Embedding(rows, 1)
        for table in (self.first, self.second):
            nn.init.zeros_(table.weight)

    def forward(self, number: Tensor) -> Tensor:
        out: Tensor = (60 * self.first(number) + 80 * self.second(number)).squeeze(1)
        return out


def canaries(count: int) -> Task:
    """Canaries 0, 2, 4 …: the directions between them are those of canaries that are missing."""
    return unlabelled(lambda: Canaries(2 * count), 2 * torch.arange(count))


@dataclass(frozen=True)
class Released:
    """One figure per direction, in units of the noise's stated standard deviation: the sum over all steps."""

    present: NDArray[np.float64]
    missing: NDArray[np.float64]

    @property
    def separation(self) -> tuple[float, float]:
        """d′, the shift of the mean over the standard deviation without the canary, and its standard error."""
        n, spread = len(self.present), float(self.missing.std(ddof=1))
        found = float(self.present.mean() - self.missing.mean()) / spread
        means = (float(self.present.var(ddof=1)) / spread**2 + 1) / n
        return found, math.sqrt(means + found**2 / (2 * n))


def published(folder: Path, count: int, *, rate: float, steps: int, noise: float, clipper: str = "auto") -> Released:
    """Runs `simulate` and reads the noised sum of all its steps from the published model."""
    settings = Config(
        task=f"{__name__}:canaries",
        options={"count": count},
        learners=1,
        batch_size=round(rate * count),
        epochs=rate * steps,
        seed=11,
        device="cpu",
        evaluate_every=1e9,
        checkpoint_every=0,
        optimizer=Optimizer(lr=1.0),
        privacy=Privacy(
            mode="private", noise_multiplier=noise, delta=1e-9, clip_norm=CLIP, headroom=1.0, clipper=clipper
        ),
    )
    run = simulate(settings, folder)
    assert run.learners[0].steps == run.learners[0].max_steps == steps
    model = load_model(folder, task=settings.task).module
    assert isinstance(model, Canaries)
    weights = -(0.6 * model.first.weight + 0.8 * model.second.weight).detach().double().flatten().numpy()
    sums = weights * settings.batch_size / (noise * CLIP)  # lr 1, from zero: the model is minus the mean gradients
    return Released(sums[0::2], sums[1::2])


def assert_as_claimed(found: Released, *, rate: float, steps: int, noise: float, error: float) -> None:
    """d′ of the sum of all steps: `rate`·√steps/noise. All limits are three standard errors (false alarms 0.3 %)."""
    separation, own_error = found.separation
    claimed = rate * math.sqrt(steps) / noise
    assert own_error <= error * claimed
    assert abs(separation - claimed) <= 3 * own_error
    n, spread = len(found.missing), math.sqrt(steps)
    assert abs(float(found.missing.mean())) <= 3 * spread / math.sqrt(n)
    assert abs(float(found.missing.std()) / spread - 1) <= 3 / math.sqrt(2 * n)

    def mixture(x: NDArray[np.float64]) -> Any:
        draws = range(steps + 1)
        return sum(binom.pmf(k, steps, rate) * norm.cdf(x, loc=k / noise, scale=spread) for k in draws)

    assert kstest(found.present, mixture).pvalue > 1e-3
    assert kstest(found.missing, norm(scale=spread).cdf).pvalue > 1e-3


SAMPLED = {"rate": 0.5, "steps": 1, "noise": 0.1}


@pytest.mark.parametrize(
    ("count", "case"),
    [
        (65_536, {"rate": 1.0, "steps": 1, "noise": 0.5}),
        (65_536, {"rate": 1.0, "steps": 2, "noise": 0.7}),
        (120_000, SAMPLED),
    ],
    ids=["one step", "two steps", "sampled"],
)
def test_the_published_model_separates_as_claimed_to_four_parts_in_a_thousand(
    count: int, case: dict[str, Any], tmp_path: Path
) -> None:
    found = published(tmp_path / "run", count, **case)
    assert_as_claimed(found, **case, error=0.004)


@pytest.mark.parametrize("case", [{"rate": 0.25, "steps": 6, "noise": 0.4}, {"rate": 1.0, "steps": 1, "noise": 0.5}])
@pytest.mark.parametrize("clipper", ["auto", "loop"])
def test_the_published_model_separates_as_claimed(clipper: str, case: dict[str, Any], tmp_path: Path) -> None:
    found = published(tmp_path / "run", 2_000, **case, clipper=clipper)
    assert_as_claimed(found, **case, error=0.05)


def weaker_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NoiseSource.add_normal
    monkeypatch.setattr(
        NoiseSource, "add_normal", lambda self, vector, scale, **to: honest(self, vector, 0.98 * scale, **to)
    )


def larger_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = loop.clip_factors
    for module in ("loop", "functional", "bookkeeping"):
        monkeypatch.setattr(f"adp2sgd.gradient.{module}.clip_factors", lambda n, c, d: honest(n, 1.02 * c, d))


def more_records(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NoiseSource.members
    monkeypatch.setattr(NoiseSource, "members", lambda self, n, rate: honest(self, n, min(1.0, 1.02 * rate)))


@pytest.mark.parametrize("bug", [weaker_noise, larger_clip, more_records])
def test_the_white_box_audit_catches_two_percent(bug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    found = published(tmp_path / "run", 120_000, **SAMPLED)
    with pytest.raises(AssertionError):
        assert_as_claimed(found, **SAMPLED, error=0.004)


# ---------------------------------------------------------------- black box

RECORDS, STEPS, DELTA = 6, 2, 0.04
ERROR = 0.005  # of each of two bounds: together 99 %


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


def lines(canary: bool) -> Task:
    """Nothing but the canary has a gradient, and that lies in one direction: nobody could see it more clearly."""
    inputs = torch.zeros(RECORDS, 2)
    inputs[0, 0] = -100.0 if canary else 0.0
    return unlabelled(Line, inputs)


def outcomes(setup: Setup, claim: float, seeds: range) -> Iterator[float]:
    """Of one short run for each seed: where the published model lies in the canary's direction.

    `setup` is that of `simulate`; it is made once, since its checks of model and task are the same for all runs.
    """
    initial = setup.compute.model.weights.clone()
    for seed in seeds:
        setup.compute.model.load(initial)
        plan = replace(setup.plan, config=setup.plan.config.replace(seed=seed), seed=seed)
        compute = copy(setup.compute)  # shares the model and the settled gradient clipper
        compute.plan = plan
        own = replace(setup, plan=plan, compute=compute)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=FRESH) as folder:
            home = Folder.create(f"{folder}/run", own.plan.config)
            with closing(Asynchronous(own, home, lambda _: None)) as simulation:
                simulation.enlist()
                simulation.start()
                run = simulation.run()
            assert run.learners[0].steps == STEPS
            assert 0.99 * claim < run.guarantee.epsilon <= claim
            yield float(home.load_tensors("model/weights.safetensors")[0]["weight"][0])


def lower_bound(hits: int, of: int, false_alarms: int, out_of: int) -> float:
    """ε that a test with these results proves at DELTA, with 99 % confidence (Clopper and Pearson)."""
    found = beta.ppf(ERROR, hits, of - hits + 1) if hits else 0.0
    wrong = beta.ppf(1 - ERROR, false_alarms + 1, out_of - false_alarms)
    return math.log((found - DELTA) / wrong) if found > DELTA else -math.inf


def best_bound(present: NDArray[np.float64], missing: NDArray[np.float64], cut: float, above: bool) -> float:
    """By the guess "present" above the threshold, or "missing" below it."""
    if above:
        return lower_bound(int((present > cut).sum()), len(present), int((missing > cut).sum()), len(missing))
    return lower_bound(int((missing <= cut).sum()), len(missing), int((present <= cut).sum()), len(present))


def claiming(epsilon: float) -> Config:
    return Config(
        task=f"{__name__}:lines",
        learners=1,
        batch_size=RECORDS // 2,
        epochs=STEPS / 2,
        device="cpu",
        seed=0,
        evaluate_every=1e9,
        checkpoint_every=0,
        options={"canary": True},
        optimizer=Optimizer(lr=1.0),
        privacy=Privacy(
            mode="private", delta=DELTA, clip_norm=CLIP, headroom=1.0, clipper="loop",
            noise_multiplier=noise_for(epsilon=epsilon, delta=DELTA, sample_rate=0.5, steps=STEPS),
        ),
    )  # fmt: skip


def proven(claim: float, runs: int) -> float:
    """The ε that `runs` short runs prove. Further ones, 40 % as many, choose the threshold and the guess."""
    seen = {}
    for canary in (True, False):
        setup = prepare(claiming(claim).replace(options={"canary": canary}))
        seeds = range(2 * canary * runs, 2 * canary * runs + round(0.7 * runs))
        seen[canary] = np.array(list(outcomes(setup, claim, seeds)))
    few = round(0.2 * runs)
    present, missing = (seen[canary][:few] for canary in (True, False))
    cuts = np.quantile(np.concatenate([present, missing]), np.linspace(0.05, 0.95, 19))
    guesses = [(cut, above) for cut in cuts for above in (True, False)]
    cut, above = max(guesses, key=lambda each: best_bound(present, missing, *each))
    return best_bound(seen[True][few:], seen[False][few:], cut, above)


def test_short_runs_are_those_of_simulate(tmp_path: Path) -> None:
    settings = claiming(2.0)
    *_, last = outcomes(prepare(settings), 2.0, range(5, 8))
    simulate(settings.replace(seed=7), tmp_path / "run")
    model = load_model(tmp_path / "run", task=settings.task).module
    assert isinstance(model, Line)
    assert last == float(model.weight.detach()[0])


def test_a_few_short_runs_prove_less_than_the_claim() -> None:
    assert 0 < proven(2.0, runs=300) < 2.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("claim", [1.0, 2.0])
def test_many_short_runs_prove_half_of_the_claim_and_not_more_than_it(claim: float) -> None:
    """Of a mechanism that is as claimed the bound exceeds the claim for 1 % of seeds at most. For 60 sets of numbers
    drawn from the theory it lay between 0.58 and 0.85 (claim 1) and between 1.27 and 1.6 (claim 2)."""
    assert claim / 2 < proven(claim, runs=16_000) < claim
