"""Steps whose work does not depend on their batch: what they cost of δ, that they compute the same, and that the
operations of a step are the same whatever was drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adp2sgd.config import Config, Optimizer, Privacy
from adp2sgd.data.batches import PoissonBatches
from adp2sgd.data.records import Records
from adp2sgd.engine.setup import prepare
from adp2sgd.engine.simulation.simulate import simulate
from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import bookkeeping, choose
from adp2sgd.models import MODELS
from adp2sgd.privacy.accountant import epsilon
from adp2sgd.privacy.budget import Budget
from adp2sgd.privacy.fixed_work import SHARE, cost, overflow_for, rows_for
from adp2sgd.privacy.ledger import read
from adp2sgd.privacy.mechanism import THREAT_MODEL, TIMED_THREAT_MODEL, Composed, SampledGaussian
from adp2sgd.privacy.plan import plan
from adp2sgd.privacy.policy import RenyiFilter, conversion, parse
from adp2sgd.randomness.streams import Streams
from adp2sgd.task import Task, cross_entropy

DELTA = 1e-5
FIXED = Privacy(mode="private", epsilon=3.0, delta=DELTA, fixed_work=True)


# ---------------------------------------------------------------- rows and δ


def tail(records: int, rate: Fraction, rows: int) -> Fraction:
    """P(batch > rows), exactly."""
    return sum(
        (math.comb(records, k) * rate**k * (1 - rate) ** (records - k) for k in range(rows + 1, records + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize(("records", "batch_size"), [(50, 5), (300, 32), (400, 200), (400, 399)])
@pytest.mark.parametrize("overflow", [1e-3, 1e-12, 3e-17, 1e-60])
def test_rows_are_the_fewest_that_batches_exceed_rarely_enough(records: int, batch_size: int, overflow: float) -> None:
    rate = batch_size / records
    rows = rows_for(records, rate, overflow)
    assert batch_size <= rows <= records
    assert tail(records, Fraction(rate), rows) <= Fraction(overflow) * Fraction("1.000001")
    assert tail(records, Fraction(rate), rows - 1) > Fraction(overflow)


def test_no_batch_is_cut_where_all_records_are_drawn_or_nothing_may_be_cut() -> None:
    assert rows_for(100, 1.0, 1e-15) == 100
    assert rows_for(100, 0.5, 0.0) == 100


@pytest.mark.parametrize("wanted", [0.5, 3.0, 12.0, 50.0])
def test_cuts_of_a_run_cost_at_most_their_share_of_delta(wanted: float) -> None:
    whole = 1000 * overflow_for(wanted, DELTA, 1000)
    assert cost(wanted, whole) <= SHARE * DELTA
    assert wanted < 10 or cost(wanted, whole) > 0.9 * SHARE * DELTA


def test_epsilon_leaves_room_for_cuts_in_delta() -> None:
    """ε is the accountant's at what cuts leave of δ, and they are charged at that very ε."""
    step, cut = SampledGaussian(1.0, 0.02), SampledGaussian(1.0, 0.02, overflow=1e-11)
    for steps in (1, 100, 1000):
        found = epsilon(cut, steps, DELTA)
        left = DELTA - cost(found.epsilon, steps * 1e-11)
        assert found.delta == DELTA
        assert epsilon(step, steps, left).epsilon == pytest.approx(found.epsilon, rel=1e-4)
        assert epsilon(step, steps, left).epsilon <= found.epsilon
        assert epsilon(step, steps, DELTA).epsilon <= found.epsilon * (1 + 1e-4)  # they are of different grids
    both = Composed(((step, 500), (cut, 500)))
    assert epsilon(step, 1000, DELTA).epsilon < epsilon(both, 1, DELTA).epsilon < epsilon(cut, 1000, DELTA).epsilon


SIZE: dict[str, int] = {"records": 1000, "batch_size": 20, "planned_steps": 200}
LASTING = FIXED.replace(ledger="ledgers")


