"""Private mode end to end: what one step releases, what a run promises, and that broken versions are caught."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adp2sgd.config import Config, Data, Optimizer, Privacy, Speeds
from adp2sgd.data import heart, table
from adp2sgd.data.records import Records
from adp2sgd.engine import simulate, train
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.validate import validate
from adp2sgd.errors import Adp2sgdError, ConfigError, DataError, PrivacyError, RunError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import choose
from adp2sgd.gradient.clipper import Clipped, Clipper
from adp2sgd.gradient.privatize import Batch, PrivateStep
from adp2sgd.privacy import ledger
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.mechanism import SampledGaussian
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.task import cross_entropy
from conftest import adp2sgd

TENSORS, WIDTH = 10, 2


class Directions(nn.Module):
    """Ten tensors; a record's gradient is the record itself, so a test can choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(TENSORS)])

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * torch.cat(list(self.parts))).sum(dim=1, keepdim=True)


def first(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0]


class Silent(NoiseSource):
    """The noise source of a test that looks at sums before the noise."""

    def add_normal(self, vector: Tensor, scale: float, *, out: Tensor | None = None, divisor: float = 1.0) -> None:
        assert scale > 0
        (vector if out is None else out).copy_(vector / divisor)


def silent() -> NoiseSource:
    return Silent(bytes(32), "test", seeded=True)


# ---------------------------------------------------------------- one step, white box

UNIT = torch.full((TENSORS * WIDTH,), 1 / math.sqrt(TENSORS * WIDTH))


