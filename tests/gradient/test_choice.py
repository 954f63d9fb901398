"""Which clipper is chosen, and why."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adp2sgd.errors import ConfigError, PrivacyError
from adp2sgd.flat import FlatModel
from adp2sgd.gradient import rules
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.choose import Automatic, build, explain
from adp2sgd.gradient.functional import Functional
from adp2sgd.gradient.loop import Loop
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.models import MODELS
from adp2sgd.task import cross_entropy
from against_loop import close, small, squared

pytestmark = pytest.mark.usefixtures("one_thread")


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,dp->np", x, self.weight)


class Mixed(nn.Module):
    """Puts the sequence before the batch: rows no longer belong to records in order, which no shape reveals."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        return self.inner(x.transpose(0, 1).reshape(t * n, 4)).view(t, n, 3).transpose(0, 1)


@pytest.mark.parametrize(
    ("module", "shape", "taken"),
    [(Einsum(), (4,), Functional), (Mixed(), (5, 4), Functional), (nn.GRUCell(4, 3), (4,), Loop)],
)
def test_fallback_is_exact_and_said_once(module, shape, taken):
    model = FlatModel(module)
    clipper = Automatic(model, squared)
    inputs, targets = torch.randn(6, *shape), torch.randn(6)
    with pytest.warns(UserWarning, match="slower"):
        found = clipper.clipped_sum(inputs, targets, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipper.clipped_sum(inputs, targets, 0.5)
    assert isinstance(clipper.chosen, taken)
    assert close(found.total, Loop(model, squared).clipped_sum(inputs, targets, 0.5).total, 1e-5)


class Slots(nn.Module):
    """One learned factor, the same at all `slots` places of a record."""

    def __init__(self, slots: int, spread: str):
        super().__init__()
        self.slots, self.spread = slots, spread
        self.offset = nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        if self.spread == "token":
            return x * self.offset.expand(len(x), self.slots)
        if self.spread == "repeat":
            return x * self.offset.repeat(self.slots)
        return x * self.offset.expand(self.slots)


@pytest.mark.parametrize("spread", ["expand", "repeat", "token"])
@pytest.mark.parametrize("slots", [3, 4, 12, 30])
def test_a_parameter_spread_over_a_records_places_is_never_taken_for_records(slots, spread):
    """Whatever the batch's size: 30 places and 30, 15 or 10 records once were taken for one another."""
    model = FlatModel(Slots(slots, spread))
    clipper = Automatic(model, squared)
    for records in (1, 2, 3, 4, 5, 6, 10, 12, 15, 30):
        inputs = torch.randn(records, slots, generator=torch.Generator().manual_seed(records)) * 10
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = clipper.clipped_sum(inputs, torch.zeros(records), 0.5)
        expected = Loop(model, squared).clipped_sum(inputs, torch.zeros(records), 0.5)
        assert close(found.total, expected.total, 1e-5)
        assert torch.allclose(found.norms, expected.norms, rtol=1e-5)
    assert (clipper.chosen is clipper.bookkeeping) == (spread == "token")


class TwoViews(nn.Module):
    """In training the record and its mirror image, all records of the one before all of the other."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.net(x)
        one, other = self.net(torch.cat([x, x.flip(-1)])).chunk(2)
        return (one + other) / 2


class Small(nn.Module):
    """A layer that reads frames of all records in turn, behind gates that all but hide it at first."""

    def __init__(self):
        super().__init__()
        self.inner, self.gates, self.head = nn.Linear(2, 4), nn.Parameter(torch.full((3,), 1e-7)), nn.Linear(6, 3)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.view(len(x), 3, 2).transpose(0, 1).reshape(-1, 2)
        hidden = self.out(self.inner(frames).tanh().view(3, len(x), 4).sum(0))
        return self.head(x) + self.gates.prod() * hidden


class Picked(nn.Module):
    """Only frames that are not zero pass, in an order that depends on them."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.inner, self.head = how, nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.view(len(x), 3, 2)
        if self.how == "branch":
            return self.head(self.inner(frames if frames.sum() > -1 else -frames).tanh().sum(1))
        if self.how == "order":
            order = frames.square().sum((1, 2)).argsort()
            return self.head(self.inner(frames[order]).tanh().sum(1)[order.argsort()])
        hidden = x.new_zeros(len(x), 3, 4)
        full = frames.square().sum(2) > 0
        hidden[full] = self.inner(frames[full]).tanh()
        return self.head(hidden.sum(1))


@pytest.mark.parametrize(
    "module", [TwoViews(), Small(), Picked("branch"), Picked("order"), Picked("full")], ids=lambda m: type(m).__name__
)
def test_rows_that_are_not_the_records_own_are_seen_by_the_check(module):
    """Removing a record moves the clipped sum by C at most, whatever the weights and values are by then."""
    torch.manual_seed(0)
    model = FlatModel(module.train())
    clipper = Automatic(model, cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clipper.settle(torch.rand(2, 6), torch.zeros(2, dtype=torch.long))
    assert clipper.chosen is not clipper.bookkeeping
    if isinstance(module, Small):
        model.named_views(model.weights)["gates"].fill_(1.5)
    inputs, targets = torch.randn(8, 6), torch.randint(3, (8,))
    inputs[1::2, 2:] = 0
    whole = clipper.clipped_sum(inputs, targets, 0.5).total
    for record in range(8):
        rest = torch.arange(8) != record
        moved = torch.linalg.vector_norm(whole - clipper.clipped_sum(inputs[rest], targets[rest], 0.5).total)
        assert float(moved) <= 0.5 * (1 + 1e-5)


def test_dropout_as_a_function_does_not_disturb_the_choice():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(F.dropout(x, 0.5, self.training))

    clipper = Automatic(FlatModel(Dropping()), cross_entropy)
    clipper.settle(torch.rand(2, 6), torch.zeros(2, dtype=torch.long))
    assert clipper.chosen is clipper.bookkeeping


def test_weights_that_let_no_gradient_through_check_nothing():
    model = FlatModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    model.named_views(model.weights)["0.bias"].fill_(-1e6)
    clipper = Automatic(model, cross_entropy)
    with pytest.warns(UserWarning, match="no gradient"):
        clipper.settle(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))
    assert clipper.chosen is clipper.loop


def test_book_keeping_names_what_it_cannot_do():
    with pytest.raises(UnsupportedError, match="einsum of weight"):
        BookKeeping(FlatModel(Einsum()), squared).clipped_sum(torch.randn(2, 4), torch.randn(2), 1.0)


def test_batch_norm_is_refused():
    model = FlatModel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with pytest.raises(PrivacyError, match="BatchNorm"):
        build(model, squared).clipped_sum(torch.randn(4, 4), torch.randn(4), 1.0)


def test_dropout_differs_between_records_and_does_not_disturb_the_choice():
    model = FlatModel(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 3)))
    clipper = Automatic(model, cross_entropy)
    found = clipper.clipped_sum(torch.ones(4, 64), torch.zeros(4, dtype=torch.long), 1.0)
    assert clipper.chosen is clipper.bookkeeping
    assert model.module.training
    assert len(set(found.norms.tolist())) > 1


