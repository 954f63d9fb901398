"""The local engine without faults: real processes that sleep instead of computing, beside the simulator."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from adp2sgd.cli.liveview import Lines, row
from adp2sgd.config import Config, Optimizer, Privacy, Speeds, Topology
from adp2sgd.data.records import Records
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine import simulate
from adp2sgd.engine.background import Background
from adp2sgd.engine.processes.control import Control, line_of
from adp2sgd.engine.processes.observer import Observer
from adp2sgd.engine.processes.train import train
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.status import LearnerStatus, RunStatus
from adp2sgd.engine.worker import Worker
from adp2sgd.errors import ConfigError, DivergedError, RunError
from adp2sgd.exchange.shared import Post, SharedCarrier, make_mail
from adp2sgd.exchange.slots import SLOTS, Layout
from adp2sgd.progress import Count, Key
from adp2sgd.run_folder import Folder, Point, Run, read_result
from adp2sgd.task import Task, cross_entropy
from adp2sgd.tasks import resolve
from conftest import adp2sgd, make_learner

SLEEPY = Config(
    task="quadratic",
    learners=4,
    epochs=12,
    batch_size=8,
    seed=1,
    device="cpu",
    checkpoint_every=0,
    evaluate_every=100,
    options={"records": 200, "dimension": 3},
    optimizer=Optimizer(lr=0.05),
    speeds=Speeds(kind="one-slow", factor=10.0, step_s=0.05, pad=True),
)


# ---------------------------------------------------------------- θ while the learners train


def test_a_look_at_theta_is_the_average_of_the_states_and_no_exchange(tmp_path: Path) -> None:
    """Four learners that rest. Then one has no model yet, and one is gone."""
    setup = prepare(SLEEPY.replace(options={"records": 200, "dimension": 5000}))
    learners = [make_learner(k, setup.task) for k in range(4)]
    for k, learner in enumerate(learners):
        learner.state.normal_(mean=100.0, generator=torch.Generator().manual_seed(k))
        for _ in range(k):
            learner.progress.advance()
    layout, mail = Layout(5000, torch.float64), make_mail()
    descriptors = [layout.create(k) for k in range(4)]
    carriers = [SharedCarrier(each, Post(mail, str(each.number)), descriptors) for each in learners]
    lines, lost = [Post(mail, line_of(k)) for k in range(4)], set[int]()

    def control(k: int) -> Control:
        def show() -> tuple[int, dict[Key, Count]] | None:
            return None if k in lost else (carriers[k].show(), learners[k].progress.counts())

        return Control(lines[k], report=lambda: (LearnerStatus(learner=k), 0), show=show, on_over=lambda: None)

    controls = [control(k) for k in range(4)]
    folder = Folder.create(tmp_path / "run", setup.plan.config)
    observer = Observer(setup, folder, mail, descriptors, layout, curve=[], notes=[], clock=lambda: 7.0)
    for thread in controls:
        thread.start()
    found, states = observer.gather(), [learner.state for learner in learners]
    assert torch.allclose(found.theta, sum(states) / len(states), rtol=1e-14)
    distances = [float((state - found.theta).square().sum()) for state in states]
    assert found.consensus == pytest.approx(sum(distances) / 4, rel=1e-9)
    assert (found.learners, found.seconds, found.counts[3, 0]) == (4, 7.0, 3)
    assert all(carrier.room == SLOTS for carrier in carriers)

    lost.add(1)
    controls[2].close()
    lines[2].close()
    observer._patience_s = 0.5
    fewer = observer.gather()
    assert torch.allclose(fewer.theta, (states[0] + states[3]) / 2, rtol=1e-14)
    assert fewer.learners == 2
    for k in (0, 1, 3):
        controls[k].close()
        lines[k].close()
    observer.close()
    for k in range(4):
        carriers[k].close()
        os.close(descriptors[k])
    shutil.rmtree(mail)


def events(folder: Path) -> list[Point]:
    return [Point(**json.loads(line)) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_the_curve_of_sync_is_the_simulators(tmp_path: Path) -> None:
    """Every look sees the model between two rounds."""
    settings = SLEEPY.replace(algorithm="sync", learners=3, epochs=4, evaluate_every=0.4)
    settings = settings.replace(speeds=Speeds(kind="one-slow", factor=6.0, step_s=0.01, pad=True))
    run = train(settings, tmp_path / "run")
    known = {point.global_steps: point.loss for point in simulate(settings.replace(evaluate_every=0.01)).curve}
    assert len(run.curve) >= 5
    for point in run.curve:
        assert point.loss == pytest.approx(known[point.global_steps], rel=1e-9)
    assert_whole(run, tmp_path / "run")


def assert_whole(run: Run, folder: Path) -> None:
    """Time and steps grow, the last point is the result, and result.json, the events, the model and the run agree."""
    for earlier, later in itertools.pairwise(run.curve):
        assert earlier.global_steps < later.global_steps
        assert earlier.seconds < later.seconds
    last = run.curve[-1]
    found = last.global_steps, last.epoch, last.seconds, last.loss, last.accuracy, last.consensus
    assert found == (run.global_steps, run.epochs, run.seconds, run.loss, run.accuracy, run.consensus)
    assert read_result(folder).curve == run.curve == tuple(events(folder))
    settings = Folder.open(folder).settings
    task = resolve(str(settings.task), settings.options)
    module = task.model()
    module.load_state_dict(load_file(folder / "model/weights.safetensors"))
    losses = task.loss(module.eval()(task.prepare(task.test.inputs)), task.test.targets)
    assert float(losses.detach().mean()) == pytest.approx(run.loss, rel=1e-5)


@pytest.mark.processes
def test_the_curve_of_adpsgd_grows_while_the_learners_train(tmp_path: Path) -> None:
    seen: list[int] = []
    settings = SLEEPY.replace(epochs=6, evaluate_every=0.5, speeds=Speeds(step_s=0.1, pad=True))
    run = train(settings, tmp_path / "run", on_status=lambda run: seen.append(len(run.curve)))
    assert_whole(run, tmp_path / "run")
    assert len(run.curve) >= 6
    assert set(range(len(run.curve))) <= set(seen)  # one by one, the last one apart
    assert run.curve[0].loss > run.curve[-1].loss
    for position, point in enumerate(run.curve[:-1]):
        assert point.learners is None  # all answered
        assert point.consensus > 0
        assert point.epoch >= 0.5 * (position + 1)


def test_no_point_but_the_last_if_the_interval_is_longer_than_the_run(tmp_path: Path) -> None:
    run = train(SLEEPY.replace(epochs=1, speeds=Speeds(step_s=0.02, pad=True)), tmp_path / "run")
    assert len(run.curve) == 1
    assert_whole(run, tmp_path / "run")


class Scaled(nn.Module):
    """A model with a float buffer, which is a constant in private mode and does not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((4,), 8.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs * self.scale)