class Remembered:
    """A sum before the noise does not change between draws, so it is computed once."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper
        self._known: dict[int, Clipped] = {}

    def clipped_sum(self, inputs: Tensor, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        if len(inputs) not in self._known:
            self._known[len(inputs)] = self._clipper.clipped_sum(inputs, targets, clip_norm)
        found = self._known[len(inputs)]
        return Clipped(found.total.clone(), found.norms)


class SeparatelyClipped:
    """Planted bug: each tensor is clipped on its own."""

    def clipped_sum(self, inputs: Tensor, targets: Tensor, clip_norm: float, records: int | None = None) -> Clipped:
        parts = inputs.view(len(inputs), TENSORS, WIDTH)
        norms = parts.norm(dim=2, keepdim=True)
        return Clipped((parts * (clip_norm / norms).clamp(max=1)).sum(0).flatten(), norms[:, 0, 0])


class Weaker(NoiseSource):
    """Planted bug: noise too small by a factor."""

    factor = 1.0

    def add_normal(self, vector: Tensor, scale: float, **to: Any) -> None:
        super().add_normal(vector, scale * self.factor, **to)


def separation(
    clipper: Clipper | None = None, factor: float = 1.0, realized: bool = False, draws: int = 20_000
) -> float:
    """z·d′ for z = 1: how far apart one record moves the released gradients, in units of what the mechanism allows."""
    model = FlatModel(Directions())
    step = PrivateStep(Remembered(clipper or choose.build(model, first)), clip_norm=1.0, noise_multiplier=1.0)
    noise = Weaker(b"white-box test, fixed key: 32 by", "test", seeded=True)
    noise.factor = factor
    records = torch.cat([100 * UNIT.expand(63, -1), -100 * UNIT.unsqueeze(0)])  # 63 point one way, the canary against
    released = []
    for inputs in (records, records[:63]):
        targets = torch.zeros(len(inputs), dtype=torch.int64)
        expected = float(len(inputs)) if realized else 64.0
        vectors = [step(model, Batch(inputs, targets, expected), noise).vector.clone() for _ in range(draws)]
        released.append(torch.stack(vectors).double() @ UNIT.double())
    pooled = math.sqrt((float(released[0].var()) + float(released[1].var())) / 2)
    return abs(float(released[0].mean() - released[1].mean())) / pooled


def test_one_record_moves_the_release_by_exactly_what_the_accountant_assumes() -> None:
    """20,000 draws with and without the canary: standard error of z·d′ 0.011, so 4.5 of them (fixed key)."""
    assert separation() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("bug", "factor"),
    [
        ({"factor": 1 / 64}, 64),  # noise divided by the batch once too often
        ({"factor": 0.5}, 2.0),
        ({"factor": 0.9}, 1.11),
        ({"clipper": SeparatelyClipped()}, 3.2),
        ({"realized": True}, 2.0),  # divided by the batch at hand
    ],
    ids=["noise/B", "noise/2", "noise-10%", "clipped separately", "realized batch"],
)
def test_the_white_box_test_catches_planted_bugs(bug: dict[str, object], factor: float) -> None:
    found = separation(**bug, draws=5000)  # type: ignore[arg-type]
    assert found == pytest.approx(factor, rel=0.06)
    assert abs(found - 1) > 0.05


def test_a_huge_record_in_any_tensor_moves_the_sum_by_at_most_the_clip_norm() -> None:
    model = FlatModel(Directions())
    clipper = choose.build(model, first)
    quiet = torch.randn(5, TENSORS * WIDTH, generator=torch.Generator().manual_seed(0)) / 10
    for tensor in range(TENSORS):
        canary = torch.zeros(1, TENSORS * WIDTH)
        canary[0, tensor * WIDTH] = 100.0 + tensor
        targets = torch.zeros(6, dtype=torch.int64)
        both = clipper.clipped_sum(torch.cat([quiet, canary]), targets, 0.5).total
        alone = clipper.clipped_sum(quiet, targets[:5], 0.5).total
        assert float((both.double() - alone.double()).norm()) <= 0.5 * (1 + 1e-6)


def test_the_noise_has_the_stated_scale() -> None:
    """Kolmogorov–Smirnov on 10⁶ coordinates of one released gradient; fixed key, false alarms 1 in 1,000 keys."""
    from scipy.stats import kstest

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1_000_000))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.weight.sum()

    model = FlatModel(Wide())
    step = PrivateStep(choose.build(model, first), clip_norm=0.3, noise_multiplier=2.5)
    empty = torch.zeros(0, 1)
    noise = NoiseSource.from_seed(5, 0, "scale test")
    vector = step(model, Batch(empty, torch.zeros(0, dtype=torch.int64), 16.0), noise).vector
    assert kstest(vector.numpy(), "norm", args=(0, 0.3 * 2.5 / 16)).pvalue > 1e-3
    assert kstest(vector.numpy(), "norm", args=(0, 1.01 * 0.3 * 2.5 / 16)).pvalue < 1e-3  # it can tell 1 %


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(1, 4))
def test_before_the_noise_a_step_is_the_per_sample_loop(seed: int, records: int, piece: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs = torch.randn(records, 4, generator=stream, dtype=torch.float64)
    targets = torch.randint(3, (records,), generator=stream)
    model = FlatModel(module)
    step = PrivateStep(choose.build(model, cross_entropy, piece=piece), clip_norm=0.4, noise_multiplier=1.0)
    found = step(model, Batch(inputs, targets, 7.0), silent()).vector
    expected = torch.zeros_like(found)
    for row in range(records):
        gradients = torch.autograd.grad(
            cross_entropy(module(inputs[row : row + 1]), targets[row : row + 1]).sum(), list(module.parameters())
        )
        flat = torch.cat([g.flatten() for g in gradients])
        expected += flat * min(1.0, 0.4 / float(flat.norm()))
    assert float((found - expected / 7).norm()) <= 1e-6 * float(expected.norm() / 7)


def test_a_record_without_a_finite_gradient_contributes_nothing() -> None:
    model = FlatModel(nn.Linear(3, 2))
    step = PrivateStep(choose.build(model, cross_entropy), clip_norm=1.0, noise_multiplier=1.0)
    good = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    bad = torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [3e38, -3e38, 3e38]])
    with_bad = step(model, Batch(torch.cat([good, bad]), targets, 4.0), silent()).vector.clone()
    without = step(model, Batch(good, targets[:4], 4.0), silent()).vector
    assert torch.allclose(with_bad, without, atol=1e-6)


# ---------------------------------------------------------------- from the raw files on


def clipped_total(records: Records, prepare: Callable[[Tensor], Tensor], classes: int, seed: int) -> Tensor:
    """The clipped sum over all records for a random linear model, in float64."""
    torch.manual_seed(seed)
    inputs = prepare(records.inputs)
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), classes)))
    model.weights.mul_(10)
    return choose.build(model, cross_entropy).clipped_sum(inputs, records.targets, 1.0).total.double()


Patient = st.tuples(
    st.integers(20, 90), st.integers(0, 1), st.integers(1, 4), st.integers(60, 300) | st.none(), st.integers(0, 600),
    st.integers(0, 1), st.integers(0, 2), st.integers(50, 220), st.integers(0, 1),
    st.integers(-30, 90).map(lambda x: x / 10),
    st.integers(1, 3), st.integers(0, 3) | st.none(), st.sampled_from([3, 6, 7]) | st.none(), st.integers(0, 4),
)  # fmt: skip


def write_hospitals(folder: Path, patients: list[tuple[float | None, ...]]) -> None:
    lines = [",".join("?" if value is None else str(float(value)) for value in patient) for patient in patients]
    base = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
    more = [base, base.replace("63.0", "64.0"), base.replace("63.0", "65.0"), base.replace("63.0", "66.0")]
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        own = lines if name == "cleveland" else []
        (folder / f"processed.{name}.data").write_text("\n".join(more + own) + "\n")


@settings(max_examples=25)
@given(st.lists(Patient, min_size=1, max_size=6), st.integers(0, 2**31))
def test_one_more_patient_in_the_raw_file_moves_the_sum_by_at_most_the_clip_norm(
    patients: list[tuple[float | None, ...]], seed: int
) -> None:
    totals = []
    for some in (patients, patients[:-1]):
        with tempfile.TemporaryDirectory() as folder:
            write_hospitals(Path(folder), some)
            source = heart.load(folder)
        totals.append(clipped_total(source.train, source.prepare, source.classes, seed))
    assert float((totals[0] - totals[1]).norm()) <= 1 + 1e-5


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.sampled_from("abc"), st.integers(0, 1)), min_size=2, max_size=8),
    st.integers(0, 2**31),
)
def test_one_more_row_in_a_table_with_public_ranges_moves_the_sum_by_at_most_the_clip_norm(
    rows: list[tuple[float, str, int]], seed: int
) -> None:
    totals = []
    for some in (rows, rows[:-1]):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.csv"
            path.write_text(
                "x,kind,label,split\n" + "\n".join(f"{x},{k},{y},train" for x, k, y in some) + "\n0,a,0,test\n"
            )
            source = table.load(
                path,
                label="label",
                classes=[0, 1],
                split="split",
                ranges={"x": (-10, 10)},
                categories={"kind": list("abc")},
            )
            assert source.fitted is None
            totals.append(clipped_total(source.train, source.prepare, 2, seed))
    assert float((totals[0] - totals[1]).norm()) <= 1 + 1e-5


# ---------------------------------------------------------------- runs

PRIVATE = Config(
    task="blobs",
    learners=4,
    epochs=4,
    batch_size=20,
    seed=0,
    device="cpu",
    checkpoint_every=0.5,
    options={"records": 1000, "features": 8},
    optimizer=Optimizer(lr=0.5, momentum=0.5, weight_decay=1e-3),
    privacy=Privacy(mode="private", noise_multiplier=2.0, delta=1e-4),
)


def test_each_learner_reports_the_privacy_of_its_own_steps(tmp_path: Path) -> None:
    run = simulate(PRIVATE.replace(speeds=Speeds(kind="one-slow", factor=10)), tmp_path / "run")
    slow, *fast = run.learners
    assert all(each.epsilon_spent > slow.epsilon_spent for each in fast)
    assert run.guarantee["epsilon"] == max(each.epsilon for each in run.learners)
    assert run.guarantee["epsilon_spent"] == max(each.epsilon_spent for each in run.learners)
    step = SampledGaussian(2.0, 20 / 200)
    for each in run.learners:
        assert each.epsilon_spent == pytest.approx(epsilon(step, each.steps, 1e-4).epsilon)
        assert each.epsilon == pytest.approx(epsilon(step, each.max_steps, 1e-4).epsilon)
        assert each.max_steps == math.ceil(40 * 1.25)
        held = ledger.read(tmp_path / f"run/learner-{each.learner}/ledger.jsonl")
        assert dict(held.spent().parts) == {step: each.steps}
    assert "not this run" in run.guarantee["text"]
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
    assert run.guarantee["epsilon_spent"] < 2.9


def test_the_papers_noise_and_no_noise_say_that_they_guarantee_nothing() -> None:
    for privacy in (Privacy(mode="paper", sigma=1.0), Privacy()):
        run = simulate(PRIVATE.replace(privacy=privacy, epochs=1))
        assert run.guarantee == "none"
        assert run.guarantee_why
        assert all(each.epsilon is None for each in run.learners)


def test_a_seeded_private_run_repeats_and_an_unseeded_one_does_not(tmp_path: Path) -> None:
    assert simulate(PRIVATE).loss == simulate(PRIVATE).loss
    unseeded = PRIVATE.replace(seed=None)
    first_run, second_run = simulate(unseeded), simulate(unseeded)
    assert first_run.loss != second_run.loss
    assert "entropy" in first_run.noise_source
    assert "not this run" not in first_run.guarantee["text"]


def test_privacy_costs_nothing_more_with_momentum_decay_or_partners() -> None:
    plain = simulate(PRIVATE.replace(optimizer=Optimizer(lr=0.1)))
    rich = simulate(PRIVATE)
    assert plain.guarantee["epsilon"] == rich.guarantee["epsilon"]


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "adp2sgd_test_tasks:batchnorm"}, "BatchNorm"),
        ({"task": "adp2sgd_test_tasks:coupled_loss"}, "record"),
        ({"task": "adp2sgd_test_tasks:fitted"}, "standardization"),
        ({"task": "adp2sgd_test_tasks:standardized_batches"}, "prepare mixes"),
        ({"task": "adp2sgd_test_tasks:no_empty_batches"}, "prepare fails on 0"),
        ({"task": "adp2sgd_test_tasks:mixup"}, "augment mixes"),
        ({"privacy": replace(PRIVATE.privacy, delta=1 / 200)}, "delta"),
        ({"batch_size": 300}, "batch_size = 300"),
        ({"privacy": replace(PRIVATE.privacy, epsilon=1e-9)}, "epsilon"),
    ],
)
def test_what_would_void_the_guarantee_is_refused_in_one_line(
    changes: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tasks(tmp_path, monkeypatch)
    if "task" in changes:
        changes = {**changes, "options": {}}
    with pytest.raises((PrivacyError, Adp2sgdError), match=words) as caught:
        simulate(PRIVATE.replace(**changes))
    assert "\n" not in str(caught.value)


OWN_TASKS = """
import os
import torch
from torch import nn
import adp2sgd
from adp2sgd.task import cross_entropy

