"""Which functions are proven to keep the records of a batch apart, and what a model may do without a slower clipper."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adp2sgd.flat import FlatModel
from adp2sgd.gradient.bookkeeping import BookKeeping
from adp2sgd.gradient.choose import Automatic
from adp2sgd.gradient.functional import Functional
from adp2sgd.gradient.loop import Loop
from adp2sgd.gradient.rules import UnsupportedError
from adp2sgd.gradient.state import Memory
from adp2sgd.task import cross_entropy

WIDTH = 8


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


class Around(nn.Module):
    """Layers around a function of the hidden values [n, 5, WIDTH]."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, WIDTH), nn.LazyLinear(3), function
        self(torch.zeros(2, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)).flatten(1))


def batch(records: int) -> tuple[Tensor, Tensor]:
    return torch.randn(records, 5, 6, dtype=torch.float64), torch.randint(0, 3, (records,))


def window(h: Tensor) -> Tensor:
    n, t, d = h.shape
    parts = h.view(n, t, 2, d // 2).permute(0, 2, 1, 3).reshape(-1, t, d // 2)
    return parts.softmax(1).view(n, 2, t, -1).transpose(1, 2).reshape(n, t, d)


def in_parts(h: Tensor) -> Tensor:
    out = torch.zeros(len(h), 5, WIDTH, dtype=h.dtype)
    out[:, 0] = h[:, 1]
    out[:, 2:] += h[:, 2:]
    out.mul_(2)
    return out


def shared(h: Tensor) -> Tensor:
    scale = torch.ones(len(h), 1, 1, dtype=h.dtype).expand(-1, 5, WIDTH)
    return h * scale + torch.linspace(0, 1, WIDTH, dtype=h.dtype).repeat(len(h), 5, 1)


def rotated(h: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(5), torch.arange(WIDTH // 2)).to(h.dtype)
    one, other = h[..., ::2], h[..., 1::2]
    return torch.stack([one * angles.cos() - other * angles.sin(), one + other], -1).flatten(-2)


def attended(h: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (h, h.tanh(), h.sin()))
    mask = torch.ones(5, 5).tril() == 0
    shares = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(mask, float("-inf")).softmax(-1)
    return (shares @ v).transpose(1, 2).contiguous().view(len(h), 5, WIDTH)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda h: torch.where(h > 0, h, 0.1 * h).clamp(-3, 3) ** 2 + h.sigmoid() / 2,
    "sums": lambda h: h - h.mean((1, 2), keepdim=True) + h.cumsum(1) + h.flip(2).roll(1, 1),
    "picks": lambda h: h.max(2)[0] + h[:, :, 0] + h[..., 1:3].sum(-1) + h.select(2, 1),
    "picks by a constant": lambda h: h[:, :, torch.tensor([0, 2])][..., None, 0] + h[:, [4]],
    "time first": lambda h: h.transpose(0, 1).softmax(0).transpose(0, 1),
    "folded": lambda h: h.reshape(-1, WIDTH).softmax(-1).view(len(h), 5, WIDTH),
    "windows": window,
    "products": lambda h: torch.bmm(h, h.transpose(1, 2)) @ h + torch.einsum("ntd,nsd->nts", h, h) @ h,
    "attention": attended,
    "fused attention": lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "constants": lambda h: h * torch.arange(5)[None, :, None] + torch.eye(WIDTH).to(h)[0].type_as(h),
    "shared": shared,
    "rotated": rotated,
    "in parts": in_parts,
    "joined": lambda h: torch.cat([h, h.tanh()], 1)[:, 2:7] + torch.stack([h, h.sin()], 0).sum(0),
    "unpacked": lambda h: sum(part for part in torch.stack([h, h.sin()])),
    "images": lambda h: F.max_pool1d(F.pad(h, (1, 1)), 2) + F.avg_pool1d(h, 2).sum(-1, keepdim=True),
    "normalized": lambda h: F.normalize(h, dim=-1) + F.layer_norm(h, (WIDTH,)) + F.glu(torch.cat([h, h], -1), -1),
    "repeated": lambda h: h.repeat_interleave(2, 0).unflatten(0, (-1, 2)).sum(1),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_functions_of_single_records_keep_the_fast_clipper_and_equal_the_loop(name):
    model = FlatModel(Around(KEPT[name]).double())
    clipper = BookKeeping(model, cross_entropy)
    for records in (1, 2, 5, 7, 10):
        x, y = batch(records)
        found, expected = (e.clipped_sum(x, y, 0.1) for e in (clipper, Loop(model, cross_entropy)))
        assert torch.allclose(found.total.double(), expected.total, rtol=1e-9, atol=1e-12)
        assert torch.allclose(found.norms, expected.norms, rtol=1e-9)


def columns(h: Tensor) -> Tensor:
    """Written by rows, read by columns of the same memory."""
    rows = torch.zeros(len(h), 2, dtype=h.dtype)
    read = rows.view(2, len(h))
    rows.copy_(h[:, 0, :2].detach())
    return read.sum(0)[:, None, None]


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.softmax(0),
    "sum": lambda h: h + h.sum(0),
    "mean of all": lambda h: h - h.mean(),
    "norm of all": lambda h: h / h.norm(),
    "cumulated": lambda h: h.cumsum(0),
    "flip": lambda h: h.flip(0),
    "flip of all": lambda h: h.flip((0, 1)),
    "roll": lambda h: h.roll(1, 0),
    "roll of all": lambda h: h.roll(1),
    "gram": lambda h: torch.einsum("ntd,mtd->nm", h, h)[:, :1, None] + h,
    "product": lambda h: (h[:, 0] @ h[:, 0].t() @ h[:, 0])[:, None] + h,
    "diagonal": lambda h: torch.einsum("ntd,ntd->td", h, h) + h,
    "broadcast": lambda h: (h[:, None, 0] + h[None, :, 0]).sum(1)[:, None] + h,
    "joined": lambda h: torch.cat([h[1:], h[:1]]),
    "halves": lambda h: torch.cat([h, h]).view(len(h), 2, 5, WIDTH).sum(1),
    "transposed": lambda h: h.reshape(5, -1, WIDTH).transpose(0, 1),
    "fewer rows": lambda h: h[: len(h) - 1].mean(0) + h,
    "first row": lambda h: h[0] + h,
    "picked": lambda h: h[torch.arange(len(h)).flip(0)],
    "gathered": lambda h: h.gather(0, torch.zeros(1, 5, WIDTH, dtype=torch.long).expand(len(h), -1, -1)),
    "size": lambda h: h * len(h),
    "logarithm of size": lambda h: h + math.log(len(h)),
    "counted": lambda h: h * torch.ones(len(h)).sum(),
    "filled with size": lambda h: h * torch.full((1,), len(h)),
    "place": lambda h: h * torch.linspace(0, 1, len(h))[:, None, None],
    "identity": lambda h: (torch.eye(len(h)).to(h) @ h.flatten(1)).view_as(h),
    "largest class": lambda h: h * F.one_hot((h[:, 0, 0] > 0).long()).shape[1],
    "table": lambda h: F.embedding(torch.zeros_like(h[:, 0, 0]).long(), h.flatten(1)).view_as(h),
    "buckets": lambda h: h * torch.bucketize(h[:, :1, :1], h[:, 0, 0].detach()),
    "taken along": lambda h: torch.take_along_dim(h, torch.zeros_like(h).long(), dim=0),
    "pairs": lambda h: h[:, 0] + F.cosine_similarity(h[:, None, 0], h[:, 0], dim=1),
    "shared memory": lambda h: h + columns(h),
    "bits": lambda h: h + h[:, 0, 0].detach().clone().view(torch.int32).view(2, -1).sum(0)[:, None, None],
    "strided": lambda h: h.as_strided(h.shape, (0, WIDTH, 1)),
    "data": lambda h: h.data + h,
    "operator": lambda h: torch.ops.aten.flip(h, [0]),
    "rows": lambda h: torch.stack([row for row in h.flip(1)]),
    "rows of another order": lambda h: torch.stack(h.unbind(0)[::-1]),
}


@pytest.mark.parametrize("name", MIXED)
def test_functions_that_may_mix_records_are_refused_by_the_fast_clipper(name):
    model = FlatModel(Around(MIXED[name]).double())
    with pytest.raises(UnsupportedError):
        BookKeeping(model, cross_entropy).clipped_sum(*batch(7), 0.1)


class Windowed(nn.Module):
    """Patches, a class token, positions, attention that is unpacked from one layer, a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places, self.qkv = nn.Parameter(torch.randn(1, 5, WIDTH)), nn.Linear(WIDTH, 3 * WIDTH)
        self.norm, self.gain, self.head = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 3)
        self.mask = torch.ones(5, 5).tril() == 0
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        q, k, v = self.qkv(self.norm(x)).reshape(len(x), 5, 3, 2, -1).permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(-2, -1)).masked_fill(self.mask, float("-inf")).softmax(-1)
        self.seen = shares
        x = x + self.gain * (shares @ v).transpose(1, 2).flatten(2)
        return self.head(x.mean(1))


class Cells(nn.Module):
    """A recurrence in Python, and an LSTM with the time first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.lstm, self.head = nn.Linear(6 + WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, all_h = x.new_zeros(x.size(0), WIDTH), []
        for t in range(x.size(1)):
            h = torch.tanh(self.cell(torch.cat((x[:, t], h), 1)))
            all_h.append(h)
        state = torch.zeros(1, x.shape[0], WIDTH)
        out, _ = self.lstm(torch.stack(all_h), (state, torch.zeros_like(state)))
        return self.head(out[-1] + out.mean(0))


@pytest.mark.parametrize(("module", "shape"), [(Windowed, (3, 8, 8)), (Cells, (4, 6))])
def test_ordinary_models_of_a_users_own_keep_the_fast_clipper_at_every_pass(module, shape):
    clipper = Automatic(FlatModel(module()), cross_entropy, expected=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipper.settle(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.long))
        for records in (9, 1, 16, 31):
            clipper.clipped_sum(torch.randn(records, *shape), torch.randint(0, 3, (records,)), 0.1)
    assert clipper.chosen is clipper.bookkeeping


# --- What a model keeps in Python ---

COUNT = 0
TABLE: dict[str, int] = {}


def test_state_in_python_is_put_back_after_a_pass():
    class Thing(nn.Module):
        shared = 0

        def __init__(self):
            super().__init__()
            self.own, self.listed, self.named, self.tensor, self.array = 0, [1], {"a": {2}}, torch.zeros(2), np.zeros(2)
            self.other = type("Other", (), {})()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self):
            global COUNT  # noqa: PLW0603 (what is tested)
            COUNT += 1
            TABLE["new"] = 1
            self.own, Thing.shared, self.new, self.other.x = 1, 1, 1, 1
            self.listed.append(2)
            self.named["a"].add(3)
            self.tensor += 1
            self.array += 1
            self.mean.add_(1)
            closed[0] += 1
            return self

    closed = [0]
    thing = Thing()
    with Memory(thing, None).kept():
        thing()
        assert COUNT == closed[0] == thing.own == 1
    assert (COUNT, TABLE, closed, thing.own, Thing.shared, thing.listed, thing.named) == (
        0, {}, [0], 0, 0, [1], {"a": {2}},
    )  # fmt: skip
    assert not hasattr(thing, "new")
    assert not hasattr(thing.other, "x")
    assert not thing.tensor.any()
    assert not thing.array.any()
    assert not thing.mean.any()


class Stateful(nn.Module):
    """Changes its weights, its gradients or an attribute by every record, behind torch's back; and reads them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.last = how, nn.Linear(6, 3), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(2 * x)
        if self.how == "weights":
            self.inner.bias.data.add_(x.detach().sum())
        elif self.how == "gradients":
            out = out + self.inner.bias.grad.sum()
            out.sum().backward(retain_graph=True)
        elif self.how == "inputs":
            x.zero_()
        else:
            out, self.last = out + self.last, x.detach().sum()
        return out


@pytest.mark.parametrize("how", ["weights", "gradients", "attribute", "inputs"])
def test_the_loop_starts_every_record_from_the_same(how):
    model = FlatModel(Stateful(how))
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    before, weights = x.clone(), model.weights.clone()
    loop = Loop(model, cross_entropy)
    alone = [loop.clipped_sum(x[i, None], y[i, None], 1.0).total for i in (2, 0, 3, 1)]
    assert torch.allclose(loop.clipped_sum(x, y, 1.0).total, sum(alone), rtol=1e-6, atol=1e-9)
    assert torch.equal(x, before)
    assert torch.equal(model.weights, weights)
    assert not model.grad.any()


@pytest.mark.parametrize("clipper", [BookKeeping, Functional, Loop])
def test_a_layer_in_place_does_not_change_the_batch(clipper):
    """A record without a finite gradient made the fast clipper read the batch again, as the layer had left it."""
    model = FlatModel(nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(6, 3)))
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    expected = clipper(model, cross_entropy).clipped_sum(x[1:].clone(), y[1:], 0.1).total
    x[0, 0] = math.nan
    before = x.clone()
    found = clipper(model, cross_entropy).clipped_sum(x, y, 0.1).total
    assert torch.allclose(found, expected, rtol=1e-5)
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))


class Written(nn.Module):
    """Writes to a buffer, or to a frozen parameter, behind torch's back, where it reads a large record."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))
        self.sign = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.detach().abs().max() > 100):
            (self.scale if self.kind == "buffer" else self.sign).data.fill_(-1.0)
        return self.inner(x) * self.scale * self.sign


@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_what_a_large_record_writes_is_put_back(kind):
    clipper = Loop(FlatModel(Written(kind)), cross_entropy)
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    x[0] = 1000.0
    without = clipper.clipped_sum(x[1:], y[1:], 0.1).total
    moved = clipper.clipped_sum(x, y, 0.1).total - without
    assert float(moved.norm()) <= 0.1 * (1 + 1e-5)