def test_cuts_beyond_delta_leave_no_guarantee() -> None:
    assert math.isinf(epsilon(SampledGaussian(2.0, 0.02, overflow=1e-6), 100, DELTA).epsilon)
    assert math.isinf(epsilon(SampledGaussian(0.3, 0.5, overflow=1e-12), 100, DELTA).epsilon)  # at a large ε


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise_multiplier": 1.5},
        {"epsilon": None, "noise_multiplier": 1.5},
        {"adjacency": "replace-one"},
        {"ledger": "ledgers"},
        {"ledger": "ledgers", "noise_multiplier": 1.5},
    ],
)
def test_a_plan_keeps_the_stated_epsilon_at_the_stated_delta(changes: dict[str, Any]) -> None:
    privacy = FIXED.replace(**changes)
    made = plan(privacy, **SIZE)
    spent = made.spent_after(made.max_steps)
    assert made.mechanism.overflow > 0
    assert made.policy.delta == spent.delta == DELTA
    assert math.isfinite(spent.epsilon)
    if privacy.epsilon is not None:
        assert 0.95 * privacy.epsilon < spent.epsilon <= privacy.epsilon
    plain = plan(privacy.replace(fixed_work=False), **SIZE)
    assert made.mechanism.noise_multiplier == pytest.approx(plain.mechanism.noise_multiplier, rel=0.01)
    assert 0.98 * plain.max_steps <= made.max_steps <= plain.max_steps


def test_a_filter_sets_a_part_of_delta_aside_for_the_cuts_of_all_runs() -> None:
    policy = plan(LASTING, **SIZE).policy
    assert isinstance(policy, RenyiFilter)
    aside = cost(policy.epsilon, policy.overflow)
    assert 0 < aside <= SHARE * DELTA
    without = replace(policy, overflow=0.0)
    assert policy.allowance() == pytest.approx(without.epsilon - conversion(policy.order, DELTA - aside))
    assert policy.allowance() < without.allowance()
    one = SampledGaussian(20.0, 0.02, overflow=policy.overflow / 100)
    assert policy.room(Composed(()), one) == 100  # not more steps than may be cut, whatever their divergence
    assert policy.room(Composed(((replace(one, sample_rate=0.01), 60),)), one) == 40
    assert parse(policy.entry()) == policy


def test_runs_with_and_without_fixed_work_share_a_ledger_that_sets_delta_aside_and_no_other() -> None:
    for first in (FIXED, LASTING):
        begun = plan(first.replace(fixed_work=False), **SIZE)
        with pytest.raises(PrivacyError, match="needs a ledger that was begun with it"):
            plan(first, **SIZE, policy=begun.policy)
    with pytest.raises(PrivacyError, match="allows steps of fixed work alone"):
        plan(FIXED.replace(fixed_work=False), **SIZE, policy=plan(FIXED, **SIZE).policy)
    mixed = plan(LASTING.replace(fixed_work=False), **SIZE, policy=plan(LASTING, **SIZE).policy)
    assert mixed.mechanism.overflow == 0


# ---------------------------------------------------------------- the same sum


def test_a_batch_is_packed_and_filled_up() -> None:
    usual, fixed = (PoissonBatches(50, 5, Streams(3, 0), rows) for rows in (None, 7))
    sizes = set()
    for step in range(300):
        drawn, packed = usual.draw(step), fixed.draw(step)
        expected = drawn[:7].tolist()
        assert packed.tolist() == expected + [50] * (7 - len(expected))
        assert fixed.counted(packed) == len(expected)
        assert usual.counted(drawn) is None
        sizes.add(len(drawn))
    assert min(sizes) < 2
    assert max(sizes) > 7  # some were cut


