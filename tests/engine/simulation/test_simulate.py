"""The simulator: Algorithm 1 to the letter, virtual time, determinism, and what a run leaves behind."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adp2sgd import config, topology
from adp2sgd.config import Config, Network, Optimizer, Speeds, Topology
from adp2sgd.engine import simulate
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.simulation.simulate import Asynchronous
from adp2sgd.exchange.memory import MemoryCarrier, Pool
from adp2sgd.exchange.protocol import Exchange, Message
from adp2sgd.run_folder import Folder, read_result
from adp2sgd.tasks import resolve
from conftest import make_learner


def build(settings: Config, path: Path) -> Asynchronous:
    simulation = Asynchronous(prepare(settings), Folder.create(path, settings), lambda _: None)
    simulation.enlist()
    return simulation


# ---------------------------------------------------------------- Algorithm 1


def literal_algorithm_1(
    start: np.ndarray, points: np.ndarray, schedule: list[dict[str, object]], rate: float, batch_size: float
) -> np.ndarray:
    """Algorithm 1 as printed, on matrices: W ← W A_t, then the active column descends with a gradient at a stale copy.

    Written from the paper alone; `schedule` says who was active, with whom it averaged, when it read, and its batch.
    """
    history = [start.copy()]
    for step in schedule:
        weights = history[-1]
        k, j = step["worker"], step["partner"]
        stale = history[step["read_at"]][:, k]
        batch = points[step["rows"]]
        gradient = sum((stale - point for point in batch), np.zeros_like(stale))
        averaging = np.eye(weights.shape[1])
        if j is not None:
            averaging[[k, k, j, j], [k, j, k, j]] = 0.5
        weights = weights @ averaging
        weights[:, k] = weights[:, k] - rate * gradient / batch_size
        history.append(weights)
    return history[-1]


@pytest.mark.parametrize("number", range(200))
def test_the_simulator_is_algorithm_1(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    learners = draw.randint(2, 9)
    partner, graph = draw.choice(config.PARTNERS), draw.choice(["ring", "complete", "star", "exponential"])
    settings = Config(
        task="quadratic",
        learners=learners,
        epochs=draw.uniform(0.5, 2),
        batch_size=draw.randint(2, 8),
        seed=number,
        device="cpu",
        options={"records": 20 * learners, "dimension": 2, "seed": number},
        topology=Topology(graph=graph if partner == "neighbour" else "ring", partner=partner),
        optimizer=Optimizer(lr=draw.uniform(0.01, 0.5)),
        speeds=draw.choice([Speeds(kind="log-normal", spread=1.0), Speeds(kind="random-slow", factor=3), Speeds()]),
    )
    simulation = build(settings, tmp_path / "run")
    simulation.start()
    initial = [np.random.default_rng(number + k).normal(size=2) for k in range(learners)]
    for member, state in zip(simulation.members, initial, strict=True):
        member.learner.state.copy_(torch.from_numpy(state))
        member.learner.begin()
    schedule: list[dict[str, object]] = []
    while simulation.global_steps < simulation.setup.plan.target_steps:
        worker = simulation.heap[0][2].learner
        member = simulation.members[worker]
        asked = member.exchange.number
        partners = {k: m.exchange.tally.completed for k, m in enumerate(simulation.members)}
        shard = simulation.setup.shards[worker]
        step = {"worker": worker, "read_at": member.read_at, "rows": shard[member.learner.sampler.rows].numpy()}
        simulation.advance()
        met = [k for k, m in enumerate(simulation.members) if m.exchange.tally.completed > partners[k]]
        assert len(met) == 2 * (member.exchange.number - asked)
        schedule.append({**step, "partner": next((k for k in met if k != worker), None)})
    points = simulation.setup.task.train.inputs.numpy()
    expected = literal_algorithm_1(
        np.stack(initial, axis=1), points, schedule, settings.optimizer.lr, settings.batch_size
    )
    found = torch.stack(simulation.states(), dim=1).numpy()
    assert np.allclose(found, expected, rtol=0, atol=1e-11)
    assert len({step["worker"] for step in schedule}) > 1


@pytest.mark.parametrize("algorithm", config.ALGORITHMS)
def test_a_lone_learner_is_plain_sgd_to_the_bit(algorithm: str, tmp_path: Path) -> None:
    settings = Config(
        algorithm=algorithm,
        learners=1,
        epochs=2,
        seed=4,
        device="cpu",
        optimizer=Optimizer(lr=0.1, schedule=((1, 0.05),), momentum=0.9, weight_decay=1e-3),
    )
    simulate(settings, tmp_path / "run")
    tensors, _ = Folder.open(tmp_path / "run").load_tensors("learner-0/checkpoint.safetensors")
    setup = prepare(settings)
    reference = setup.task.model()
    reference.load_state_dict(setup.compute.model.module.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    batches = make_learner(0, setup.task).sampler.batches
    batches.rate, batches._streams = 32 / len(setup.task.train), type(batches._streams)(4, 0)
    for step in range(setup.plan.target_steps):
        batch = setup.task.train.take(setup.shards[0]).take(batches.draw(step))
        optimizer.zero_grad()
        setup.task.loss(reference(setup.task.prepare(batch.inputs)), batch.targets).sum().backward()
        for parameter in reference.parameters():
            parameter.grad /= 32
        optimizer.param_groups[0]["lr"] = 0.1 if step / setup.plan.steps_per_epoch < 1 else 0.05
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert torch.equal(tensors["weights"], flat)


@pytest.mark.parametrize(
    ("graph", "learners", "partner"),
    [("ring", 5, "neighbour"), ("complete", 6, "neighbour"), ("ring", 8, "sender-receiver")],
)
def test_one_exchange_contracts_the_second_eigenvector_by_rho(graph: str, learners: int, partner: str) -> None:
    """12,000 exchanges from the second eigenvector: 1 − ρ within 5 %, over 4 standard errors (false alarms < 1e-4)."""
    built = topology.build(Topology(graph=graph, partner=partner), learners)
    values, vectors = np.linalg.eigh(built.expected_square())
    vector = torch.from_numpy(vectors[:, -2].copy())
    task = resolve("quadratic", {"records": 8, "dimension": 1})
    pool = Pool()

    def post(message: Message) -> None:
        """A free network. The step counts play no part here and only cost time."""
        exchanges[message.receiver].receive(replace(message, progress={}))

    members = [make_learner(k, task) for k in range(learners)]
    exchanges = [Exchange(learner, MemoryCarrier(learner, post, pool)) for learner in members]
    starters = [k for k in range(learners) if built.neighbours[k]]
    stream, lost = random.Random(7), []
    for _ in range(12_000):
        k = stream.choice(starters)
        j = built.draw_partner(k, stream)
        for end in (k, j):
            exchanges[end].learner.state.fill_(float(vector[end]))
        assert exchanges[k].ask(j)
        after = [float(exchanges[end].learner.state) for end in (k, j)]
        lost.append(float(vector[k] ** 2 + vector[j] ** 2) - sum(x * x for x in after))
    assert abs(np.std(lost) / math.sqrt(len(lost)) / np.mean(lost)) < 0.0125
    assert np.mean(lost) == pytest.approx(1 - values[-2], rel=0.05)


# ---------------------------------------------------------------- virtual time


def timing(algorithm: str, speeds: Speeds, learners: int = 16, **changes: object) -> float:
    settings = Config(
        task="quadratic",
        algorithm=algorithm,
        learners=learners,
        epochs=20,
        batch_size=4,
        seed=0,
        device="cpu",
        evaluate_every=100,
        checkpoint_every=0,
        options={"records": 16 * 20, "dimension": 1},
        speeds=speeds,
        optimizer=Optimizer(lr=0.01),
    ).replace(**changes)
    return simulate(settings).seconds


def test_case_2_one_learner_ten_times_slower() -> None:
    speeds = Speeds(kind="one-slow", factor=10)
    ideal = (15 + 1 / 10) / (16 / 10)
    assert timing("sync", speeds) / timing("adpsgd", speeds) >= 0.97 * ideal


def test_case_1_a_random_learner_twice_slower() -> None:
    speeds = Speeds(kind="random-slow", factor=2)
    ideal = 2 / (1 + 1 / 16)
    assert timing("sync", speeds) / timing("adpsgd", speeds) >= 0.97 * ideal


def test_other_speeds() -> None:
    assert timing("sync", Speeds(step_s=0.5)) == pytest.approx(0.5 * 100)
    assert timing("sync", Speeds(kind="list", values=tuple(range(1, 17)))) == pytest.approx(16 * 100)
    rate = sum(1 / factor for factor in range(1, 17))
    assert timing("adpsgd", Speeds(kind="list", values=tuple(range(1, 17)))) == pytest.approx(1600 / rate, rel=0.03)
    assert timing("adpsgd", Speeds(kind="log-normal", spread=0.5)) == pytest.approx(100 * math.exp(0.125), rel=0.1)


def test_the_network_slows_sync_but_never_the_asynchronous_learners() -> None:
    slow = Network(latency_s=2.0, bandwidth_bps=64.0)
    assert timing("adpsgd", Speeds(), network=slow) == pytest.approx(timing("adpsgd", Speeds()))
    # a ring all-reduce of 8 bytes among 16: 30 messages of one byte each
    per_round = 30 * (2.0 + 8 / 64)
    assert timing("sync", Speeds(), network=slow) == pytest.approx(100 * (1 + per_round))


def test_figures_of_a_run(quadratic_config: Config, tmp_path: Path) -> None:
    run = simulate(quadratic_config.replace(learners=5, speeds=Speeds(kind="one-slow", factor=4)), tmp_path / "run")
    slow, *fast = run.learners
    assert run.global_steps == sum(each.steps for each in run.learners) == 50
    assert run.clock == "virtual"
    assert sum(each.share for each in run.learners) == pytest.approx(1)
    assert all(each.steps > 3 * slow.steps for each in fast)
    assert slow.staleness_mean > 2 * max(each.staleness_mean for each in fast)
    assert sum(each.exchanges for each in run.learners) == 2 * run.global_steps  # a free network: nobody is busy
    assert sum(each.bytes_sent for each in run.learners) == 2 * 24 * run.global_steps
    assert run.consensus > 0
    events = [json.loads(line) for line in (tmp_path / "run/learner-1/events.jsonl").read_text().splitlines()]
    assert len(events) == fast[0].steps
    assert sum(event["staleness"] for event in events) == pytest.approx(fast[0].staleness_mean * fast[0].steps)
    assert all(event["gradient_norm"] > 0 for event in events)
    assert read_result(tmp_path / "run") == run
    assert Folder.open(tmp_path / "run").settings.learners == 5


def test_equal_speeds_make_everybodys_gradients_equally_stale(quadratic_config: Config) -> None:
    run = simulate(quadratic_config.replace(epochs=20))
    assert {each.staleness_max for each in run.learners} == {3}
    assert simulate(quadratic_config.replace(algorithm="sync")).learners[2].staleness_max == 0


@pytest.mark.parametrize(("latency_s", "share"), [(0.0, 1.0), (0.2, 0.0)])
def test_a_free_network_mixes_before_the_descent_and_a_slow_one_after(
    latency_s: float, share: float, quadratic_config: Config
) -> None:
    jitter = Speeds(kind="log-normal")  # else all ask at once, and all are busy
    run = simulate(quadratic_config.replace(network=Network(latency_s=latency_s), speeds=jitter))
    assert sum(each.initiated for each in run.learners) > 10
    for each in run.learners:
        assert each.mixed_before == share * each.initiated
    assert 2 * sum(each.initiated for each in run.learners) == sum(each.exchanges for each in run.learners)


@pytest.mark.parametrize("partner", config.PARTNERS)
def test_an_initiator_starts_its_exchanges_one_after_the_other(partner: str, quadratic_config: Config) -> None:
    """A free network: exactly as many per step, all before the descent."""
    run = simulate(quadratic_config.replace(topology=Topology(partner=partner, exchanges=3)))
    for each in run.learners:
        starts = partner == "neighbour" or each.learner % 2 == 0
        assert each.initiated == each.mixed_before == 3 * each.steps * starts
    assert sum(each.exchanges for each in run.learners) == 2 * sum(each.initiated for each in run.learners)


def test_more_exchanges_per_step_bring_the_models_together(quadratic_config: Config) -> None:
    """By ρ: after a step the expected squared spread of a ring of 4 is 0.75, 0.61 and 0.52 of what it was before."""
    spread = []
    for exchanges in (1, 2, 4):
        settings = quadratic_config.replace(epochs=40, topology=Topology(exchanges=exchanges))
        spread.append(np.mean([point.consensus for point in simulate(settings).curve[5:]]))
    assert spread[0] > 1.2 * spread[1] > 1.2**2 * spread[2]


def test_a_slow_network_lets_a_step_start_as_many_exchanges_as_fit(quadratic_config: Config) -> None:
    """An exchange takes three messages; the initiator is free after two, and the next one waits for that."""
    for latency_s, fit in ((0.02, 8), (0.2, 3), (0.6, 1)):
        settings = quadratic_config.replace(
            learners=2, epochs=8, network=Network(latency_s=latency_s),
            topology=Topology(partner="sender-receiver", exchanges=8),
        )  # fmt: skip
        first = simulate(settings).learners[0]
        assert (fit - 1) * first.steps < first.initiated + first.busy <= fit * first.steps


@pytest.mark.parametrize("exchanges", [1, 4])
@pytest.mark.parametrize("partner", config.PARTNERS)
@pytest.mark.parametrize("learners", [2, 3, 5, 8])
def test_a_slow_network_neither_locks_nor_loses_anything(
    learners: int, partner: str, exchanges: int, tmp_path: Path
) -> None:
    """Exchanges that outlast steps: some are refused, none deadlocks, and the sum of the models stays what it was."""
    settings = Config(
        task="quadratic",
        learners=learners,
        epochs=20,
        batch_size=4,
        seed=2,
        device="cpu",
        options={"records": 40 * learners, "dimension": 4},
        optimizer=Optimizer(lr=1e-300),  # nothing but exchanges moves the models
        topology=Topology(partner=partner, exchanges=exchanges),
        speeds=Speeds(kind="log-normal", spread=0.5),
        network=Network(latency_s=0.7, bandwidth_bps=1000.0),
    )
    simulation = build(settings, tmp_path / "run")
    simulation.start()
    for member in simulation.members:
        member.learner.state.normal_(generator=torch.Generator().manual_seed(member.learner.number))
    before = sum(state.clone() for state in simulation.states())
    spread = float(torch.stack(simulation.states()).var(dim=0).sum())
    simulation.run()
    assert torch.allclose(sum(simulation.states()), before, rtol=0, atol=1e-12)
    assert float(torch.stack(simulation.states()).var(dim=0).sum()) < 1e-3 * spread
    tallies = [member.exchange.tally for member in simulation.members]
    assert sum(tally.completed for tally in tallies) > 20
    if learners > 3:
        assert sum(tally.busy for tally in tallies) > 0
