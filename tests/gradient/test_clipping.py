"""Adaptive clipping and augmented copies: what a step releases, what it costs, and that a run keeps its clip norm."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from adp2sgd.config import ALGORITHMS, Config, Optimizer, Privacy, Speeds
from adp2sgd.data.batches import Batch, PoissonBatches
from adp2sgd.data.records import Records
from adp2sgd.engine import checkpoint as learner_checkpoint
from adp2sgd.engine import simulate
from adp2sgd.engine.compute import SEEDED_PIECE
from adp2sgd.engine.processes.train import train
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.simulation.simulate import Simulation
from adp2sgd.errors import Adp2sgdError, ConfigError, PrivacyError, RunError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import choose
from adp2sgd.gradient.clip import FADES, clip_factors
from adp2sgd.gradient.loop import Loop
from adp2sgd.gradient.privatize import SPAN, Adaptation, PrivateStep, balance
from adp2sgd.learner import Learner
from adp2sgd.privacy import ledger
from adp2sgd.privacy.budget import Budget, plan
from adp2sgd.privacy.mechanism import SampledGaussian, beside_count, with_count
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.randomness.streams import Streams
from adp2sgd.run_folder import Folder, read_result
from adp2sgd.task import Task, cross_entropy
from conftest import gradient_of
from faults import Faults

WIDTH = 4


class Line(nn.Module):
    """A record's gradient is the record itself, so a test can choose its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight).sum(dim=1)