class Rows(TorchDispatchMode):
    """Every operation below autograd, with the shapes that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(a.shape) for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        self.trace.append((str(func), *shapes))
        return func(*args, **(kwargs or {}))


def traced(work: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """The clippers refuse dispatch modes, of which they cannot know what they do; this one only looks on."""
    with Rows() as rows, patch.object(torch._C, "_len_torch_dispatch_stack", lambda: 0):
        result = work()
    return result, rows.trace


class Picky(nn.Module):
    """NaN for an all-zero record, such as fills up a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MODELS["cnn"](size=8, channels=1, norm="group")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x / x.abs().amax((1, 2, 3), keepdim=True))
        return out


class Tokens(nn.Module):
    """An embedding that is the output layer as well, and a matrix that is computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.middle = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0, 0, :5].nan_to_num().abs() * 3).clamp(max=9).long()
        scale = x[:, 0, 1, :1]
        hidden = nn.functional.linear(self.table(tokens).mean(1), self.middle.tanh()) / scale
        return nn.functional.linear(hidden, self.table.weight)


CLIPPERS = {"loop": {}, "functional": {}, "book-keeping": {}, "in pieces": {"piece": 5}}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", [Picky, Tokens])
@pytest.mark.parametrize("name", CLIPPERS)
def test_what_fills_up_a_batch_adds_nothing_and_changes_no_operation(
    name: str, kind: type[nn.Module], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fillers and a bad record give NaN; the sum stays that of the good records, by the same operations."""
    model = FlatModel(kind())
    clipper = choose.build(
        model, cross_entropy, clipper=name.replace("in pieces", "book-keeping"), copies=copies, **CLIPPERS[name]
    )
    loop = choose.build(model, cross_entropy, clipper="loop", copies=copies)
    inputs = torch.randn(12, 1, 8, 8).repeat_interleave(copies, 0)
    targets = torch.randint(0, 10, (12,)).repeat_interleave(copies, 0)
    inputs[:copies] = math.nan  # record 0 has no finite gradient
    clipper.clipped_sum(inputs, targets, 0.5, 12)  # the model's program is proven once, on synthetic records
    traces = []
    for records in (0, 1, 5, 7, 12):
        batch = inputs.clone()
        batch[records * copies :] = 0
        found, trace = traced(lambda: clipper.clipped_sum(batch, targets, 0.5, records))  # noqa: B023
        expected = loop.clipped_sum(inputs[copies : records * copies], targets[copies : records * copies], 0.5)
        torch.testing.assert_close(found.total.double(), expected.total, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.norms[1:records], expected.norms, rtol=1e-4, atol=1e-6)
        assert len(found.norms) == 12
        assert bool(found.norms[0].isinf())
        traces.append(trace)
    assert len(traces[0]) > 20
    assert all(trace == traces[0] for trace in traces)
    monkeypatch.setattr(bookkeeping, "on_gpu", lambda device: True)  # as a GPU takes batches
    again = clipper.clipped_sum(inputs, targets, 0.5, 7)
    expected = loop.clipped_sum(inputs[copies : 7 * copies], targets[copies : 7 * copies], 0.5)
    torch.testing.assert_close(again.total.double(), expected.total, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- a whole learner and a whole run


def poisoned() -> Task:
    """Blobs of which some are so large that their gradients are not finite."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 6, generator=generator)
    targets = (inputs[:, 0] > 0).long()
    inputs[::10] *= 1e38
    test = Records(inputs[1:10], targets[1:10])
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
    return Task(model=model, train=Records(inputs, targets), test=test, loss=cross_entropy)


SETTINGS = Config(
    task=f"{__name__}:poisoned",
    learners=2,
    epochs=4,
    batch_size=10,
    seed=5,
    device="cpu",
    optimizer=Optimizer(lr=0.3),
    privacy=Privacy(mode="private", noise_multiplier=1.5, delta=1e-4),
)


def traces_of_steps(settings: Config, folder: Path) -> tuple[list[int], list[list[tuple[Any, ...]]]]:
    """For 12 steps of learner 0: the records drawn, and every operation from the draw to the noisy gradient."""
    setup = prepare(settings)
    folder.mkdir()
    learner = setup.learner(0, folder)
    sizes, traces = [], []

    def step() -> None:
        learner.begin()
        learner.gradient()

    step()  # what is made at the first step only
    for number in range(1, 13):
        learner.steps = number
        _, trace = traced(step)
        traces.append(trace)
        sizes.append(int((learner.sampler.rows < 100).sum()))
    assert learner.budget is not None
    learner.budget.close()
    return sizes, traces


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("clipper", ["auto", "loop"])
def test_the_operations_of_a_step_do_not_depend_on_its_batch(
    clipper: str, quantile: float | None, tmp_path: Path
) -> None:
    privacy = SETTINGS.privacy.replace(clipper=clipper, clip_quantile=quantile, count_noise=quantile and 3.0)
    usual = SETTINGS.replace(privacy=privacy)
    sizes, traces = traces_of_steps(usual, tmp_path / "usual")
    assert len(set(sizes)) > 3
    assert any(trace != traces[0] for trace in traces)  # so a difference would show
    same_sizes, fixed = traces_of_steps(usual.replace(privacy=privacy.replace(fixed_work=True)), tmp_path / "fixed")
    assert same_sizes == sizes
    assert all(trace == fixed[0] for trace in fixed)


@pytest.mark.parametrize("clipper", ["auto", "loop"])
def test_a_run_of_fixed_work_learns_the_same(clipper: str, tmp_path: Path) -> None:
    """With the same seed: the batches, the clipped sums and the noise are those of a run without it."""
    usual = SETTINGS.replace(privacy=SETTINGS.privacy.replace(clipper=clipper, clip_quantile=0.4, count_noise=3.0))
    runs = {}
    for fixed in (False, True):
        settings = usual.replace(privacy=usual.privacy.replace(fixed_work=fixed))
        runs[fixed] = simulate(settings, tmp_path / str(fixed))
    plain, fixed_run = runs[False], runs[True]
    assert plain.loss == pytest.approx(fixed_run.loss, rel=1e-4)
    for one, other in zip(plain.learners, fixed_run.learners, strict=True):
        assert one.clip_norm == pytest.approx(other.clip_norm, rel=1e-4)
    assert plain.guarantee.epsilon < fixed_run.guarantee.epsilon < 1.01 * plain.guarantee.epsilon
    assert plain.guarantee.threat_model == THREAT_MODEL
    assert fixed_run.guarantee.threat_model == TIMED_THREAT_MODEL
    ((mechanism, _),) = read(tmp_path / "True/learner-0/ledger.jsonl").spent().parts
    assert mechanism.overflow > 0


def test_the_words_of_a_guarantee_say_whether_the_time_of_steps_is_covered(tmp_path: Path) -> None:
    assert "an observer who measures how long steps take is not covered" in THREAT_MODEL
    assert "measures how long they take" in TIMED_THREAT_MODEL

    def words(run: str, fixed: bool) -> str:
        (tmp_path / run).mkdir()
        budget = Budget.open(
            tmp_path / "ledger.jsonl",
            LASTING.replace(noise_multiplier=20.0, fixed_work=fixed, runs=4),
            dataset="d", site="s", records=1000, batch_size=20, planned_steps=10,
            plan_path=tmp_path / run / "plan.json", seeded=False,
        )  # fmt: skip
        budget.draw()
        budget.close()
        return budget.guarantee().threat_model

    assert words("first", fixed=True) == TIMED_THREAT_MODEL
    assert words("second", fixed=False) == THREAT_MODEL
    assert words("third", fixed=True) == THREAT_MODEL  # the second run's steps told something by their time


@pytest.mark.parametrize("mode", [{"mode": "none"}, {"mode": "paper", "sigma": 1.0}])
def test_fixed_work_is_for_private_mode(mode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.fixed_work = True means nothing in mode"):
        Privacy(fixed_work=True, **mode)