def scaled_blobs() -> Task:
    inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    whole = Records(inputs, (inputs[:, 0] > 0).long())
    return Task(model=Scaled, train=whole, test=whole, loss=cross_entropy)


@pytest.mark.parametrize("algorithm", ["adpsgd", "sync"])
def test_private_learners_show_their_weights_alone(algorithm: str, tmp_path: Path) -> None:
    settings = Config(
        task="test_local:scaled_blobs",
        algorithm=algorithm,
        learners=3,
        epochs=6,
        batch_size=10,
        seed=3,
        device="cpu",
        evaluate_every=1.0,
        optimizer=Optimizer(lr=0.2),
        privacy=Privacy(mode="private", noise_multiplier=1.0, delta=1e-4),
        speeds=Speeds(step_s=0.02, pad=True),
    )
    run = train(settings, tmp_path / "run")
    assert len(run.curve) >= 3
    assert_whole(run, tmp_path / "run")
    assert run.accuracy is not None
    assert run.accuracy > 0.85
    assert run.curve[-2].accuracy == pytest.approx(run.accuracy, abs=0.1)
    assert run.guarantee.epsilon > 0


@pytest.mark.processes
def test_a_task_that_fails_in_passing_costs_the_points_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory\nin many lines")

    monkeypatch.setattr("adp2sgd.engine.processes.observer.evaluate", fails)
    slow = Speeds(step_s=0.2, pad=True)  # so that an evaluation falls due well before the end
    run = train(SLEEPY.replace(epochs=1, evaluate_every=0.1, speeds=slow), tmp_path / "run")
    assert len(run.curve) == 1
    [note] = run.notes
    assert note.startswith("θ could not be evaluated while the learners trained (out of memory (test_local.py, line")


