"""The simulator: Algorithm 1 to the letter, virtual time, determinism, and what a run leaves behind."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from adp2sgd import config, load_model, topology
from adp2sgd.cli.view import print_run
from adp2sgd.config import Config, Data, Network, Optimizer, Speeds, Topology
from adp2sgd.engine import simulate, train
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.simulation.simulate import Asynchronous, Simulation
from adp2sgd.engine.status import RunStatus
from adp2sgd.errors import ConfigError, DivergedError, InterruptedRunError, RunError
from adp2sgd.exchange.memory import MemoryCarrier, Pool
from adp2sgd.exchange.protocol import Exchange, Message
from adp2sgd.run_folder import Folder, read_result
from adp2sgd.tasks import resolve
from conftest import adp2sgd, make_learner


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
        step = {"worker": worker, "read_at": member.read_at, "rows": shard[member.learner.rows].numpy()}
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
    batches = make_learner(0, setup.task)._batches
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


# ---------------------------------------------------------------- determinism, resume, failure


def comparable(path: Path) -> dict[str, object]:
    return {**read_result(path).to_dict(), "folder": None}


def logs(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in sorted(path.glob("learner-*/events.jsonl"))}


RICH = Config(
    task="digits/mlp",
    learners=5,
    epochs=3,
    batch_size=16,
    seed=3,
    device="cpu",
    evaluate_every=0.5,
    checkpoint_every=0.4,
    options={"hidden": [16]},
    data=Data(partition="dirichlet", alpha=0.3),
    optimizer=Optimizer(lr=0.2, momentum=0.5, weight_decay=1e-4),
    speeds=Speeds(kind="log-normal", spread=0.4),
    network=Network(latency_s=0.3, bandwidth_bps=1e6),
)


@pytest.mark.parametrize("algorithm", config.ALGORITHMS)
def test_one_seed_one_result(algorithm: str, tmp_path: Path) -> None:
    settings = RICH.replace(algorithm=algorithm)
    for name in ("first", "second"):
        simulate(settings, tmp_path / name)
    simulate(settings.replace(seed=4), tmp_path / "other")
    assert comparable(tmp_path / "first") == comparable(tmp_path / "second")
    assert logs(tmp_path / "first") == logs(tmp_path / "second")
    assert comparable(tmp_path / "first")["metrics"] != comparable(tmp_path / "other")["metrics"]


@pytest.mark.parametrize("algorithm", config.ALGORITHMS)
@pytest.mark.parametrize("stop_at", [20, 61, 150])
def test_resuming_gives_the_result_of_an_uninterrupted_run(
    algorithm: str, stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Network(latency_s=0.1, bandwidth_bps=1e6)  # some of a step's exchanges are still to come at a checkpoint
    settings = RICH.replace(algorithm=algorithm, topology=Topology(exchanges=4), network=quick)
    simulate(settings, tmp_path / "whole")
    advance, done = Simulation._step_done, 0

    def fail_at(self: Simulation, member: object) -> None:
        nonlocal done
        done += 1
        if done == stop_at:
            raise OSError("power cut")
        advance(self, member)  # type: ignore[arg-type]

    monkeypatch.setattr(Simulation, "_step_done", fail_at)
    with pytest.raises(OSError, match="power cut"):
        simulate(settings, tmp_path / "parts")
    assert done == stop_at  # the fault fired
    monkeypatch.undo()
    if stop_at == 20:  # before the first checkpoint there is nothing to go on from
        with pytest.raises(RunError, match="no checkpoint"):
            simulate(settings, tmp_path / "parts", resume=True)
        return
    for other, words in (
        (settings.replace(seed=None), r"seed = \(unset\), but .* holds a run with seed = \d"),
        (settings.replace(learners=settings.learners + 1), "learners = .* holds a run with learners = "),
        (settings.replace(optimizer=settings.optimizer.replace(momentum=0.25)), r"optimizer\.momentum = 0\.25, but "),
    ):
        with pytest.raises(ConfigError, match=words):
            simulate(other, tmp_path / "parts", resume=True)
    simulate(settings, tmp_path / "parts", resume=True)
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert logs(tmp_path / "parts") == logs(tmp_path / "whole")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_resumes_to_the_same_result(kill: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RICH.replace(epochs=12).to_toml())
    command = [sys.executable, "-m", "adp2sgd", "simulate", str(path), "--out", str(tmp_path / "parts"), "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "parts/simulation.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(kill)
    _, complaint = process.communicate(timeout=60)
    assert not (tmp_path / "parts/result.json").exists()  # it was hit before its end
    if kill == signal.SIGINT:
        assert process.returncode == 130
        assert "--resume" in complaint
    resumed = adp2sgd("simulate", "--resume", str(tmp_path / "parts"), "--json", "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    simulate(RICH.replace(epochs=12), tmp_path / "whole")
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert not list(tmp_path.rglob(".*"))  # no temporary files


@pytest.mark.parametrize("task", ["digits/cnn", "digits/mlp"])
def test_the_model_of_a_run_is_torchs_own(task: str, tmp_path: Path) -> None:
    """model.safetensors goes into a module of the user's, without us, and is as good as the run says."""
    run = simulate(Config(task=task, learners=2, epochs=1, seed=0, device="cpu"), tmp_path / "run")
    made = resolve(task, {})
    module = made.model()
    module.load_state_dict(load_file(tmp_path / "run/model.safetensors"))
    right = module.eval()(made.prepare(made.test.inputs)).argmax(1) == made.test.targets
    assert float(right.float().mean()) == pytest.approx(run.accuracy, abs=1e-6)
    assert run.accuracy is not None
    assert run.accuracy > 0.3
    ours = load_model(tmp_path / "run")
    assert not ours.training
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), module.parameters(), strict=True))
    (tmp_path / "run/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="finished run"):
        load_model(tmp_path / "run")


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    settings = Config(task="digits/mlp", learners=2, epochs=4, seed=0, device="cpu", checkpoint_every=1)
    whole = simulate(settings, tmp_path / "whole")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(status: RunStatus) -> None:
        if status.epoch > 2.5:  # writes of more than this then fail
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    try:
        with pytest.raises(RunError, match=r"cannot be written .*--resume") as caught:
            simulate(settings, tmp_path / "run", on_status=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert simulate(settings, tmp_path / "run", resume=True).loss == whole.loss


def test_what_cannot_be_written_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Config(task="digits/mlp", learners=2, epochs=1, seed=0, device="cpu", checkpoint_every=0.2)

    def stop(status: RunStatus) -> None:
        if status.epoch > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(settings, tmp_path / "run", on_status=stop)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot go on"):
        simulate(settings, tmp_path / "run", resume=True)


def test_a_run_without_a_folder_promises_nothing(quadratic_config: Config) -> None:
    def stop(status: RunStatus) -> None:
        raise InterruptedRunError("go on with --resume somewhere")

    with pytest.raises(InterruptedRunError, match="nothing of it is kept") as caught:
        simulate(quadratic_config, on_status=stop)
    assert "--resume" not in str(caught.value)


def test_ctrl_c_in_the_last_evaluations_waits_for_the_result(
    quadratic_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = Simulation._learner_results

    def press(simulation: Simulation) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return evaluated(simulation)

    monkeypatch.setattr(Simulation, "_learner_results", press)
    run = simulate(quadratic_config.replace(checkpoint_every=0), tmp_path / "run")
    assert run == read_result(tmp_path / "run")


def test_the_runs_own_events_are_its_curve_also_after_a_resume(quadratic_config: Config, tmp_path: Path) -> None:
    settings = quadratic_config.replace(evaluate_every=0.25, checkpoint_every=0.5)

    def stop(status: RunStatus) -> None:
        if status.epoch > 1.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(settings, tmp_path / "run", on_status=stop)
    assert len(Folder.open(tmp_path / "run").points()) >= 4
    run = simulate(settings, tmp_path / "run", resume=True)
    assert tuple(Folder.open(tmp_path / "run").points()) == run.curve


def test_a_finished_run_is_not_run_again(quadratic_config: Config, tmp_path: Path) -> None:
    simulate(quadratic_config, tmp_path / "run")
    with pytest.raises(RunError, match="finished"):
        simulate(quadratic_config, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        simulate(quadratic_config, tmp_path / "run")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, quadratic_config: Config) -> None:
    Folder.create(tmp_path / "run", quadratic_config)
    (tmp_path / "run/simulation.safetensors").write_bytes(os.urandom(100))
    with pytest.raises(RunError, match="damaged"):
        simulate(quadratic_config, tmp_path / "run", resume=True)


@pytest.mark.parametrize("algorithm", config.ALGORITHMS)
def test_divergence_names_the_learner_and_the_step_and_keeps_the_record(
    algorithm: str, tmp_path: Path, quadratic_config: Config
) -> None:
    settings = quadratic_config.replace(algorithm=algorithm, optimizer=Optimizer(lr=1e30))
    with pytest.raises(DivergedError, match=r"learner \d diverged at its step \d+") as caught:
        simulate(settings, tmp_path / "run")
    learner, step = (int(word.rstrip(":")) for word in str(caught.value).split() if word.rstrip(":").isdigit())
    events = [json.loads(line) for line in (tmp_path / f"run/learner-{learner}/events.jsonl").read_text().splitlines()]
    assert events[-1]["step"] == step
    assert events[-1]["gradient_norm"] is None


def test_learning_works_on_every_graph_with_odd_numbers(tmp_path: Path) -> None:
    for graph in ("ring", "complete", "exponential", "star"):
        run = simulate(RICH.replace(topology=Topology(graph=graph), epochs=10))
        assert run.accuracy is not None
        assert run.accuracy > 0.8


def test_without_a_seed_runs_differ() -> None:
    settings = RICH.replace(seed=None, epochs=1)
    assert simulate(settings).loss != simulate(settings).loss


def test_a_record_is_as_open_as_the_user_wants_it(quadratic_config: Config, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        simulate(quadratic_config, tmp_path / "run")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"config.toml", "result.json", "model.safetensors", "events.jsonl"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_result_is_shown_although_a_ledger_could_not_be_read(quadratic_config: Config, capsys: Any) -> None:
    run = simulate(quadratic_config)
    known, *others = run.learners
    known = replace(known, epsilon=2.0, epsilon_spent=1.0, max_steps=9)
    print_run(replace(run, learners=(known, *others)))
    shown = capsys.readouterr().out
    assert "1.00 of 2.00" in shown
    assert shown.count("unknown") == len(others)


def test_a_run_that_still_runs_is_not_resumed(quadratic_config: Config, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        simulate(quadratic_config, tmp_path / "run", on_status=lambda _: signal.raise_signal(signal.SIGINT))
    for engine in (simulate, train):
        if engine is train:
            (tmp_path / "run" / "session.json").write_text("{}")
        with Folder.open(tmp_path / "run").held(), pytest.raises(ConfigError, match="in use: its run is still running"):
            engine(quadratic_config, tmp_path / "run", resume=True)
    assert simulate(quadratic_config, tmp_path / "run", resume=True).global_steps


def test_a_batch_beyond_a_shard_is_told_of(quadratic_config: Config) -> None:
    assert not simulate(quadratic_config).notes
    assert "exceeds the smallest shard (50 records)" in simulate(quadratic_config.replace(batch_size=60)).notes[0]


def test_a_folder_is_free_although_a_forked_process_goes_on(quadratic_config: Config, tmp_path: Path) -> None:
    simulate(quadratic_config, tmp_path / "run")
    folder = Folder.open(tmp_path / "run")
    with folder.held():
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with folder.held():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
