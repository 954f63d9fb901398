"""Models of Hugging Face take their per-record gradients by the fast clipper, unchanged."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adp2sgd import tree
from adp2sgd.flat import FlatModel
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.loop import Loop
from against_loop import check, close
from transformers_zoo import ZOO, bert, tokens, with_lora

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # of transformers, about labels that it is not given
    yield
    logging.disable(logging.NOTSET)


def wide(part: Tensor) -> Tensor:
    return part.double() if part.is_floating_point() else part


@pytest.mark.parametrize("name", ZOO)
def test_the_clipped_sum_is_that_of_a_loop_in_float64_and_nothing_is_slower(name):
    make, data, loss, targets = ZOO[name]
    model = FlatModel(make().train())
    clipper = Automatic(model, loss)
    inputs, right = data(6), targets(6)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*slower")
        found = clipper.clipped_sum(inputs, right, 0.1)
        clipper.clipped_sum(tree.take(inputs, slice(1)), right[:1], 0.1)  # another size: the calls are the same
    assert clipper.chosen is clipper.bookkeeping
    double = FlatModel(model.module.double())
    expected = Loop(double, loss).clipped_sum(tree.each(wide, inputs), right, 0.1)
    exact = BookKeeping(double, loss).clipped_sum(tree.each(wide, inputs), right, 0.1)
    assert close(exact.total, expected.total, 1e-9)
    assert close(exact.norms, expected.norms, 1e-9)
    assert close(found.total, expected.total, 1e-4)


def test_frozen_parts_stay_off_the_wire():
    """With LoRA only the adapters and the head travel."""
    model = FlatModel(with_lora(bert(), target_modules=["query", "value"], task_type="SEQ_CLS"))
    assert all("lora" in piece.name or "classifier" in piece.name for piece in model.slices)
    assert len(model.weights) == sum(p.numel() for p in model.module.parameters() if p.requires_grad) < 600
    frozen = [p for p in model.module.parameters() if not p.requires_grad]
    before = [p.detach().clone() for p in frozen]
    model.load(torch.zeros_like(model.weights))
    assert all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))


def test_padding_of_one_record_does_not_change_how_others_are_taken():
    """transformers leaves a mask out where no record of a batch has padding."""
    make, _, loss, targets = ZOO["bert"]
    model, inputs, right = FlatModel(make().train()), tokens(5), targets(5)
    inputs["attention_mask"][:4] = 1
    inputs["attention_mask"][4, 3:] = 0
    clipper = BookKeeping(model, loss)
    whole = clipper.clipped_sum(inputs, right, 0.1)
    rest = clipper.clipped_sum(tree.take(inputs, slice(4)), right[:4], 0.1)
    assert torch.allclose(whole.norms[:4], rest.norms, rtol=1e-6)


class Positions(nn.Module):
    """Trained numbers that are looked up by constants: by a slice of a buffer, and by numbers of rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table, self.head = how, nn.Embedding(9, 4), nn.Linear(4, 3)
        self.register_buffer("places", torch.arange(9)[None])

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        if self.how == "own row":
            x = x[rows[:, None], torch.arange(5)[None]]
        elif self.how == "place in the batch":
            x = x * rows[:, None, None]
        elif self.how == "other row":
            x = x[rows.flip(0)]
        known = self.table(self.places[:, : x.shape[1]])
        if self.how == "normed":
            known = F.layer_norm(known, (4,)) * torch.linspace(0, 1, 5)[:, None]
        return self.head((x + known).tanh()).sum(1)


@pytest.mark.parametrize("how", ["plain", "own row", "normed"])
def test_an_embedding_of_constants(how):
    check(Positions(how), torch.randn(4, 5, 4))


@pytest.mark.parametrize("how", ["place in the batch", "other row"])
def test_the_place_of_a_record_in_its_batch_is_not_to_be_read(how):
    clipper = BookKeeping(FlatModel(Positions(how)), lambda outputs, targets: outputs.sum(1) * targets)
    with pytest.raises(Exception, match="may mix the records|reads the place of a record"):
        clipper.clipped_sum(torch.randn(4, 5, 4), torch.ones(4), 1.0)


class Turned(nn.Module):
    """Weights as GPT-2 has them, [inputs, outputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5, 3))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.addmm(self.bias, x.view(-1, 4), self.first).view(*x.shape[:-1], 5)
        return inner.tanh() @ self.second


@pytest.mark.parametrize("copies", [1, 2])
def test_weights_of_inputs_by_outputs(copies):
    check(Turned(), torch.randn(6, 7, 4), copies=copies)


@pytest.mark.parametrize(
    "module",
    [nn.Sequential(nn.RMSNorm(4), nn.Tanh(), nn.RMSNorm(4, elementwise_affine=False)),
     nn.Sequential(nn.InstanceNorm1d(5, affine=True), nn.Tanh())],
    ids=["rms norm", "instance norm"],
)  # fmt: skip
@pytest.mark.parametrize("copies", [1, 2])
def test_norms(module, copies):
    check(module, torch.randn(6, 5, 4), copies=copies)
