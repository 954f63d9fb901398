"""What the paper's noise truly buys: the tables of its privacy claims, computed again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from adp2sgd import theory
from adp2sgd.config import Config, Speeds
from adp2sgd.engine import simulate
from adp2sgd.errors import ConfigError
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.calibrate import steps_for
from adp2sgd.privacy.mechanism import Composed, SampledGaussian, with_count
from reproduction import paper
from reproduction.cells import Cell, Choice

DELTA = 1e-5
RATE = paper.SETTING["batch_size"] / paper.SETTING["smallest_shard"]  # of one learner
STEPS = round(paper.SETTING["steps"] / paper.SETTING["learners"])  # likewise
NOISE = (1.0, 2.0, 4.0)
QUICK = ("paper-scale", "remark")


def cells(choice: Choice) -> list[Cell]:
    """Nothing is trained; the quick form leaves out the tables that take longest."""
    names = QUICK if choice.quick else tuple(TABLES)
    form = {"form": "quick" if choice.quick else ""}
    return [Cell(study="privacy", identity={**form, "table": name}, measure=partial(_table, name)) for name in names]


def _table(name: str, scratch: Path, quiet: bool) -> dict[str, Any]:
    return {"delta": DELTA, "rows": TABLES[name]()}


def spent(noise: float, rate: float = RATE, steps: int = STEPS, accountant: str = "pld") -> float:
    return epsilon(SampledGaussian(noise, rate), steps, DELTA, accountant).epsilon


def paper_scale() -> list[dict[str, Any]]:
    """The paper's σ read as a noise multiplier: ε of a learner, and what ε = 8 allows."""
    wrong = paper.SETTING["batch_size"] / (paper.SETTING["learners"] * paper.SETTING["smallest_shard"])
    return [
        {
            "noise_multiplier": noise,
            "epsilon_pld": spent(noise),
            "epsilon_rdp": spent(noise, accountant="rdp"),
            "epsilon_with_the_wrong_rate": spent(noise, rate=wrong, steps=paper.SETTING["steps"]),
            "epsilon_if_shuffled": epsilon(
                SampledGaussian(noise, RATE, "reshuffle"), _epochs(STEPS), DELTA
            ).epsilon,
            "steps_within_epsilon_8": steps_for(epsilon=8, delta=DELTA, sample_rate=RATE, noise_multiplier=noise),
        }
        for noise in NOISE
    ]  # fmt: skip


def _epochs(steps: int) -> int:
    """How often reshuffled batches show each record in so many steps."""
    return round(steps * RATE)


def theorem_2() -> list[dict[str, Any]]:
    """Theorem 2 at worked points: its σ, its conditions, and ε of a neighbour who sees whose model it receives."""
    larger = paper.SETTING | {"learners": 64, "steps": 234_375}
    points: list[tuple[float, float | None, dict[str, int]]] = [
        (1, 0.5, paper.SETTING), (9, 0.2, paper.SETTING), (12, 0.1, paper.SETTING), (50, 0.5, paper.SETTING),
        (9, None, paper.SETTING), (12, None, paper.SETTING), (5, None, larger),
    ]  # fmt: skip
    rows = []
    for claimed, mu, setting in points:
        answer = theory.theorem_2(epsilon=claimed, delta=DELTA, mu=mu, **setting)
        truth = theory.neighbour_epsilon(answer.sigma, delta=DELTA, **setting)
        rows.append({
            "claimed_epsilon": claimed,
            "mu": "least σ" if mu is None else mu,
            "learners": setting["learners"],
            "steps": setting["steps"],
            "alpha": answer.alpha,
            "alpha_bound": answer.alpha_bound,
            "sigma": answer.sigma,
            "failed": list(answer.failed),
            "neighbour_noise_on_sum": truth.on_sum.epsilon,
            "neighbour_noise_on_mean": truth.on_mean.epsilon,
            "neighbour_replace_one": truth.on_mean_replace_one.epsilon,
        })  # fmt: skip
    return rows