def itself(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs


def records_of(norms: Tensor) -> Tensor:
    directions = torch.randn(len(norms), WIDTH, generator=Generator().manual_seed(1))
    return directions / directions.norm(dim=1, keepdim=True) * norms[:, None]


class Watched(NoiseSource):
    """Remembers the scale of each draw and what became of a count."""

    def __init__(self) -> None:
        super().__init__(bytes(32), "test", seeded=True)
        self.drawn: list[tuple[int, float, torch.dtype]] = []
        self.counts: list[float] = []

    def add_normal(self, vector: Tensor, scale: float, **to: Any) -> None:
        super().add_normal(vector, scale, **to)
        self.drawn.append((len(vector), scale, vector.dtype))
        if len(vector) == 1:
            self.counts.append(vector.item())


def private_step(*, clip_norm: float, quantile: float = 0.5, count_noise: float = 5.0) -> tuple[FlatModel, PrivateStep]:
    model = FlatModel(Line())
    adaptation = Adaptation(quantile=quantile, rate=0.2, count_noise=count_noise, start=clip_norm)
    clipper = choose.build(model, itself, piece=256)
    return model, PrivateStep(clipper, clip_norm=clip_norm, noise_multiplier=2.0, adaptation=adaptation)


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize("quantile", [0.5, 0.8])
@pytest.mark.parametrize("start", [0.1, 10.0])
def test_the_clip_norm_finds_the_quantile_of_the_norms(quantile: float, start: float) -> None:
    """Log-normal norms, batches of 100. The mean of log C over 500 steps has a standard error of 0.010 at the median
    and 0.012 at 0.8 (measured on 30 seeds), so the bound is 5 of them: false alarms 1 in a million seeds."""
    norms = torch.randn(5000, generator=Generator().manual_seed(2)).exp()
    population, batches = records_of(norms), PoissonBatches(5000, 100, Streams(3, 0))
    model, step = private_step(clip_norm=start, quantile=quantile)
    logarithms = []
    for number in range(700):
        inputs = population[batches.draw(number)]
        noise = NoiseSource.from_seed(0, 0, f"noise/{number}")
        gradient_of(step, model, Batch(inputs, torch.zeros(len(inputs)), 100.0), noise)
        logarithms.append(math.log(step.clip_norm))
    truth = math.log(float(norms.quantile(quantile)))
    assert abs(logarithms[0] - truth) > 1  # it had a way to go
    assert sum(logarithms[200:]) / 500 == pytest.approx(truth, abs=0.06)


def test_sum_and_count_are_noised_by_the_clip_norm_in_force_and_then_it_moves() -> None:
    model, step = private_step(clip_norm=1.0)
    noise, clip_norms = Watched(), [1.0]
    inputs = records_of(torch.tensor([0.2, 0.3, 5.0, 6.0, 7.0, 8.0]))
    for _ in range(20):
        gradient_of(step, model, Batch(inputs, torch.zeros(6), 8.0), noise)
        clip_norms.append(step.clip_norm)
    sums, counts = noise.drawn[::2], noise.drawn[1::2]
    assert sums == [(WIDTH, 2.0 * clip_norm, torch.float32) for clip_norm in clip_norms[:-1]]
    assert counts == [(1, 5.0, torch.float64)] * 20
    for before, after, count in zip(clip_norms[:-1], clip_norms[1:], noise.counts, strict=True):
        assert after == before * math.exp(-0.2 * (0.5 + count / 8 - 0.5))
    assert len(set(clip_norms)) == 21


def test_the_sums_noise_is_what_the_count_leaves_of_the_accounted_one() -> None:
    for accounted, count_noise in ((1.0, 0.51), (2.0, 1.6), (0.7, 12.8)):
        own = beside_count(accounted, count_noise)
        assert own > accounted
        assert with_count(own, count_noise) == pytest.approx(accounted, rel=1e-12)
    assert beside_count(1.0, 1e9) == 1.0
    with pytest.raises(PrivacyError, match=r"count_noise = 1 .* above 1 "):
        beside_count(2.0, 1.0)


Norm = st.floats(0, 1e3) | st.sampled_from([0.0, 0.95, 1.0, 1.05, 1e30, math.inf, math.nan])


@settings(max_examples=60)
@given(st.lists(Norm, min_size=1, max_size=9), st.sampled_from([1.0, 0.3]), st.sampled_from([1.0, 4.0]))
def test_one_record_moves_sum_and_count_by_no_more_than_one_gaussian_allows(
    norms: list[float], clip_norm: float, accounted: float
) -> None:
    """Each in units of its noise, both together: at most 1/z of what the accountant sees."""
    count_noise = 1.2 * accounted
    own = beside_count(accounted, count_noise)
    clipper = choose.build(FlatModel(Line()), itself)
    inputs = records_of(torch.tensor(norms))
    moved = []
    for some in (inputs, inputs[:-1]):
        clipped = clipper.clipped_sum(some, torch.zeros(len(some)), clip_norm)
        in_noise = clipped.total.double() / (own * clip_norm), balance(clipped.norms, clip_norm).view(1) / count_noise
        moved.append(torch.cat(in_noise))
    distance = float((moved[0] - moved[1]).norm())
    assert distance <= (1 + 1e-6) / accounted
    if 1.1 * clip_norm <= norms[-1] <= 1e3:
        assert distance == pytest.approx(1 / accounted, rel=1e-5)  # a clipped record uses all of it


def test_a_record_without_a_finite_gradient_counts_as_one_above() -> None:
    clipper = choose.build(FlatModel(Line()), itself)
    good = records_of(torch.tensor([0.1, 0.2, 30.0, 40.0, 50.0]))
    for bad in (math.nan, math.inf, 3e38):
        inputs = torch.cat([good, torch.full((1, WIDTH), bad)])
        norms = clipper.clipped_sum(inputs, torch.zeros(6), 1.0).norms
        assert float(balance(norms, 1.0)) == -1.0
        model, step = private_step(clip_norm=1.0)
        gradient_of(step, model, Batch(inputs, torch.zeros(6), 4.0), Watched())
        assert math.isfinite(step.clip_norm)


def test_norms_that_all_lie_at_the_clip_norm_do_not_jump_with_their_last_bit() -> None:
    """A neighbour may send weights for which all norms are alike, and BLAS rounds them by the size of the batch."""
    norms = torch.ones(1000)
    higher = torch.nextafter(norms, torch.tensor(2.0))
    assert abs(float(balance(norms, 1.0) - balance(higher, 1.0))) < 2e-3


@pytest.mark.parametrize("count", [1e12, -1e12])
def test_the_clip_norm_stays_within_public_bounds_whatever_the_count(count: float) -> None:
    class Extreme(NoiseSource):
        def add_normal(self, vector: Tensor, scale: float, **to: Any) -> None:
            vector.fill_(count)

    adaptation = Adaptation(quantile=0.5, rate=0.2, count_noise=1.0, start=2.0)
    noise, clip_norm = Extreme(bytes(32), "test", seeded=True), 2.0
    for _ in range(40):
        clip_norm = adaptation.next(clip_norm, torch.ones(3), 10.0, noise)
    assert clip_norm == (2.0 / SPAN if count > 0 else 2.0 * SPAN)


# ---------------------------------------------------------------- runs

PRIVATE = Config(
    task="blobs",
    learners=3,
    epochs=3,
    batch_size=40,
    seed=0,
    device="cpu",
    checkpoint_every=0.5,
    options={"records": 1200, "features": 8},
    optimizer=Optimizer(lr=0.5, momentum=0.5),
    speeds=Speeds(kind="log-normal", spread=0.4),
    privacy=Privacy(mode="private", noise_multiplier=1.5, delta=1e-4, clip_norm=0.1),
)
ADAPTIVE = PRIVATE.replace(privacy=PRIVATE.privacy.replace(clip_quantile=0.6, count_noise=2.5))


def shifted() -> Task:
    """Two-dimensional records whose augmentation is a shift of its own for every row."""
    stream = Generator().manual_seed(0)
    data = Records(torch.randn(300, 2, generator=stream), torch.randint(2, (300,), generator=stream))
    return Task(model=lambda: nn.Linear(2, 2), train=data, test=data, augment=shift)


def shift(inputs: Tensor, generator: Generator) -> Tensor:
    return inputs + torch.rand(inputs.shape, generator=generator)


COPIES = PRIVATE.replace(
    task="test_clipping:shifted", options={}, batch_size=15, privacy=PRIVATE.privacy.replace(copies=3)
)


def by_hand(config: Config) -> tuple[Tensor, float]:
    """Weights and clip norm of a lone learner after plain DP-SGD, written down in the order of the paper."""
    privacy, prepared = config.privacy, prepare(config)
    model, task, velocity = prepared.compute.model, prepared.task, torch.zeros_like(prepared.compute.model.weights)
    clipper = choose.build(model, task.loss, copies=privacy.copies, piece=SEEDED_PIECE // privacy.copies)
    records, clip_norm = task.train.take(prepared.shards[0]), privacy.clip_norm
    own = privacy.noise_multiplier
    if privacy.clip_quantile is not None:
        own = (own**-2 - (2 * privacy.count_noise) ** -2) ** -0.5
    for step in range(prepared.plan.target_steps):
        stream = {name: NoiseSource.from_seed(0, 0, f"{name}/{step}") for name in ("batch", "noise", "augment")}
        rows = stream["batch"].bernoulli(len(records), config.batch_size / len(records))
        inputs, targets = task.prepare(records.inputs[rows]), records.targets[rows]
        if task.augment is not None:
            inputs, targets = (part.repeat_interleave(privacy.copies, dim=0) for part in (inputs, targets))
            inputs = task.augment(inputs, stream["augment"].torch_generator())
        clipped = clipper.clipped_sum(inputs, targets, clip_norm)
        noisy = torch.empty_like(model.weights)
        stream["noise"].add_normal(clipped.total, own * clip_norm, out=noisy, divisor=config.batch_size)
        velocity = velocity.mul(config.optimizer.momentum).add(noisy)
        model.weights.add_(velocity, alpha=-config.optimizer.lr)
        if privacy.clip_quantile is not None:
            above = (clipped.norms.double() / clip_norm - 1) / 0.1
            count = torch.where(above > 0.5, -0.5, torch.where(above < -0.5, 0.5, -above)).sum().view(1)
            stream["noise"].add_normal(count, privacy.count_noise)
            share = 0.5 + float(count) / config.batch_size
            clip_norm *= math.exp(-privacy.clip_rate * (share - privacy.clip_quantile))
    return model.weights, clip_norm


@pytest.mark.parametrize("config", [PRIVATE, ADAPTIVE, COPIES], ids=["constant", "adaptive", "copies"])
def test_a_lone_learner_is_plain_private_sgd_to_the_bit(config: Config, tmp_path: Path) -> None:
    config = config.replace(learners=1)
    run = simulate(config, tmp_path / "run")
    tensors, _ = Folder.open(tmp_path / "run").load_tensors("learner-0/checkpoint.safetensors")
    weights, clip_norm = by_hand(config)
    assert torch.equal(tensors["weights"], weights)
    assert run.learners[0].clip_norm == pytest.approx(clip_norm, rel=1e-12)
    assert (clip_norm == 0.1) == (config.privacy.clip_quantile is None)


@pytest.mark.parametrize("goal", [{"noise_multiplier": 1.5}, {"epsilon": 3.0, "noise_multiplier": None}])
def test_epsilon_is_that_of_constant_clipping_and_each_step_is_charged_once(
    goal: dict[str, float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, add, charged, drawn = Budget.draw, NoiseSource.add_normal, [], []

    def charge(self: Budget) -> None:
        charged.append(self.plan.mechanism.noise_multiplier)
        draw(self)

    def watch(self: NoiseSource, vector: Tensor, scale: float, **to: Any) -> None:
        drawn.append((len(vector), scale))
        add(self, vector, scale, **to)

    constant = simulate(PRIVATE.replace(privacy=PRIVATE.privacy.replace(**goal)))
    monkeypatch.setattr(Budget, "draw", charge)
    monkeypatch.setattr(NoiseSource, "add_normal", watch)
    run = simulate(ADAPTIVE.replace(privacy=ADAPTIVE.privacy.replace(**goal), learners=3), tmp_path / "run")
    assert run.guarantee.epsilon == constant.guarantee.epsilon
    assert [each.max_steps for each in run.learners] == [each.max_steps for each in constant.learners]
    assert len(charged) == run.global_steps == len(drawn) / 2
    (accounted,) = set(charged)
    held = ledger.read(tmp_path / "run/learner-0/ledger.jsonl")
    assert dict(held.spent().parts) == {SampledGaussian(accounted, 0.125): run.learners[0].steps}
    assert [size for size, _ in drawn[1::2]] == [1] * run.global_steps
    assert {scale for _, scale in drawn[1::2]} == {2.5}
    # The first step of a learner clips to 0.1; what its sum and count tell together is what is charged.
    assert with_count(drawn[0][1] / 0.1, 2.5) == pytest.approx(accounted, rel=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_learner_has_its_own_clip_norm_and_keeps_it_when_the_run_resumes(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ADAPTIVE.replace(algorithm=algorithm)
    whole = simulate(config, tmp_path / "whole")
    assert len({each.clip_norm for each in whole.learners}) == 3
    assert all(each.clip_norm > 0.15 for each in whole.learners)  # 0.1 is too small here
    done, count = Simulation._step_done, 0

    def fail(self: Simulation, member: object) -> None:
        nonlocal count
        count += 1
        if count == 70:
            raise OSError("power cut")
        done(self, member)  # type: ignore[arg-type]

    monkeypatch.setattr(Simulation, "_step_done", fail)
    with pytest.raises(RunError, match=r"the run failed \(OSError"):
        simulate(config, tmp_path / "parts")
    monkeypatch.undo()
    simulate(config, tmp_path / "parts", resume=True)
    first, second = (read_result(tmp_path / name).to_dict() for name in ("whole", "parts"))
    assert {**first, "folder": None} == {**second, "folder": None}
    for each in whole.learners:
        events = [(tmp_path / name / f"learner-{each.learner}/events.jsonl").read_text() for name in ("whole", "parts")]
        assert events[0] == events[1]
        assert json.loads(events[0].splitlines()[-1])["clip_norm"] == each.clip_norm


def test_a_learners_own_checkpoint_keeps_its_clip_norm(tmp_path: Path) -> None:
    folder, prepared = Folder.create(tmp_path / "run", ADAPTIVE), prepare(ADAPTIVE)

    def make(start: int) -> Learner:
        return prepared.learner(0, folder.learner(0), start=start)

    learner = make(0)
    for _ in range(5):
        learner.begin()
        learner.update(learner.gradient())
    kept = learner.clip_norm
    assert kept != 0.1
    learner_checkpoint.save(folder, learner, learner.snapshot(), {})
    learner.budget.close()
    for restored in (True, False):  # with its own model, and with one of a neighbour
        again = make(1 + restored)
        assert again.clip_norm == 0.1
        if restored:
            learner_checkpoint.restore(again, learner_checkpoint.load(folder, 0))
        else:
            learner_checkpoint.restore_clip_norm(folder, again)
        assert again.clip_norm == kept
        again.budget.close()


def test_a_real_learner_moves_its_clip_norm_as_a_simulated_one_does(tmp_path: Path) -> None:
    config = ADAPTIVE.replace(learners=1, epochs=1, speeds=Speeds())
    real, simulated = train(config, tmp_path / "run"), simulate(config)
    assert real.learners[0].clip_norm == simulated.learners[0].clip_norm != 0.1
    last = (tmp_path / "run/learner-0/events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["clip_norm"] == real.learners[0].clip_norm


def test_a_learner_that_comes_back_with_a_neighbours_model_keeps_its_own_clip_norm(tmp_path: Path) -> None:
    config = ADAPTIVE.replace(learners=2, epochs=8, checkpoint_every=0.2, speeds=Speeds(step_s=0.03, pad=True))
    faults = Faults().kill(learner=1, at_step=50)
    run = train(config, tmp_path / "run", on_status=faults)
    assert (faults.fired, run.learners[1].restarts) == (1, 1)
    assert not any("own checkpoint" in note for note in run.notes)
    events = map(json.loads, (tmp_path / "run/learner-1/events.jsonl").read_text().splitlines())
    after = next(event for event in events if event["start"] == 1)
    assert after["clip_norm"] > 0.2  # from 0.1 a single step leads to 0.12 at most


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": ADAPTIVE.privacy.replace(count_noise=0.75)}, "count_noise = 0.75"),
        ({"privacy": ADAPTIVE.privacy.replace(count_noise=None), "batch_size": 14}, r"count_noise = 0\.7 "),
        ({"privacy": ADAPTIVE.privacy.replace(epsilon=0.5, noise_multiplier=None, count_noise=0.5)}, "count_noise"),
        ({"privacy": PRIVATE.privacy.replace(copies=2)}, r'copies = 2 needs augmentation, and task = "blobs"'),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, object], words: str) -> None:
    config = ADAPTIVE.replace(**changes)
    with pytest.raises(Adp2sgdError, match=words) as caught:
        simulate(config)
    assert "\n" not in str(caught.value)
    if config.privacy.clip_quantile is not None:  # already the plan is refused: no ledger is bound to it
        with pytest.raises(PrivacyError, match=words):
            plan(config.privacy, records=320, batch_size=config.batch_size, planned_steps=20)


# ---------------------------------------------------------------- copies


class Silent(NoiseSource):
    """For tests that look at sums before the noise."""

    def add_normal(self, vector: Tensor, scale: float, *, out: Tensor | None = None, divisor: float = 1.0) -> None:
        assert scale > 0
        (vector if out is None else out).copy_(vector / divisor)


def test_a_records_copies_are_averaged_and_clipped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd, copy by copy; some records' gradients are clipped and some are not."""
    config = COPIES.replace(privacy=COPIES.privacy.replace(clip_norm=0.9))
    learner = prepare(config).learner(0, tmp_path)
    monkeypatch.setattr(NoiseSource, "add_normal", Silent.add_normal)
    learner.begin()
    stored = learner.sampler._feed.take()
    found = learner.gradient().vector
    module, rows = learner._model.module, len(learner.sampler.rows)
    assert rows > 5
    generator = NoiseSource.from_seed(0, 0, "augment/0").torch_generator()
    seen = shift(stored[0].repeat_interleave(3, dim=0), generator).view(rows, 3, 2)
    assert all(len({tuple(row) for row in copies.tolist()}) == 3 for copies in seen)  # each its own shift
    expected, norms = torch.zeros_like(found), []
    for copies, target in zip(seen, stored[1], strict=True):
        gradients = [
            torch.autograd.grad(cross_entropy(module(copy[None]), target[None]).sum(), list(module.parameters()))
            for copy in copies
        ]
        mean = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in gradients]).mean(0)
        norms.append(float(mean.norm()))
        expected += mean * min(1.0, 0.9 / norms[-1])
    assert min(norms) < 0.9 < max(norms)
    assert torch.allclose(found, expected / 15, atol=1e-6)


@settings(max_examples=30)
@given(st.lists(Norm, min_size=1, max_size=5), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_one_record_with_all_its_copies_moves_sum_and_count_as_one(norms: list[float], copies: int, seed: int) -> None:
    clipper = choose.build(FlatModel(Line()), itself, copies=copies, piece=2)
    inputs = records_of(torch.tensor(norms)).repeat_interleave(copies, dim=0)
    inputs = inputs * (1 + torch.rand(inputs.shape, generator=Generator().manual_seed(seed)))
    both, alone = (clipper.clipped_sum(some, torch.zeros(len(some)), 0.5) for some in (inputs, inputs[:-copies]))
    assert len(both.norms) == len(norms)
    assert float((both.total.double() - alone.total.double()).norm()) <= 0.5 * (1 + 1e-6)
    assert abs(float(balance(both.norms, 0.5) - balance(alone.norms, 0.5))) <= 0.5


def test_copies_cost_no_privacy_and_change_the_gradient() -> None:
    one, three = (simulate(COPIES.replace(privacy=COPIES.privacy.replace(copies=m))) for m in (1, 3))
    assert one.guarantee.epsilon == three.guarantee.epsilon
    assert one.loss != three.loss


def test_memory_is_counted_in_records_times_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "sizes"  # a file: what code of one's own keeps in Python is put back after each pass

    class Wide(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            with log.open("a") as file:
                file.write(f"{len(inputs)}\n")
            return super().forward(inputs)

    model = FlatModel(Wide(2, 2))
    inputs, targets = torch.randn(60, 2), torch.zeros(60, dtype=torch.int64)
    monkeypatch.setattr(choose, "free_bytes", lambda device: 2000)
    pieces = {}
    for copies in (1, 4):
        clipper = choose.build(model, cross_entropy, copies=copies)
        clipper.clipped_sum(inputs, targets, 1.0)
        pieces[copies] = clipper.bookkeeping.piece
        log.unlink()
        clipper.clipped_sum(inputs, targets, 1.0)
        assert max(map(int, log.read_text().split())) == min(60, pieces[copies] * copies)
    assert pieces[4] == pytest.approx(pieces[1] / 4, abs=1)
    seeded = prepare(COPIES).compute.clipper
    assert isinstance(seeded, choose.Automatic)
    assert seeded.piece == SEEDED_PIECE // 3


def test_record_by_record_no_weights_can_couple_records():
    """Two layers that cancel but for rounding, times 1e9: in a batch of another size others' gradients change."""
    size, scale = 2000, 1e9
    network = nn.Sequential(nn.Linear(size, size + 1, bias=False), nn.Linear(size + 1, 2, bias=False))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(size, generator=generator)
    with torch.no_grad():
        network[0].weight.zero_()[:size].copy_(torch.eye(size))
        network[0].weight[size] = direction
        network[1].weight.zero_()[0, size] = scale
        network[1].weight[1, :size] = scale * direction
    model = FlatModel(network)
    rows, labels = torch.randn(1, size, generator=generator).repeat(17, 1), torch.zeros(17, dtype=torch.int64)
    clipper = choose.build(model, cross_entropy, clipper="loop")
    sums = [clipper.clipped_sum(rows[:n], labels[:n], 1.0).total.double() for n in (14, 15, 16, 17)]
    moves = [float(torch.linalg.vector_norm(more - less)) for less, more in itertools.pairwise(sums)]
    assert max(moves) <= 1 + 1e-5


def test_the_loop_can_be_asked_for():
    chosen = Config(
        task="digits/mlp",
        learners=2,
        epochs=0.05,
        seed=0,
        privacy=Privacy(mode="private", noise_multiplier=1.0, delta=1e-5, clipper="loop"),
    )
    assert isinstance(prepare(chosen).compute.clipper, Loop)
    assert simulate(chosen).guarantee is not None
    with pytest.raises(ConfigError, match="loop"):
        Privacy(mode="private", noise_multiplier=1.0, delta=1e-5, clipper="functional")


@pytest.mark.parametrize("clip_norm", [1e-12, 2.2e-7, 1e-6, 0.1, 1.0])
def test_a_factor_too_small_to_be_exact_is_no_factor(clip_norm):
    norms = torch.logspace(-3, 38, 400, dtype=torch.float64)
    factors = clip_factors(norms, clip_norm, torch.float32)
    assert float((factors.double() * norms).max()) <= clip_norm
    ordinary = norms < min(clip_norm * 1e30, FADES)
    assert float((factors.double() * norms)[ordinary].min()) >= min(clip_norm, 1e-3) * (1 - 1e-5)
