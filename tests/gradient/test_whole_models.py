"""Per-record gradients of whole models against a loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from adp2sgd.flat import FlatModel
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.loop import Loop
from adp2sgd.models import MODELS
from adp2sgd.task import cross_entropy
from against_loop import check, close

pytestmark = pytest.mark.usefixtures("one_thread")

PAPER = (
    "shufflenet", "mobilenet_v2", "efficientnet_b0", "mobilenet", "googlenet", "resnext29", "resnet18", "senet18",
    "vgg19", "wrn16_4",
)  # fmt: skip


class Pinned(TorchFunctionMode):
    """Notes which side of each ReLU and which pixel of each pooling a first pass takes; later passes, over the record
    `alone`, take the same. Rounding flips such choices, and one flip moves a gradient by up to 1e-2."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Tensor] = []
        self.alone: int | None = None
        self.at = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in ("relu", "max_pool2d"):
            return func(*args, **kwargs)
        x = args[0].flatten(2)
        if self.alone is None:
            pick = x > 0 if name == "relu" else F.max_pool2d(*args, **kwargs | {"return_indices": True})[1]
            self.choices.append(pick)
        else:
            pick = self.choices[self.at][self.alone : self.alone + 1]
            self.at += 1
        return (x * pick).view_as(args[0]) if name == "relu" else x.gather(2, pick.flatten(2)).view(pick.shape)


@pytest.mark.parametrize("name", PAPER)
def test_models_of_the_paper(name):
    """In float64 to 1e-9; in float32 to 1e-5 of the float64 loop in which every ReLU and pooling chooses as it did."""
    module, inputs, targets = MODELS[name](norm="group").eval(), torch.randn(2, 3, 32, 32), torch.tensor([3, 7])
    pinned, clipper = Pinned(), BookKeeping(FlatModel(module), cross_entropy)
    clipper.clipped_sum(inputs, targets, math.inf)  # the first call proves the model, in passes of its own
    with pinned:
        single = clipper.clipped_sum(inputs, targets, math.inf)
    model, inputs = FlatModel(module.double()), inputs.double()
    loop = Loop(model, cross_entropy)
    alone = []
    for pinned.alone in range(2):
        pinned.at, row = 0, slice(pinned.alone, pinned.alone + 1)
        with pinned:
            alone.append(loop.gradient(inputs[row], targets[row]))
        assert pinned.at == len(pinned.choices) >= 16
    assert close(single.total, sum(alone), 1e-5)
    assert close(single.norms, torch.stack([torch.linalg.vector_norm(gradient) for gradient in alone]), 1e-5)
    expected = loop.clipped_sum(inputs, targets, 1.0)
    found = BookKeeping(model, cross_entropy).clipped_sum(inputs, targets, 1.0)
    assert close(found.total, expected.total, 1e-9)
    assert close(found.norms, expected.norms, 1e-9)


def test_lstm_of_the_paper_and_small_models():
    for name, options, shape in [
        ("lstm", {"inputs": 6, "classes": 9, "hidden": 5, "layers": 2, "projection": 4}, (7, 6)),
        ("cnn", {"size": 8}, (1, 8, 8)),
        ("mlp", {"inputs": 4, "classes": 3}, (4,)),
    ]:
        check(MODELS[name](**options), torch.randn(3, *shape))


def test_standardized_convolutions():
    model = FlatModel(MODELS["wrn16_4"](norm="group", standardize=True).double())
    inputs, targets = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.tensor([3, 7])
    expected = Loop(model, cross_entropy).clipped_sum(inputs, targets, 1.0)
    assert close(BookKeeping(model, cross_entropy).clipped_sum(inputs, targets, 1.0).total, expected.total, 1e-9)
