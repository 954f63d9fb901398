"""What every clipper promises: `Clipper.clipped_sum`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adp2sgd.flat import FlatModel
from adp2sgd.gradient import rounding
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.choose import build
from adp2sgd.gradient.clip import clip_factors, effective_norms
from adp2sgd.gradient.functional import Functional
from adp2sgd.gradient.loop import Loop
from adp2sgd.task import cross_entropy
from against_loop import close, small

pytestmark = pytest.mark.usefixtures("one_thread")

CLIPPERS: dict[str, Callable[..., object]] = {"book-keeping": BookKeeping, "functional": Functional, "loop": Loop}


@pytest.mark.parametrize("clipper", ["auto", "book-keeping", "functional", "loop"])
def test_contract(clipper):
    model = FlatModel(small())
    model.grad.fill_(7.0)
    taken = build(model, cross_entropy, clipper=clipper)
    inputs, targets = torch.randn(5, 1, 4, 4), torch.randint(0, 3, (5,))
    empty = taken.clipped_sum(inputs[:0], targets[:0], 1.0)
    assert empty.total.abs().sum() == 0
    assert empty.norms.shape == (0,)
    found = taken.clipped_sum(inputs, targets, 0.5)
    assert found.total.dtype in (torch.float32, torch.float64)
    assert found.norms.shape == (5,)
    assert bool((model.grad == 7).all())
    assert all(p.requires_grad for p in model.module.parameters())


@pytest.mark.parametrize("clipper", ["auto", "book-keeping", "functional", "loop"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_record_without_finite_gradient_contributes_nothing(clipper, bad):
    model = FlatModel(small())
    taken = build(model, cross_entropy, clipper=clipper)
    inputs, targets = torch.randn(5, 1, 4, 4), torch.randint(0, 3, (5,))
    good = torch.tensor([0, 1, 3])
    expected = taken.clipped_sum(inputs[good], targets[good], 0.5)
    inputs[2], inputs[4] = bad, bad
    found = taken.clipped_sum(inputs, targets, 0.5)
    assert found.norms.isinf().tolist() == [False, False, True, False, True]
    assert close(found.total, expected.total, 1e-5)
    assert close(found.norms[good], expected.norms, 1e-5)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6), clip=st.sampled_from([1e-3, 0.1, 1.0]), autocast=st.sampled_from([None, torch.bfloat16])
)
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(seed, clip, autocast):
    torch.manual_seed(seed)
    model = FlatModel(small())
    clipper = BookKeeping(model, cross_entropy, autocast=autocast)
    inputs, targets = 10 * torch.randn(1, 1, 4, 4), torch.randint(0, 3, (1,))
    alone = clipper.clipped_sum(inputs, targets, clip)
    assert torch.linalg.vector_norm(alone.total.double()) <= clip * (1 + 1e-6)
    whole = clipper.clipped_sum(inputs, targets, float("inf"))
    # Also under bfloat16 the norm is of the values that are summed.
    assert close(torch.linalg.vector_norm(whole.total.double())[None], whole.norms, 1e-5)


@pytest.mark.parametrize("clip", [1e-3, 1.0, math.inf])
def test_clip_factors(clip):
    norms = torch.tensor([0.0, 0.5, 2.0, math.inf, math.nan], dtype=torch.float64)
    factors = clip_factors(norms, clip, torch.float32)
    assert torch.equal(factors[[0, 3, 4]], torch.tensor([1.0, 0.0, 0.0]))
    expected = (clip / norms[1:3]).clamp(max=1.0)
    assert close(factors[1:3], expected, 1e-6)
    assert bool((factors[1:3] <= expected).all())


def test_no_square_hides_another():
    """A sum over Gram matrices may come out negative by rounding."""
    parts = [rounding.Measured(torch.tensor([square], dtype=torch.float64)) for square in (4.0, -3.0)]
    assert rounding.together(parts).squares.tolist() == [4.0]


def test_doubt_is_allowed_for():
    """All of it, and where a gradient is nearly all cancelled (or nothing) one rounding for each of its terms."""
    doubt = torch.tensor([0.0, 1e-9, 1e-2, 1.0], dtype=torch.float64)
    squares = torch.tensor([4.0, 4.0, 4.0, 0.0], dtype=torch.float64)
    found = effective_norms(rounding.Measured(squares, doubt, 100)) - squares.sqrt()
    worst = 1 + 100 / rounding.ROUNDINGS
    assert found[0] == 0
    assert 1e-9 * (1 - 1e-5) <= found[1] <= 1.01e-9
    assert close(found[2:], worst * doubt[2:], 1e-12)


def test_pieces_and_copies():
    model = FlatModel(small())
    inputs, targets = torch.randn(14, 1, 4, 4), torch.randint(0, 3, (7,)).repeat_interleave(2)
    whole = build(model, cross_entropy, copies=2).clipped_sum(inputs, targets, 0.5)
    pieces = build(model, cross_entropy, copies=2, piece=3).clipped_sum(inputs, targets, 0.5)
    assert close(pieces.total, whole.total, 1e-5)
    assert close(pieces.norms, whole.norms, 1e-5)
    assert whole.norms.shape == (7,)


@pytest.mark.parametrize("clipper", ["book-keeping", "functional", "loop"])
def test_a_sum_of_many_records_is_not_rounded_before_the_noise(clipper):
    """One of 4,096 equal records moves the sum by its share to 1e-5 of the clip norm; in float32 it would be 1e-3."""
    model = FlatModel(nn.Linear(3, 2))
    taken = build(model, cross_entropy, clipper=clipper)
    inputs, targets = torch.full((4096, 3), 0.3), torch.zeros(4096, dtype=torch.long)
    more, less = (taken.clipped_sum(inputs[:n], targets[:n], 1e-2).total for n in (4096, 4095))
    assert more.dtype == torch.float64
    assert float(torch.linalg.vector_norm(more - less)) <= 1e-2 * (1 + 1e-5)