@pytest.mark.slow
def test_rounding_does_not_disturb_the_choice():
    """In float32 this model's loop and batch differ by 1e-3 and more, since rounding flips ReLUs."""
    model = FlatModel(MODELS["googlenet"](norm="group"))
    clipper = Automatic(model, cross_entropy)
    assert clipper.choose(torch.randn(2, 3, 32, 32), torch.tensor([3, 7])) is clipper.bookkeeping


def test_explain():
    rows = explain(FlatModel(small()), cross_entropy, torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    assert {row.layer: row.parameters for row in rows}["4.weight"] == 192
    assert {row.layer: row.rule for row in rows}["4.weight"] == "ghost"
    assert all(row.why for row in rows)
    fallback = explain(FlatModel(Einsum()), squared, torch.randn(2, 4), torch.randn(2))
    assert [(row.layer, row.rule) for row in fallback] == [("weight", "functional")]
    assert "einsum" in fallback[0].why


class Picky(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.dtype == torch.bfloat16:
            raise RuntimeError("no half numbers here")
        return y


def test_a_model_that_fails_in_the_type_of_the_steps_is_found_before_them():
    clipper = build(FlatModel(Picky(3, 2)), cross_entropy, autocast=torch.bfloat16)
    with pytest.warns(UserWarning, match="no half numbers here"):
        clipper.settle(torch.randn(0, 3), torch.zeros(0, dtype=torch.long))
    assert clipper.chosen is not clipper.bookkeeping
    assert clipper.clipped_sum(torch.randn(3, 3), torch.zeros(3, dtype=torch.long), 1.0).total.any()


def test_explain_tells_of_the_type_of_the_steps():
    batch = torch.randn(2, 3), torch.zeros(2, dtype=torch.long)
    whole, half = (explain(FlatModel(Picky(3, 2)), cross_entropy, *batch, autocast=t) for t in (None, torch.bfloat16))
    assert [row.rule for row in whole] == ["ghost", "per-record"]
    assert [row.why for row in half] == ["no half numbers here"] * 2


def test_unknown_clipper_lists_the_known_ones():
    with pytest.raises(ConfigError, match="book-keeping"):
        build(FlatModel(small()), cross_entropy, clipper="fast")
    with pytest.raises(ConfigError, match="copies"):
        build(FlatModel(small()), cross_entropy, copies=0)


def test_what_is_held_counts_as_memory_of_a_record():
    module = nn.Conv2d(3, 40, 3)
    clipper = BookKeeping(FlatModel(module), lambda outputs, targets: outputs.flatten(1).sum(1) - targets)
    tape = clipper.taped(torch.randn(4, 3, 9, 9), torch.zeros(4))
    layer = 4 * (3 * 9 * 9 + 40 * 7 * 7) * 4  # inputs and gradients of four records, in bytes
    assert tape.held == layer + 4 * module.weight.numel() * 4 + 4 * module.bias.numel() * 4


def test_large_per_record_gradients_are_not_held():
    use = rules.Linear(torch.randn(3, 50, 4), torch.randn(3, 50, 5))
    assert use.rule == "per-record"
    kept = rules.settle(use, keep_bytes=0)
    assert isinstance(kept, rules.Kept)  # smaller than what was recorded
    use.held = 0
    assert rules.settle(use, keep_bytes=0) is use
    assert torch.equal(kept.measure().squares, use.measure().squares)
    assert kept.measure().doubt is None
    assert use.measure().doubt is not None
