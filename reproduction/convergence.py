"""The paper's convergence theory against the simulator, on ½‖w − a‖² where every constant is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adp2sgd import theory, topology
from adp2sgd.config import Config, Optimizer, Privacy, Speeds, Topology
from adp2sgd.engine import simulate
from adp2sgd.engine.setup import Setup, prepare
from reproduction import paper
from reproduction.cells import Cell, Choice

Matrix = NDArray[np.float64]
GRAPHS = {
    "complete": Topology(graph="complete"),
    "ring": Topology(graph="ring"),
    "sender-receiver": Topology(graph="ring", partner="sender-receiver"),
}
DIMENSION = 10
EXCHANGES = 20_000


def cells(choice: Choice) -> list[Cell]:
    """Conditions in the paper's settings; contraction, consensus and rate measured."""
    found: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
    steps = 2_000 if choice.quick else 24_000
    for name in GRAPHS:
        found.append(({"part": "contraction", "graph": name}, partial(contraction, name)))
        for learners in (4,) if choice.quick else (4, 16):
            work = partial(consensus, name, learners, steps)
            found.append(({"part": "consensus", "graph": name, "learners": learners}, work))
    for times in () if choice.quick else (1, 2, 4):
        found.append(({"part": "rate", "steps": f"{times}x"}, partial(rate, times)))
    found.append(({"part": "conditions"}, conditions))
    found.append(({"part": "proposition-1"}, proposition_1))
    found.append(({"part": "propositions"}, propositions))
    form = {"form": "quick" if choice.quick else ""}
    return [Cell(study="theory", identity={**form, **key}, measure=partial(_part, work)) for key, work in found]


def _part(work: Callable[[], dict[str, Any]], scratch: Path, quiet: bool) -> dict[str, Any]:
    return work()


def contraction(name: str, learners: int = 16) -> dict[str, Any]:
    """E‖x‖² after one exchange over ‖x‖², x the second eigenvector: ρ by the formula, by eigenvalues, and measured."""
    import random

    graph = topology.build(GRAPHS[name], learners)
    k = learners
    closed = {
        "complete": 1 - 1 / (k - 1),
        "ring": 1 - (1 - math.cos(2 * math.pi / k)) / k,
        "sender-receiver": 1 - 1 / k,
    }
    values, vectors = np.linalg.eigh(graph.expected_square())
    start = vectors[:, int(np.argsort(np.abs(values))[-2])]
    stream = random.Random(f"contraction/{name}")
    starters = [i for i in range(k) if graph.neighbours[i]]
    after = []
    for _ in range(EXCHANGES):
        i = stream.choice(starters)
        j = graph.draw_partner(i, stream)
        assert j is not None
        after.append(1 - float(start[i] - start[j]) ** 2 / 2)  # averaging a pair takes (x_i − x_j)²/2 off ‖x‖²
    error = float(np.std(after)) / math.sqrt(EXCHANGES)
    return {
        "learners": k,
        "rho_closed_form": closed[name],
        "rho": graph.rho,
        "rho_measured": float(np.mean(after)),
        "standard_error": error,
        "rho_bar": graph.rho_bar,
    }


