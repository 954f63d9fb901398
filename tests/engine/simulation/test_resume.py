"""A simulation is deterministic, resumes where it was, and fails in one line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adp2sgd import config, load_model
from adp2sgd.cli.view import print_run
from adp2sgd.config import Config, Data, Network, Optimizer, Speeds, Topology
from adp2sgd.engine import simulate, train
from adp2sgd.engine.simulation.simulate import Simulation
from adp2sgd.engine.status import RunStatus
from adp2sgd.errors import ConfigError, DivergedError, InterruptedRunError, RunError
from adp2sgd.run_folder import Folder, read_result
from adp2sgd.tasks import resolve
from conftest import adp2sgd


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
    assert (tmp_path / "parts/simulation.safetensors").exists() == (stop_at > 20)  # before the first, it begins anew
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
    """weights.safetensors goes into a module of the user's, without us, and is as good as the run says."""
    run = simulate(Config(task=task, learners=2, epochs=1, seed=0, device="cpu"), tmp_path / "run")
    made = resolve(task, {})
    module = made.model()
    module.load_state_dict(load_file(tmp_path / "run/model/weights.safetensors"))
    right = module.eval()(made.prepare(made.test.inputs)).argmax(1) == made.test.targets
    assert float(right.float().mean()) == pytest.approx(run.accuracy, abs=1e-6)
    assert run.accuracy is not None
    assert run.accuracy > 0.3
    ours = load_model(tmp_path / "run")
    assert not ours.training
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), module.parameters(), strict=True))
    (tmp_path / "run/model/weights.safetensors").unlink()
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
    assert {path.name for path in files} >= {"config.toml", "result.json", "weights.safetensors", "events.jsonl"}
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
