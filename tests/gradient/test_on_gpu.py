"""The same on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from adp2sgd.flat import FlatModel
from adp2sgd.gradient import convolution, layers, rules
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.convolution import Convolution, Geometry
from adp2sgd.models import MODELS
from adp2sgd.task import cross_entropy
from against_loop import NEEDS_GPU, Attention, TiedModel, close, like, small, squared

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", ["cnn", "resnet18", "wrn16_4", "mobilenet_v2", "resnext29"])
def test_gpu_shares_in_bfloat16_do_not_depend_on_other_records(name, copies):
    """Passes have one size, so the same kernels take a record alone, among others and at another place."""
    options = {"size": 32, "channels": 3} if name == "cnn" else {}
    model = FlatModel(MODELS[name](norm="group", **options), "cuda")
    clipper = BookKeeping(model, cross_entropy, copies=copies, autocast=torch.bfloat16, expected=20)
    inputs, targets = torch.randn(20 * copies, 3, 32, 32, device="cuda"), torch.arange(20, device="cuda") % 10
    targets = targets.repeat_interleave(copies)
    whole = clipper.clipped_sum(inputs, targets, 1.0)
    total, norms = whole.total.double().clone(), whole.norms.clone()
    alone = torch.zeros_like(total)
    for i, (x, y) in enumerate(zip(inputs.split(copies), targets.split(copies), strict=True)):
        share = clipper.clipped_sum(x, y, 1.0)
        assert share.norms[0] == norms[i]
        assert torch.linalg.vector_norm(share.total.double()) <= 1 + 1e-6
        alone += share.total
    assert float(torch.linalg.vector_norm(total - alone)) <= 1e-5


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("channels", "groups", "height"), [(16, 16, 32), (64, 32, 32), (512, 32, 4), (8, 1, 1), (8, 8, 3)]
)
@pytest.mark.parametrize("middle", [1.0, 1000.0])
def test_gpu_group_norm_with_channels_last(channels, groups, height, middle):
    """Against the other layer in float64; far from zero too, where the numbers differ by a thousandth of themselves."""
    x, g = (torch.randn(5, channels, height, height + 1, device="cuda") for _ in range(2))
    x, g = (t.bfloat16().contiguous(memory_format=torch.channels_last) for t in (x * middle**0.5 + middle, g))
    weight, bias = torch.randn(channels, 2, device="cuda").t()  # not one after the other in memory
    found, right = [], []
    assert layers.FusedGroupNorm.takes(x, groups, weight, bias)
    fast = layers.FusedGroupNorm(5, groups, weight, bias, 1e-5, [lambda use: found.append(use.per_record())] * 2)
    y, *saved = fast.forward(x)
    dx = fast.backward(g, (x, *saved), True)
    wide = [t.cpu().double() for t in (weight, bias)]
    slow = layers.GroupNormLayer(5, groups, *wide, 1e-5, [lambda use: right.append(use.per_record())] * 2)
    x, g = x.cpu().double(), g.cpu().double()
    expected, *saved = slow.forward(x)
    assert convolution.channels_last(y)
    assert torch.allclose(y.cpu().double(), expected, rtol=2**-8, atol=1e-3)
    assert torch.allclose(dx.cpu().double(), slow.backward(g, (x, *saved), True), rtol=2**-8, atol=1e-3)
    for ours, theirs in zip(found, right, strict=True):
        assert torch.allclose(ours.cpu().double(), theirs, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("channels", [48, 64])
def test_gpu_group_norm_without_kernels(channels, monkeypatch):
    """48 channels are no power of two; without Triton there are no kernels: torch's layer takes them."""
    if channels == 64:
        monkeypatch.setattr(layers, "can_compile", lambda device: False)
    module = nn.Sequential(nn.Conv2d(3, channels, 3), nn.GroupNorm(4, channels), nn.ReLU(inplace=True), nn.Flatten())
    clipper = BookKeeping(FlatModel(module, "cuda"), squared, autocast=torch.bfloat16)
    inputs = torch.randn(5, 3, 6, 6, device="cuda")
    assert torch.isfinite(clipper.clipped_sum(inputs, torch.zeros(5, device="cuda"), 1.0).total).all()