# ---------------------------------------------------------------- runs


@pytest.mark.processes
def test_case_2_real_and_simulated_side_by_side(tmp_path: Path) -> None:
    """One learner 10 times slower. Sleeping steps: ADPSGD reaches 90 % of the ideal speed-up over SYNC."""
    ideal, rates = (3 + 1 / 10) / (4 / 10), {}
    for algorithm, epochs in (("sync", 2), ("adpsgd", 12)):
        run = train(SLEEPY.replace(algorithm=algorithm, epochs=epochs), tmp_path / algorithm)
        rates[algorithm] = run.global_steps / run.seconds
        assert run.clock == "real"
        assert run.notes == ()
    assert rates["adpsgd"] / rates["sync"] >= 0.9 * ideal
    slow, *fast = run.learners
    assert all(8 <= each.steps / slow.steps <= 12 for each in fast)
    simulated = simulate(SLEEPY)
    assert run.learners[0].staleness_mean == pytest.approx(simulated.learners[0].staleness_mean, rel=0.3)
    assert read_result(tmp_path / "adpsgd") == run
    assert run.overshoot <= 8  # learners hear of the last steps with their exchanges: usually at most one each


@pytest.mark.processes
def test_exchanges_shorter_than_half_a_step_mix_before_the_descent() -> None:
    """Steps of 200 ms that sleep, beside exchanges of three numbers, which take some milliseconds."""
    settings = SLEEPY.replace(epochs=4, speeds=Speeds(step_s=0.2, pad=True), topology=Topology(graph="complete"))
    run = train(settings)
    initiated = sum(each.initiated for each in run.learners)
    assert initiated >= 25  # of 100 steps: two learners that ask each other at once are both busy
    assert sum(each.mixed_before for each in run.learners) >= 0.9 * initiated
    assert 2 * initiated == sum(each.exchanges for each in run.learners)


@pytest.mark.processes
def test_a_step_starts_several_exchanges_where_the_link_allows() -> None:
    """Steps of 200 ms that sleep, beside exchanges of some milliseconds; learner 0 starts all of them."""
    topology = Topology(partner="sender-receiver", exchanges=4)
    run = train(SLEEPY.replace(learners=2, epochs=1.2, speeds=Speeds(step_s=0.2, pad=True), topology=topology))
    first, second = run.learners
    assert second.initiated == 0
    assert 3.5 * first.steps <= first.initiated <= 4 * (first.steps + 1)  # the last step may be dropped
    assert first.mixed_before >= 0.9 * first.initiated


@pytest.mark.parametrize("algorithm", ["adpsgd", "sync"])
def test_a_lone_learner_is_plain_sgd_to_the_bit(algorithm: str, tmp_path: Path) -> None:
    optimizer = Optimizer(lr=0.1, momentum=0.9) if algorithm == "sync" else Optimizer(kind="adam", lr=0.01, ema=0.9)
    settings = Config(algorithm=algorithm, learners=1, epochs=1, seed=4, device="cpu", optimizer=optimizer)
    train(settings, tmp_path / "real")
    simulate(settings, tmp_path / "simulated")  # which a test of its own compares with torch's SGD
    name = "learner-0/checkpoint.safetensors"
    real, _ = Folder.open(tmp_path / "real").load_tensors(name)
    simulated, _ = Folder.open(tmp_path / "simulated").load_tensors(name)
    assert real.keys() == simulated.keys()
    assert all(torch.equal(real[part], simulated[part]) for part in real)
    assert sum(part.startswith("optimizer.") for part in real) == (1 if algorithm == "sync" else 5)
    models = [load_file(tmp_path / engine / "model/weights.safetensors") for engine in ("real", "simulated")]
    assert all(torch.equal(models[0][part], models[1][part]) for part in models[0])


