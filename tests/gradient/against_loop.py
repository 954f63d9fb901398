"""What tests of clippers share: any clipper against a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import register_random, settings
from torch import Tensor, nn

from adp2sgd.flat import FlatModel
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.loop import Loop

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class TorchRandom:
    """Every example starts from the same numbers, so that a failing one can be run again."""

    seed, getstate, setstate = (
        staticmethod(torch.manual_seed),
        staticmethod(torch.get_rng_state),
        staticmethod(torch.set_rng_state),
    )


EXAMPLES = TorchRandom()
register_random(EXAMPLES)
few = settings(max_examples=15)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A smooth loss for outputs of any shape; targets are scalars."""
    return (outputs.flatten(1).sin() * targets[:, None]).sum(1) + outputs.flatten(1).square().mean(1)


def check(
    module: nn.Module, inputs: Tensor, *, copies: int = 1, clip: float = 1.0, clipper: type = BookKeeping
) -> None:
    """In float64 the clipper equals the loop to rounding; in float32 it equals the float64 loop to 1e-5.

    Clipped float32 sums may be smaller by more: the clip factor allows for rounding where a record's terms cancel.
    """
    with torch.no_grad():
        for parameter in module.parameters():  # scales of ones and shifts of zeros would hide what reads them wrongly
            parameter.add_(0.1 * torch.randn_like(parameter))
    targets = torch.randn(len(inputs) // copies).repeat_interleave(copies)
    single, narrow = FlatModel(module.float()), like(inputs, torch.float32)
    found = clipper(single, squared, copies=copies).clipped_sum(narrow, targets, math.inf)
    clipped = clipper(single, squared, copies=copies).clipped_sum(narrow, targets, clip)
    double, wide = FlatModel(module.double()), like(inputs, torch.float64)
    for limit, single_sum, tolerance in ((math.inf, found.total, 1e-5), (clip, clipped.total, 1e-4)):
        expected = Loop(double, squared, copies=copies).clipped_sum(wide, targets.double(), limit)
        exact = clipper(double, squared, copies=copies).clipped_sum(wide, targets.double(), limit)
        assert close(exact.total, expected.total, 1e-9)
        assert close(exact.norms, expected.norms, 1e-9)
        assert close(single_sum, expected.total, tolerance)
    assert close(found.norms, expected.norms, 1e-5)
    assert torch.equal(found.norms, clipped.norms)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    assert found.shape == expected.shape
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return bool(difference <= tolerance * torch.linalg.vector_norm(expected.double()) + 1e-12)


def like(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    )


class TiedModel(nn.Module):
    """A table that is embedding and output layer, and one layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice = nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(self.table(tokens)).tanh()))


class Attention(nn.Module):
    def __init__(self, batch_first: bool, own: bool, weights: bool, masked: bool, widths: int | None) -> None:
        super().__init__()
        self.own, self.weights, self.masked, self.batch_first = own, weights, masked, batch_first
        self.inner = nn.MultiheadAttention(6, 2, batch_first=batch_first, kdim=widths, vdim=widths)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = self.masked
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.masked else None
        x = x if self.batch_first else x.transpose(0, 1)
        q, k, v = (x, x, x) if self.own else (x.tanh(), x.sin(), x.cos())
        out, shares = self.inner(q, k, v, padding if self.masked else None, self.weights, mask)
        out = out if self.batch_first else out.transpose(0, 1)
        return out if shares is None else torch.cat([out.flatten(1), shares.flatten(1)], 1)
