"""Each rule of the fast clipper against a loop in float64, at random shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from adp2sgd.gradient import convolution, layers, rules
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.convolution import Convolution, Geometry
from adp2sgd.gradient.functional import Functional
from against_loop import Attention, TiedModel, check, close, few

pytestmark = pytest.mark.usefixtures("one_thread")


@few
@given(n=st.integers(0, 5), middle=st.lists(st.integers(1, 4), max_size=2), d=st.integers(1, 9), bias=st.booleans())
def test_linear(n, middle, d, bias):
    check(nn.Sequential(nn.Linear(d, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3)), torch.randn(n, *middle, d))


@settings(max_examples=60)
@given(
    axes=st.integers(1, 3), n=st.integers(0, 3), groups=st.sampled_from([1, 1, 2, 4]), width=st.integers(1, 3),
    kernel=st.integers(1, 3), stride=st.integers(1, 3), dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "same"]), mode=st.sampled_from(["zeros", "zeros", "reflect", "circular"]),
    size=st.integers(5, 7), bias=st.booleans(), copies=st.integers(1, 2),
    rule=st.sampled_from(["ghost", "_side_by_side", "_patches", "_in_portions"]),
    portion=st.sampled_from([1, 1 << 20]),
)  # fmt: skip
@example(
    axes=2, n=3, groups=1, width=2, kernel=2, stride=1, dilation=1, padding="same", mode="zeros", size=5, bias=True,
    copies=1, rule="_side_by_side", portion=1,
)  # fmt: skip
def test_convolution(
    axes, n, groups, width, kernel, stride, dilation, padding, mode, size, bias, copies, rule, portion
):
    groups = 1 if rule == "_in_portions" else groups
    stride = 1 if padding == "same" else stride
    mode = "zeros" if axes == 3 and mode == "reflect" and padding == "same" else mode
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes](
        4, groups * width, kernel, stride, padding, dilation, groups, bias, padding_mode=mode
    )
    module = nn.Sequential(layer, nn.Tanh())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Convolution, "_cost", lambda _: {"ghost": 0.0 if rule == "ghost" else 2.0, "per-record": 1.0})
        patch.setitem(convolution.PORTION_BYTES, "cpu", portion)
        if rule != "ghost":
            patch.setattr(Convolution, "per_record", getattr(Convolution, rule))
        check(module, torch.randn(n * copies, 4, *range(size, size + axes)), copies=copies)


def test_convolution_rules_are_chosen_by_cost():
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    early = Convolution(torch.randn(1, 64, 32, 32), torch.randn(1, 64, 32, 32), torch.randn(64, 64, 3, 3), geometry, 1)
    late = Convolution(torch.randn(1, 512, 4, 4), torch.randn(1, 512, 4, 4), torch.randn(512, 512, 3, 3), geometry, 1)
    assert (early.rule, late.rule) == ("per-record", "ghost")


@few
@given(
    n=st.integers(0, 5), groups=st.integers(1, 3), space=st.lists(st.integers(1, 4), max_size=2), affine=st.booleans(),
    copies=st.integers(1, 2), blocks=st.sampled_from([6, 65_535]),
)  # fmt: skip
def test_group_norm(n, groups, space, affine, copies, blocks):
    norm = nn.GroupNorm(groups, 4 * groups, affine=affine)  # of a single number torch takes no variance
    first = nn.Conv1d(2, norm.num_channels, 1)
    inner = nn.Sequential(first, norm, nn.Unflatten(2, space) if space else nn.Identity(), nn.Tanh())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "BLOCKS", blocks)
        check(inner, torch.randn(n * copies, 2, math.prod(space)), copies=copies)


@pytest.mark.parametrize("n", [1, 7])
def test_group_norm_of_a_single_channel(n):
    """A scale of one number, expanded to all records, would be a view that the kernel reads beyond its end."""
    norm = nn.GroupNorm(1, 1)
    nn.init.constant_(norm.weight, 1.5)
    check(nn.Sequential(nn.Conv1d(2, 1, 1), norm, nn.Tanh()), torch.randn(n, 2, 9))


@few
@given(
    n=st.integers(1, 5), copies=st.integers(1, 2), kernel=st.integers(1, 3), stride=st.integers(1, 2),
    size=st.integers(3, 7), channels=st.integers(2, 9), some=st.integers(1, 5),
)  # fmt: skip
def test_patches_with_channels_last(n, copies, kernel, stride, size, channels, some):
    geometry = Geometry((kernel, kernel), (stride, stride), (kernel // 2, 1), (1, 1), 1)
    weight = torch.randn(6, channels, kernel, kernel)
    x = torch.randn(n * copies, channels, size, size + 1).bfloat16().contiguous(memory_format=torch.channels_last)
    g = torch.randn_like(torch.conv2d(x.float(), weight, None, geometry.stride, geometry.padding)).bfloat16()
    layer = Convolution(x, g, weight, geometry, n)
    assert layer.last
    wide = Convolution(x.double(), g.double(), weight.double(), geometry, n)
    assert close(layer._patches().double(), wide._side_by_side(), 1e-6)
    factors = torch.rand(n)
    pairs = zip(layer._portions(some), factors.split(some), strict=True)
    total = sum(rules.weighted_product(gradient, patches, part) for (patches, gradient), part in pairs)
    assert close(layer._shaped(total).double(), wide.weighted(factors.double()), 1e-6)


@pytest.mark.parametrize(("channels", "offset"), [(8, 0), (16, 8), (8, 4), (12, 0)])
def test_patches_are_copied_whatever_their_place_in_memory(channels, offset):
    numbers = torch.randn(offset + 5 * 6 * channels).bfloat16()[offset:].view(5, 6, channels).transpose(0, 1)
    assert torch.equal(convolution._in_order(numbers), numbers.contiguous())
    assert convolution._in_order(numbers).is_contiguous()


def test_a_scaled_gradient_in_half_precision_is_split_without_loss():
    gradients = torch.randn(100_000).mul(torch.logspace(-8, 8, 100_000)).bfloat16()
    factors = torch.rand(100_000)
    kept = rules.first_bits(factors)
    assert (kept <= factors).all()
    assert (kept >= factors * (1 - 2**-15)).all()
    assert torch.equal(rules.first_bits(torch.ones(3)), torch.ones(3))
    scaled = gradients.float() * kept
    assert torch.equal(scaled.double(), gradients.double() * kept.double())  # the product fits float32
    parts = rules.in_three(scaled)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), scaled.double())


@few
@given(n=st.integers(0, 4), t=st.integers(1, 4), shape=st.lists(st.integers(2, 4), min_size=1, max_size=2))
def test_layer_norm(n, t, shape):
    check(nn.Sequential(nn.LayerNorm(shape), nn.Tanh(), nn.LayerNorm(shape)), torch.randn(n, t, *shape))


@few
@given(n=st.integers(0, 5), t=st.integers(1, 9), padding=st.sampled_from([None, 0, -1]))
def test_embedding(n, t, padding):
    check(nn.Sequential(nn.Embedding(5, 3, padding_idx=padding), nn.Tanh()), torch.randint(0, 5, (n, t)))


class Recurrent(nn.Module):
    def __init__(self, layers: int, both: bool, batch_first: bool, bias: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.lstm = nn.LSTM(3, 4, layers, bias=bias, bidirectional=both, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.lstm(x if self.batch_first else x.transpose(0, 1))
        out = out if self.batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), hidden.transpose(0, 1).flatten(1), cell.transpose(0, 1).flatten(1)], 1)


@few
@given(
    n=st.integers(0, 5), t=st.integers(1, 5), layers=st.integers(1, 2), both=st.booleans(), first=st.booleans(),
    bias=st.booleans(), copies=st.integers(1, 2),
)  # fmt: skip
def test_lstm(n, t, layers, both, first, bias, copies):
    check(Recurrent(layers, both, first, bias), torch.randn(n * copies, t, 3), copies=copies)


@few
@given(
    n=st.integers(0, 5), t=st.integers(2, 4), first=st.booleans(), own=st.booleans(), weights=st.booleans(),
    masked=st.booleans(), widths=st.sampled_from([None, 6]),
)  # fmt: skip
def test_attention(n, t, first, own, weights, masked, widths):
    check(Attention(first, own, weights, masked, widths), torch.randn(n, t, 6))


class Loose(nn.Module):
    """Parameters outside of layers: a class token, positions, scales, a matrix, a centred weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 9, 4))
        self.scale, self.log = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.3))
        self.matrix, self.weight = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3, 5, 2))
        self.register_buffer("gain", torch.linspace(1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place[:, : x.shape[1] + 1]
        x = (x * (self.scale * self.gain) * self.log.exp()).tanh() @ self.matrix
        weight = self.weight - self.weight.mean(dim=(1, 2), keepdim=True)
        return F.conv1d(x.transpose(1, 2), weight)


@few
@given(n=st.integers(0, 5), t=st.integers(2, 8), copies=st.integers(1, 3))
@example(n=1, t=3, copies=1)
@example(n=1, t=3, copies=2)
def test_parameters_outside_of_layers(n, t, copies):
    check(Loose(), torch.randn(n * copies, t, 4), copies=copies)


@few
@given(n=st.integers(0, 5), t=st.integers(1, 6), copies=st.integers(1, 2))
def test_tied_weights_and_repeated_layers(n, t, copies):
    check(TiedModel(), torch.randint(0, 7, (n * copies, t)), copies=copies)


class TwiceConvolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


def test_a_convolution_called_twice():
    check(TwiceConvolved(), torch.randn(3, 3, 5, 4))


def test_rows_folded_into_the_batch_and_frozen_parameters():
    module = nn.Sequential(
        nn.Flatten(0, 1),
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2),
        nn.Unflatten(0, (-1, 3)),
    )
    module[1].weight.requires_grad_(False)
    check(module, torch.randn(4, 3, 2, 6, 5))


@pytest.mark.parametrize("clipper", [Functional, Automatic])
def test_other_clippers(clipper):
    check(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4), copies=2, clipper=clipper)
    check(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(1, 4), clipper=clipper)