def shares() -> list[dict[str, Any]]:
    """p_k = 1/K is assumed; what learners of unequal speed really spend (noise multiplier 2), simulated and exact."""
    rows = []
    for name, factor in (("one learner 10 times slower", 10.0), ("one learner 10 times faster", 0.1)):
        rounds = Config(
            task="quadratic", options={"records": 1600, "dimension": 1}, learners=paper.LEARNERS, batch_size=1,
            epochs=2.0, seed=0, device="cpu", evaluate_every=100.0,
            speeds=Speeds(kind="one-slow", factor=factor),
        )  # fmt: skip
        run = simulate(rounds)
        relative = [each.share * paper.SETTING["steps"] for each in run.learners]
        exact = [1 / factor] + [1.0] * (paper.LEARNERS - 1)
        planned = [paper.SETTING["steps"] * pace / math.fsum(exact) for pace in exact]
        for who, index in (("that one", 0), ("each other", 1)):
            steps = round(planned[index])
            rows.append({
                "case": name, "learner": who, "simulated_steps": round(relative[index]), "steps": steps,
                "epsilon": spent(2.0, steps=steps), "epsilon_planned": spent(2.0),
            })  # fmt: skip
    return rows


def remark() -> list[dict[str, Any]]:
    """The Remark's ε√(t/T) for early models, against a neighbour (ε = 9, the least σ)."""
    setting = {**paper.SETTING, "delta": DELTA}
    sigma = theory.theorem_2(epsilon=9, **setting).sigma  # type: ignore[arg-type]
    rows = []
    for own_steps in (1, 10, 100, STEPS):
        total = min(own_steps * paper.LEARNERS, paper.SETTING["steps"])
        truth = theory.neighbour_epsilon(sigma, **{**setting, "steps": total})  # type: ignore[arg-type]
        step = 1 if own_steps == 1 else total  # the first update of all may be the learner's
        rows.append({
            "own_steps": own_steps,
            "step": step,
            "claimed_epsilon": theory.remark(epsilon=9, step=step, steps=paper.SETTING["steps"]),
            "neighbour_replace_one": truth.on_mean_replace_one.epsilon,
        })  # fmt: skip
    return rows


def traps() -> list[dict[str, Any]]:
    """Common ways to get a wrong ε, at the paper's scale."""
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise ConfigError("the table of traps needs dp-accounting; run: pip install dp-accounting") from None

    library, log = RdpAccountant(), logging.getLogger("absl")
    library.compose(PoissonSampledDpEvent(RATE, GaussianDpEvent(1.0)), STEPS)
    level, log.level = log.level, logging.ERROR  # it warns of the orders that it drops: what the row is about
    dropped = float(library.get_epsilon(DELTA))
    log.level = level
    two = Composed(((SampledGaussian(1.0, RATE), STEPS), (SampledGaussian(2.0, RATE), STEPS)))
    return [
        {"trap": "dp-accounting's RDP drops orders (z = 1)", "printed": dropped,
         "true": spent(1.0, accountant="rdp")},
        {"trap": "shuffled batches accounted as Poisson samples (z = 2)", "printed": spent(2.0),
         "true": epsilon(SampledGaussian(2.0, RATE, "reshuffle"), _epochs(STEPS), DELTA).epsilon},
        {"trap": "rate of all learners together, γ = B/(K·n) (z = 2)",
         "printed": spent(2.0, rate=RATE / 16, steps=paper.SETTING["steps"]),
         "true": spent(2.0)},
        {"trap": "a noised sum and its noised count as two events (z = 1, σ_b = 1)",
         "printed": epsilon(two, 1, DELTA).epsilon,
         "true": spent(with_count(1.0, 1.0))},
    ]  # fmt: skip


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "paper-scale": paper_scale,
    "theorem-2": theorem_2,
    "shares": shares,
    "remark": remark,
    "traps": traps,
}