@pytest.mark.gpu
@NEEDS_GPU
def test_gpu_weighted_sum_in_bfloat16_is_of_the_given_values():
    outputs, inputs = torch.randn(9, 33, 24, device="cuda").bfloat16(), torch.randn(9, 33, 40, device="cuda").bfloat16()
    factors = torch.rand(9, device="cuda")
    found = rules.weighted_product(outputs, inputs, factors).double()
    right = torch.einsum("ntp,ntd,n->pd", outputs.double(), inputs.double(), rules.first_bits(factors).double())
    assert close(found, right, 1e-6)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("rule", ["_side_by_side", "_patches"])
@pytest.mark.parametrize("name", ["cnn", "resnet18", "mobilenet_v2", "resnext29", "lstm", "tied", "attention"])
def test_gpu_equals_cpu(name, rule, monkeypatch):
    monkeypatch.setattr(Convolution, "per_record", getattr(Convolution, rule))
    options = {"cnn": {"size": 32, "channels": 3}, "lstm": {"inputs": 6, "classes": 9, "hidden": 8, "projection": 4}}
    inputs, targets = torch.randn(3, 3, 32, 32), torch.randn(3)
    if name in MODELS:
        module = MODELS[name](**options.get(name, {"norm": "group"}))
        inputs = torch.randn(3, 5, 6) if name == "lstm" else inputs
    elif name == "tied":
        module, inputs = TiedModel(), torch.randint(0, 7, (3, 6))
    else:
        module, inputs = Attention(True, True, False, False, None), torch.randn(3, 5, 6)
    inputs = like(inputs, torch.float64)
    expected = BookKeeping(FlatModel(module.double()), squared).clipped_sum(inputs, targets.double(), 1.0)
    model = FlatModel(module, "cuda")
    found = BookKeeping(model, squared).clipped_sum(inputs.cuda(), targets.double().cuda(), 1.0)
    assert close(found.norms.cpu(), expected.norms, 1e-6)
    assert close(found.total.cpu(), expected.total, 2e-3)  # the slack where TF32 is allowed


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("portion", [1, 1 << 30])
def test_gpu_products_of_bfloat16_are_exact(copies, layout, portion, monkeypatch):
    monkeypatch.setitem(convolution.PORTION_BYTES, "cuda", portion)
    records = 2 * torch.get_num_threads() + 1
    x, g = (torch.randn(records * copies, 16, 9, 9, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    layer = Convolution(
        x.contiguous(memory_format=layout), g.contiguous(memory_format=layout),
        torch.empty(16, 16, 3, 3, device="cuda"), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), records,
    )  # fmt: skip
    found = layer.per_record()
    expected = Convolution(x.double(), g.double(), layer.weight.double(), layer.geometry, records)._side_by_side()
    assert found.dtype == torch.float32
    assert close(found.double(), expected, 1e-6)


@pytest.mark.gpu
@NEEDS_GPU
def test_gpu_lstm_is_not_left_to_the_loop():
    model = FlatModel(MODELS["lstm"](inputs=6, classes=9, hidden=8, projection=4), "cuda")
    clipper = Automatic(model, cross_entropy)
    clipper.clipped_sum(torch.randn(3, 5, 6, device="cuda"), torch.zeros(3, 5, dtype=torch.long, device="cuda"), 1.0)
    assert clipper.chosen is clipper.bookkeeping


@pytest.mark.gpu
@NEEDS_GPU
def test_gpu_bfloat16_and_many_groups():
    model = FlatModel(small(), "cuda")
    inputs, targets = torch.randn(40_000, 1, 4, 4, device="cuda"), torch.randint(0, 3, (40_000,), device="cuda")
    whole = BookKeeping(model, cross_entropy).clipped_sum(inputs, targets, 1.0)
    pieces = BookKeeping(model, cross_entropy, piece=1000).clipped_sum(inputs, targets, 1.0)
    assert close(pieces.total.cpu(), whole.total.cpu(), 1e-3)
    clipper = BookKeeping(model, cross_entropy, autocast=torch.bfloat16)
    for i in range(20):
        alone = clipper.clipped_sum(inputs[i : i + 1], targets[i : i + 1], 0.1)
        assert torch.linalg.vector_norm(alone.total.double()) <= 0.1 * (1 + 1e-6)