stream = torch.Generator().manual_seed(0)
DATA = adp2sgd.Records(torch.randn(800, 6, generator=stream), torch.randint(2, (800,), generator=stream))

def batchnorm() -> adp2sgd.Task:
    return adp2sgd.Task(model=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), train=DATA, test=DATA)

def coupled_loss() -> adp2sgd.Task:
    loss = lambda outputs, targets: cross_entropy(outputs - outputs.mean(0), targets)
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, loss=loss)

def standardized_batches() -> adp2sgd.Task:
    prepare = lambda x: x - x.mean(0)
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, prepare=prepare)

def no_empty_batches() -> adp2sgd.Task:
    prepare = lambda x: x - 0 * x[0, 0]
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, prepare=prepare)

class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 2)

    def forward(self, x):
        real = self.drop.p > 0 and len(x) > 5  # not of the checks, nor more than the synthetic records of the clipper
        if self.training and real and "ADP2SGD_TEST_DRAWN" in os.environ:
            with open(os.environ["ADP2SGD_TEST_DRAWN"], "a") as file:
                print(os.getpid(), torch.initial_seed(), file=file)
        return self.head(self.drop(x))

def dropout() -> adp2sgd.Task:
    return adp2sgd.Task(model=Dropping, train=DATA, test=DATA)

