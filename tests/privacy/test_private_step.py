"""One private step: what it releases, from the raw files on, and that broken versions are caught."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adp2sgd.data import heart, table
from adp2sgd.data.batches import Batch
from adp2sgd.data.records import Records
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import choose
from adp2sgd.gradient.clipper import Clipped, Clipper
from adp2sgd.gradient.privatize import PrivateStep
from adp2sgd.randomness.noise import NoiseSource
from adp2sgd.task import cross_entropy
from conftest import gradient_of

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
        vectors = [gradient_of(step, model, Batch(inputs, targets, expected), noise).clone() for _ in range(draws)]
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
    vector = gradient_of(step, model, Batch(empty, torch.zeros(0, dtype=torch.int64), 16.0), noise)
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
    found = gradient_of(step, model, Batch(inputs, targets, 7.0), silent())
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
    with_bad = gradient_of(step, model, Batch(torch.cat([good, bad]), targets, 4.0), silent()).clone()
    without = gradient_of(step, model, Batch(good, targets[:4], 4.0), silent())
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