def _settings(name: str, learners: int, steps: int, lr: float, sigma: float, speeds: Speeds) -> Config:
    records, batch = 1000 * learners, 8
    return Config(
        task="quadratic",
        options={"records": records, "dimension": DIMENSION},
        learners=learners,
        batch_size=batch,
        epochs=steps * batch / records,
        seed=0,
        device="cpu",
        evaluate_every=max(100, steps // 200) * batch / records,
        checkpoint_every=0,
        topology=GRAPHS[name],
        optimizer=Optimizer(lr=lr),
        privacy=Privacy(mode="paper", sigma=sigma),
        speeds=speeds,
    )


def consensus(name: str, learners: int, steps: int) -> dict[str, Any]:
    """(1/K) Σ‖w_k − θ‖² in the steady state: measured, predicted exactly but for staleness, and the paper's bound."""
    lr, sigma = 0.01, 1.0
    # Uneven steps: the theory draws the next worker at random, while equal learners would nearly take turns.
    settings = _settings(name, learners, steps, lr, sigma, Speeds(kind="log-normal", spread=0.5))
    run, setup = simulate(settings), prepare(settings)
    steady = [point.consensus for point in run.curve if point.global_steps > steps / 2]
    gradients = [2 * (point.loss - _least_loss(setup)) for point in run.curve if point.loss is not None]
    problem = _problem(setup, max(each.staleness_max for each in run.learners))
    lemma = theory.consensus_lemma(problem, lr=lr / 8, mean_gradient=float(np.mean(gradients)), sigma=sigma)
    return {
        "learners": learners,
        "global_steps": run.global_steps,
        "lr": lr,
        "sigma": sigma,
        "staleness_max": problem.staleness,
        "exchanges_per_step": sum(each.exchanges for each in run.learners) / 2 / run.global_steps,
        "measured": float(np.mean(steady)),
        "predicted": predicted_consensus(setup, lr, sigma),
        "bound": lemma.bound,
        "c1": lemma.c1,
    }


def predicted_consensus(setup: Setup, lr: float, sigma: float) -> float:
    """The steady state of Algorithm 1 with fresh gradients: an exact linear equation for E[ZZᵀ], Z the K × d models.

    A step of learner k with partner j is Z ← (A_kj − lr·e_k e_kᵀ) Z + lr·e_k (b_kᵀ + noise), b_k its shard's mean.
    """
    graph, k = setup.plan.graph, setup.plan.config.learners
    means, variance = _shards(setup)
    batch = setup.plan.config.batch_size
    noise = variance / batch + DIMENSION * (sigma / batch) ** 2  # of one step's gradient, per learner
    unit = np.eye(k)
    mean_map, map_of_squares = np.zeros((k, k)), np.zeros((k * k, k * k))
    moves: list[tuple[float, int, Matrix]] = []
    for who in range(k):
        partners = graph.neighbours[who] or (who,)  # a receiver starts no exchange
        for other in partners:
            mixing = unit if other == who else topology.mixing_matrix(k, who, other)
            step = mixing - lr * np.outer(unit[who], unit[who])
            moves.append((1 / (k * len(partners)), who, step))
            mean_map += moves[-1][0] * step
            map_of_squares += moves[-1][0] * np.kron(step, step)
    mean = np.linalg.solve(unit - mean_map, lr / k * means)
    added = np.diag(lr**2 / k * (noise + np.square(means).sum(axis=1)))
    for probability, who, step in moves:
        cross = np.outer(step @ mean @ means[who], lr * unit[who])
        added += probability * (cross + cross.T)
    squares = np.linalg.solve(np.eye(k * k) - map_of_squares, added.ravel()).reshape(k, k)
    return float((np.trace(squares) - squares.sum() / k) / k)


def rate(times: int) -> dict[str, Any]:
    """Mean of ‖∇F(θ)‖² over a run of `times` × the least T of Proposition 1, at its learning rate, and its bound.

    Two learners: for sixteen the least T is beyond 10¹⁴.
    """
    learners, sigma, speeds = 2, 1.0, Speeds()
    setup = prepare(_settings("complete", learners, 100, 0.1, sigma, speeds))
    problem = _problem(setup, 2)
    steps = times * theory.proposition_1(problem).least_steps
    answer = theory.proposition_1(problem, steps=steps, sigma=sigma)
    settings = _settings("complete", learners, steps, answer.lr * problem.batch_size, sigma, speeds)
    run = simulate(settings)
    gradients = [2 * (point.loss - _least_loss(setup)) for point in run.curve if point.loss is not None]
    return {
        "learners": learners,
        "global_steps": run.global_steps,
        "least_steps": answer.least_steps,
        "lr": settings.optimizer.lr,
        "sigma": sigma,
        "staleness_assumed": problem.staleness,
        "staleness_max": max(each.staleness_max for each in run.learners),
        "measured": float(np.mean(gradients)),
        "bound": answer.bound,
        "failed": list(answer.failed),
    }


def conditions() -> dict[str, Any]:
    """The largest smoothness L for which each statement covers the paper's CIFAR-10 run, whatever its other constants.

    Every condition involves L only through lr·L (Theorem 1) or L²/T (Proposition 1), so this needs no estimate.
    """
    rows = []
    for name, staleness in (("complete", 16), ("sender-receiver", 16)):
        rho = topology.build(GRAPHS[name], paper.LEARNERS).rho
        unit = _paper_problem(paper.MODELS["resnet18"].parameters, rho, staleness)
        rows.append({
            "graph": name,
            "rho": rho,
            "rho_bar": unit.rho_bar,
            "staleness": staleness,
            "largest_smoothness_theorem_1": {
                str(lr): _largest_product(unit) / lr for lr in (0.4, 0.04, 0.004)
            },
            "largest_smoothness_proposition_1": math.sqrt(
                paper.SETTING["steps"] / theory.proposition_1(unit).least_steps
            ),
        })  # fmt: skip
    return {"rows": rows}


def _largest_product(problem: theory.Problem) -> float:
    """The largest lr·L for which all conditions of Theorem 1 hold: they depend on that product alone. At L = 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        holds = not theory.theorem_1(problem, lr=middle / problem.batch_size, steps=1).failed
        low, high = (middle, high) if holds else (low, middle)
    return low


def proposition_1() -> dict[str, Any]:
    """C₃ of Theorem 1 at the least T and the learning rate of Proposition 1."""
    rows = []
    for name, graph in GRAPHS.items():
        for learners, staleness in ((4, 4), (4, 100), (16, 16), (16, 100)):
            rho = topology.build(graph, learners).rho
            answer = theory.proposition_1(replace(_paper_problem(1, rho, staleness), learners=learners))
            rows.append({
                "graph": name, "learners": learners, "staleness": staleness, "least_steps": answer.least_steps,
                "c3": answer.theorem.c3,
            })  # fmt: skip
    return {"rows": rows}


def propositions() -> dict[str, Any]:
    """Propositions 1 and 2 in the paper's setting (L = ς² = υ² = G = 1, gap ln 10, τ = 16): which T each asks for."""
    rows = []
    for model, row in paper.MODELS.items():
        problem = _paper_problem(row.parameters, 1 - 1 / 15, 16)
        answer = theory.proposition_2(
            problem, epsilon=9.0, delta=1e-5, smallest_shard=paper.SETTING["smallest_shard"], mu=0.2
        )
        rows.append({
            "model": model, "epsilon": 9.0, "steps_proposition_2": answer.steps,
            "least_steps_proposition_1": answer.least_steps, "failed": list(answer.failed),
        })  # fmt: skip
    return {"rows": rows}


def _paper_problem(dimension: int, rho: float, staleness: float) -> theory.Problem:
    return theory.Problem(
        learners=paper.LEARNERS, batch_size=paper.SETTING["batch_size"], smoothness=1.0, staleness=staleness, rho=rho,
        gap=math.log(10), sample_variance=1.0, shard_variance=1.0, dimension=dimension,
    )  # fmt: skip


def _problem(setup: Setup, staleness: float) -> theory.Problem:
    """The constants of the quadratic, from its records."""
    means, variance = _shards(setup)
    centre = _points(setup).mean(axis=0)
    return theory.Problem(
        learners=setup.plan.config.learners,
        batch_size=setup.plan.config.batch_size,
        smoothness=1.0,
        staleness=staleness,
        rho=setup.plan.graph.rho,
        gap=float(np.square(centre).sum() / 2),
        sample_variance=variance,
        shard_variance=float(np.square(means).sum(axis=1).mean()),
        dimension=DIMENSION,
    )


def _points(setup: Setup) -> Matrix:
    """All training records."""
    points: Matrix = setup.task.train.read(torch.arange(len(setup.task.train)))[0].numpy()
    return points


def _shards(setup: Setup) -> tuple[Matrix, float]:
    """Each shard's mean relative to the mean of all, and the mean variance of one record within its shard."""
    points = _points(setup)
    shards = [points[rows.numpy()] for rows in setup.shards]
    means = np.stack([shard.mean(axis=0) for shard in shards])
    return means - points.mean(axis=0), float(np.mean([shard.var(axis=0).sum() for shard in shards]))


def _least_loss(setup: Setup) -> float:
    points = _points(setup)
    return float(np.square(points - points.mean(axis=0)).sum(axis=1).mean() / 2)