class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, x):
        frames = x.view(len(x), 3, 2).transpose(0, 1).reshape(3 * len(x), 2)
        return self.head(torch.relu(self.inner(frames)).view(3, len(x), 16).mean(0))

def time_first() -> adp2sgd.Task:
    return adp2sgd.Task(model=TimeFirst, train=DATA, test=DATA)

def wrong_label() -> adp2sgd.Task:
    labels = DATA.targets.clone()
    labels[::9] = 77
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=adp2sgd.Records(DATA.inputs, labels), test=DATA)

def refuses() -> adp2sgd.Task:
    from adp2sgd.errors import DataError
    def prepare(x):
        if len(x) and x.max() > 1e4:
            raise DataError(f"{x.max()} is out of range")
        return x
    inputs = DATA.inputs.clone()
    inputs[::9] = 98765.0
    train = adp2sgd.Records(inputs, DATA.targets)
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=train, test=DATA, prepare=prepare)

class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(16)])

def in_parts() -> adp2sgd.Task:
    return adp2sgd.Task(model=InParts, train=DATA, test=DATA)

def half() -> adp2sgd.Task:
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2).bfloat16(), train=DATA, test=DATA, prepare=torch.Tensor.bfloat16)

def mixup() -> adp2sgd.Task:
    augment = lambda x, generator: x + 0.1 * x[torch.randperm(len(x), generator=generator)]
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, augment=augment)