@pytest.mark.processes
def test_spent_budgets_end_the_run_and_the_learners_go_on_averaging_until_then(tmp_path: Path) -> None:
    settings = SLEEPY.replace(
        learners=3,
        epochs=100,
        speeds=Speeds(step_s=0.02, pad=True),
        privacy=Privacy(mode="private", noise_multiplier=3.0, epsilon=1.0, delta=1e-3),
        options={"records": 60, "dimension": 3},
        topology=Topology(partner="sender-receiver"),
    )
    seen: set[str] = set()
    run = train(settings, tmp_path / "run", on_status=lambda run: seen.update(each.state for each in run.learners))
    assert "averaging" in seen
    assert run.global_steps < 750
    for each in run.learners:
        assert each.steps == each.max_steps
        assert each.epsilon_spent == pytest.approx(each.epsilon)
        assert each.epsilon <= 1.0
    assert run.guarantee.epsilon <= 1.0


def breaking_blobs() -> Task:
    """Blobs whose loss raises in the 21st gradient, as a model does for which memory runs out."""
    plain, calls = resolve("blobs", {"records": 400}), itertools.count(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and next(calls) > 20:
            raise RuntimeError("out of memory, say")
        return cross_entropy(outputs, targets)

    return Task(model=plain.model, train=plain.train, test=plain.test, loss=loss)


def test_a_model_that_breaks_ends_a_sync_run(tmp_path: Path) -> None:
    settings = Config(task="test_local:breaking_blobs", algorithm="sync", learners=2, epochs=50, seed=0, device="cpu")
    with pytest.raises(RunError, match=r"learner \d was lost after \d+ steps \(exit code 1\); SYNC cannot go on"):
        train(settings, tmp_path / "run")


def test_a_run_that_diverges_in_its_last_steps_is_no_success(tmp_path: Path) -> None:
    """So few and quick steps that no look at the norms falls before the end."""
    settings = Config(
        task="quadratic", learners=2, epochs=0.8, seed=0, device="cpu",
        optimizer=Optimizer(lr=1e30),
    )  # fmt: skip
    with pytest.raises(DivergedError, match=r"learner \d diverged at its step"):
        train(settings, tmp_path / "run")


@pytest.mark.processes
def test_the_background_thread_writes_the_snapshot_and_survives_a_look_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state itself may be half-summed, as within an all-reduce; and the second model may find no memory."""
    learner, whole = make_learner(0), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    learner.state.fill_(99.0)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("adp2sgd.engine.background.evaluate", fail)
    (tmp_path / "run").mkdir()
    folder = Folder(tmp_path / "run")
    plan = SimpleNamespace(seed=0, private=False, config=Config())
    site = SimpleNamespace(task=learner.sampler.task, plan=plan)
    counts = {(0, 0): Count(7)}
    compute = SimpleNamespace(device="cpu")
    background = Background(
        site, compute, learner, folder, snapshot=whole.clone, evaluated=whole.clone, counts=lambda: counts
    )  # type: ignore[arg-type]
    background.start()
    background.evaluate()
    deadline = time.monotonic() + 10
    while background.trouble is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert background.trouble.startswith("its own looks at held-out records fail (out of memory (test_local.py, line")
    background.log([{"step": 1}])
    background.checkpoint()
    while not (tmp_path / "run/learner-0/checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    background.close(checkpoint=False)
    assert torch.equal(load_file(tmp_path / "run/learner-0/checkpoint.safetensors")["weights"], whole)
    saved = learner_checkpoint.load(folder, 0)
    assert saved is not None
    assert saved.counts == counts
    assert (tmp_path / "run/learner-0/events.jsonl").read_text() == '{"step": 1}\n'


def masked_blobs() -> Task:
    """Blobs behind a dropout layer that leaves its first mask of each process in the working folder."""
    plain = resolve("blobs", {"records": 400})

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = plain.model(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                name = Path(os.environ["ADP2SGD_TEST_MASKS"]) / str(os.getpid())
                mask = self.drop(torch.ones(64))
                if not name.exists():
                    name.write_text(str(mask.tolist()))
            return self.inner(self.drop(x))  # type: ignore[no-any-return]

    return Task(model=Masked, train=plain.train, test=plain.test)


def test_learners_draw_masks_of_their_own_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    monkeypatch.setenv("ADP2SGD_TEST_MASKS", str(masks))
    settings = Config(task="test_local:masked_blobs", learners=3, epochs=1, seed=0, device="cpu")
    train(settings, tmp_path / "run")
    found = [path.read_text() for path in masks.iterdir()]
    assert len(found) == len(set(found)) == 3
    assert simulate(settings).loss == simulate(settings).loss  # two runs of one process do not share their masks


def test_the_command_shows_plain_lines_and_prints_json(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        SLEEPY.replace(learners=2, epochs=2, speeds=Speeds(step_s=0.02, pad=True)).to_toml()
    )
    done = adp2sgd("train", "run.toml", "--out", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["clock"] == "real"
    assert "steps/s" in done.stderr
    assert "2 training" in done.stderr or "2 finished" in done.stderr
    events = [json.loads(line) for line in (tmp_path / "run/learner-1/events.jsonl").read_text().splitlines()]
    assert events[-1]["step"] == json.loads(done.stdout)["learners"][1]["steps"]


def test_the_live_view_names_every_learners_state() -> None:
    rows: list[tuple[str, ...]] = []
    console = Console(file=io.StringIO(), width=500)
    lines = Lines("quadratic", console)

    def watch(run: RunStatus) -> None:
        lines(run)
        rows[:] = [row(each) for each in run.learners]

    train(
        SLEEPY.replace(learners=2, epochs=2, speeds=Speeds(step_s=0.02, pad=True), evaluate_every=0.5), on_status=watch
    )
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("2 training" in line and "steps/s" in line for line in said)
    assert any("θ at epoch" in line and "loss" in line for line in said)
    assert [cells[:2] for cells in rows] == [("0", "ended"), ("1", "ended")]
    assert all(float(cells[7]) > 0 for cells in rows)  # loss on held-out records


def test_errors_come_in_one_line_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"learner \d diverged at its step \d+"):
        train(SLEEPY.replace(speeds=Speeds(), optimizer=Optimizer(lr=1e30)), tmp_path / "diverged")
    with pytest.raises(ConfigError, match="unknown"):
        train(SLEEPY.replace(task="nothing"), tmp_path / "unknown")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_digits_are_learned_as_well_as_in_the_simulator() -> None:
    """Five seeds each; the mean accuracies differ by at most three standard errors (false alarms: below 1 in 100)."""
    settings = Config(
        learners=4, epochs=15, batch_size=16, device="cpu", checkpoint_every=0, optimizer=Optimizer(lr=0.2)
    )
    found = {
        engine: [engine(settings.replace(seed=seed)).accuracy for seed in range(5)] for engine in (train, simulate)
    }
    real, simulated = found[train], found[simulate]
    error = ((statistics.variance(real) + statistics.variance(simulated)) / 5) ** 0.5
    assert abs(statistics.mean(real) - statistics.mean(simulated)) <= 3 * max(error, 1e-3)


@pytest.mark.processes
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("algorithm", ["adpsgd", "sync"])
def test_learners_share_a_gpu(algorithm: str, tmp_path: Path) -> None:
    settings = Config(algorithm=algorithm, learners=4, epochs=10, seed=0, device="cuda", optimizer=Optimizer(lr=0.2))
    run = train(settings, tmp_path / "run")
    assert run.accuracy is not None
    assert run.accuracy > 0.85
    assert run.notes == ()


@pytest.mark.processes
def test_what_follows_the_padding_is_not_added_to_every_step() -> None:
    def start(padded_to: float, *, pad: bool = True) -> float:
        speeds = SimpleNamespace(pad=pad, step_s=1000.0)
        worker = SimpleNamespace(config=SimpleNamespace(speeds=speeds), _padded_to=padded_to)
        return Worker._start(worker)  # type: ignore[arg-type]

    now = time.monotonic()
    assert start(now - 10) == now - 10  # a little late: the step began when the last one's time was up
    assert start(now - 500) >= now  # far behind: it begins now, and nothing is made up for
    assert start(-math.inf) >= now  # the first step
    assert start(now - 10, pad=False) >= now
