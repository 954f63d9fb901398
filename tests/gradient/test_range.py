"""At which weights the fast clipper is used, and where a large gradient fades out."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from adp2sgd.errors import Adp2sgdWarning
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.clip import FADES, clip_factors
from adp2sgd.gradient.range import FARTHEST, GROWTH, WeightRange
from adp2sgd.task import cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> FlatModel:
    return FlatModel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def test_weights_are_probed_when_a_parameter_has_grown_and_never_far_from_the_first():
    model, asked = network(), []
    first = model.weights.clone()

    def drift() -> float:
        asked.append(float(model.weights.abs().max()))
        return 1e-6

    allowed = WeightRange(model, drift, at_first=1e-7)
    assert allowed.holds()
    model.weights.mul_(0.9 * GROWTH)
    assert allowed.holds()
    assert asked == []
    model.named_views(model.weights)["2.weight"].mul_(2)  # one parameter suffices
    assert allowed.holds()
    assert allowed.holds()
    assert len(asked) == 1  # the limits have moved
    model.weights.copy_(first * FARTHEST * 1.1)
    assert not allowed.holds()
    model.weights.fill_(float("nan"))
    assert not allowed.holds()
    assert len(asked) == 1
    model.weights.copy_(first)
    assert allowed.holds()


@pytest.mark.parametrize(("at_first", "found", "right"), [(1e-7, 2e-5, False), (1e-5, 2e-5, True), (1e-7, 9e-6, True)])
def test_weights_that_move_shares_much_farther_than_the_first_are_not_taken(at_first, found, right):
    model = network()
    allowed = WeightRange(model, lambda: found, at_first=at_first)
    model.weights.mul_(GROWTH * 2)
    assert allowed.holds() is right


def test_at_hostile_weights_the_loop_takes_the_batch_and_says_so_once():
    model = network()
    clipper = Automatic(model, cross_entropy)
    inputs, targets = torch.randn(5, 6), torch.randint(3, (5,))
    clipper.settle(inputs, targets)
    first = model.weights.clone()
    model.weights.mul_(1e5)
    with pytest.warns(Adp2sgdWarning, match="slower Loop clipper: the weights amplify rounding"):
        found = clipper.clipped_sum(inputs, targets, 1.0).total
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipper.clipped_sum(inputs, targets, 1.0)
    assert torch.equal(found, clipper.loop.clipped_sum(inputs, targets, 1.0).total)
    model.weights.copy_(first)
    assert torch.equal(
        clipper.clipped_sum(inputs, targets, 1.0).total, clipper.bookkeeping.clipped_sum(inputs, targets, 1.0).total
    )


def test_a_share_fades_out_before_its_norm_overflows():
    """No jump anywhere: a norm that differs by 1e-6 of itself moves the share by a few 1e-6 of the clip norm."""
    norms = torch.logspace(0, 38, 200_000, dtype=torch.float64)
    shares = clip_factors(norms, 0.5, torch.float32).double() * norms
    moved = (clip_factors(norms * (1 + 1e-6), 0.5, torch.float32).double() * norms - shares).abs()
    assert float(moved.max()) <= 0.5 * 4e-6
    assert bool((shares[norms <= FADES] > 0.49999).all())
    assert not bool(shares[norms > 2 * FADES].any())