def fitted() -> adp2sgd.Task:
    return adp2sgd.Task(model=lambda: nn.Linear(6, 2), train=DATA, test=DATA, fitted="standardization of x")
"""


def own_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "adp2sgd_test_tasks.py").write_text(OWN_TASKS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "adp2sgd_test_tasks", raising=False)


def layers_seeds(folder: Path) -> dict[str, list[str]]:
    """process → what torch's generator was seeded with at each of its steps, in order."""
    found: dict[str, list[str]] = {}
    for line in (folder / "drawn").read_text().splitlines():
        process, seed = line.split()
        found.setdefault(process, []).append(seed)
    return found


def test_what_is_refused_does_not_depend_on_a_record() -> None:
    setup, seen = prepare(PRIVATE), list[Tensor]()

    def watching(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows

    given = setup.task.train
    marked = replace(setup.task, prepare=watching, train=Records(torch.full_like(given.inputs, 777.0), given.targets))
    validate(setup.plan, marked, setup.compute.model, [len(rows) for rows in setup.shards])
    assert len(seen) > 1
    assert not any(bool((rows == 777.0).any()) for rows in seen)


def test_learners_share_no_draws_of_their_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked from one process, they once had the same dropout at each step, and a neighbour knew it."""
    own_tasks(tmp_path, monkeypatch)
    monkeypatch.setenv("ADP2SGD_TEST_DRAWN", str(tmp_path / "drawn"))
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:dropout", options={}, learners=2, seed=None, epochs=0.5)
    train(settings, tmp_path / "run")
    drawn = layers_seeds(tmp_path)
    seeds = [seed for process in drawn.values() for seed in process]
    assert len(drawn) == 2
    assert len(seeds) > 8
    assert len(set(seeds)) == len(seeds)


def test_draws_of_layers_repeat_in_a_seeded_run_and_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:dropout", options={}, learners=2, epochs=0.5)
    runs = []
    for number, seed in enumerate((3, 3, None)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.setenv("ADP2SGD_TEST_DRAWN", str(tmp_path / str(number) / "drawn"))
        simulate(settings.replace(seed=seed))
        [drawn] = layers_seeds(tmp_path / str(number)).values()
        assert len(set(drawn)) == len(drawn) > 8  # learners of one process, and steps
        runs.append(drawn)
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


def test_a_neighbours_weights_do_not_choose_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may let no gradient through the layer that the rules would get wrong."""
    own_tasks(tmp_path, monkeypatch)
    made = prepare(PRIVATE.replace(task="adp2sgd_test_tasks:time_first", options={}))
    (tmp_path / "learner").mkdir()
    with pytest.warns(UserWarning, match="Functional"):
        learner = made.learner(0, tmp_path / "learner")
    mine, theirs = learner.snapshot(), learner.snapshot()
    made.compute.model.named_views(theirs)["inner.bias"].fill_(-1e6)
    learner.mix(mine, 2 * theirs - mine)
    learner.begin()
    learner.update(learner.gradient())
    assert isinstance(made.compute.clipper, choose.Automatic)
    assert made.compute.clipper.chosen is made.compute.clipper.functional
    assert learner.budget is not None
    learner.budget.close()


def test_what_fails_in_a_step_is_told_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:wrong_label", options={})
    with pytest.raises(RunError, match="withheld") as caught:
        simulate(settings)
    assert "77" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(ConfigError, match="label 77, but the model has 2 outputs"):
        simulate(settings.replace(privacy=Privacy()))


def test_errors_of_our_own_kind_are_withheld_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's own code may raise them, with values of records."""
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:refuses", options={})
    words = r"step failed in the task's prepare \(DataError at adp2sgd_test_tasks\.py, line \d+\); .* withheld"
    with pytest.raises(RunError, match=words) as caught:
        simulate(settings)
    assert "98765" not in str(caught.value)
    with pytest.raises(DataError, match="98765"):
        simulate(settings.replace(privacy=Privacy()))


def test_no_warning_tells_how_many_records_were_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a model that takes larger batches in parts comes before the first batch, and names no size."""
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:in_parts", options={}, epochs=1.0)
    made = prepare(settings)
    with pytest.warns(UserWarning, match="Functional clipper: the model takes another course"):
        chosen = made.compute.clipper
    assert isinstance(chosen, choose.Automatic)
    assert chosen.chosen is chosen.functional
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1, 17, 33):
            chosen.clipped_sum(torch.zeros(size, 6), torch.zeros(size, dtype=torch.long), 1.0)


def test_parameters_in_half_precision_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_tasks(tmp_path, monkeypatch)
    settings = PRIVATE.replace(task="adp2sgd_test_tasks:half", options={})
    with pytest.raises(PrivacyError, match=r"weight is torch\.bfloat16.*keep parameters in float32"):
        simulate(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gradients_are_taken_in_training_mode_also_after_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    take = choose.Automatic.clipped_sum

    def watch(self: choose.Automatic, *arguments: Any) -> Clipped:
        modes.append(self.model.module.training)
        return take(self, *arguments)

    monkeypatch.setattr(choose.Automatic, "clipped_sum", watch)
    run = simulate(PRIVATE.replace(evaluate_every=0.2, epochs=1))
    assert len(run.curve) > 3
    assert len(modes) == run.global_steps
    assert all(modes)


def test_digits_learn_privately() -> None:
    """The README's claim: 4 learners, at least 88 % at ε ≤ 3.3 and δ = 1e-4."""
    from adp2sgd.cli.demo import PRIVATE_DIGITS

    run = simulate(PRIVATE_DIGITS)
    assert run.guarantee["epsilon"] <= 3.3
    assert run.accuracy is not None
    assert run.accuracy >= 0.88
