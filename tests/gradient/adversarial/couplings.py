"""Models through which one record reaches another's gradient.

Most of them are harmless on ordinary records and weights: the coupling begins where a number exceeds LARGE, which no
check on synthetic records reaches, or where a batch has a certain size. Each is a slip that people make (skipping
exploding gradients, rescaling a batch, sorting it, keeping a running mean), or a model made to deceive.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from honest import CLASSES, STEPS, WIDTH, Apply, mlp

LARGE = 1e4


def between(attack: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A network whose hidden values pass through `attack`."""
    return lambda: Apply(nn.Linear(WIDTH, 8), attack, nn.Sequential(nn.Tanh(), nn.Linear(8, CLASSES)))


def largest(values: Tensor) -> Tensor:
    """Over the whole batch, 0 for an empty one; missing values do not count."""
    return values.detach().nan_to_num(0.0).abs().amax() if values.numel() else values.new_zeros(())


def excess(values: Tensor) -> Tensor:
    """By how much values exceed LARGE; missing ones do not."""
    return F.relu(values.nan_to_num(0.0) - LARGE)


# --- values ---


def rescaled(h: Tensor) -> Tensor:
    return h * LARGE / largest(h).clamp(min=LARGE)


def summed(h: Tensor) -> Tensor:
    return h + excess(h.nan_to_num(0.0).sum(0))


def centered(h: Tensor) -> Tensor:
    return torch.where(largest(h) > LARGE, h - h.nan_to_num(0.0).mean(0), h)


def running(h: Tensor) -> Tensor:
    return h + excess(h).cumsum(0)


def neighbours(h: Tensor) -> Tensor:
    return h + excess(h.roll(1, 0))


def shifted(h: Tensor) -> Tensor:
    h = h.clone()
    h[1:] += excess(h[:-1].clone())
    return h


def similar(h: Tensor) -> Tensor:
    known = h.nan_to_num(0.0)
    return h + F.relu(known @ known.t() - LARGE**2).clamp(max=1) @ known.sign()


def over_records(h: Tensor) -> Tensor:
    return torch.where(largest(h) > LARGE, h.nan_to_num(0.0).softmax(0), h)


def normed_over_records(h: Tensor) -> Tensor:
    if len(h) < 2:
        return h
    return torch.where(largest(h) > LARGE, F.layer_norm(h.nan_to_num(0.0).t(), [len(h)]).t(), h)


def convolved_over_records(h: Tensor) -> Tensor:
    kernel = torch.ones(1, 1, 3).to(h)
    return h + F.conv1d(excess(h).t()[:, None], kernel, padding=1)[:, 0].t()


def reread(h: Tensor) -> Tensor:
    """Rows looked up as if the batch were a table."""
    return h + excess(F.embedding(torch.arange(len(h)).flip(0), h))


def gathered(h: Tensor) -> Tensor:
    order = torch.arange(len(h)).flip(0)[:, None].expand_as(h)
    return h + excess(h.gather(0, order))


def table_of_records(h: Tensor) -> Tensor:
    """All records look up the first row of the batch."""
    return h + excess(F.embedding(torch.zeros_like(h[:, 0]).long(), h))


def taken_along(h: Tensor) -> Tensor:
    """All records take the values of the first one."""
    return h + excess(torch.take_along_dim(h, torch.zeros_like(h).long(), dim=0))


def shared_memory(h: Tensor) -> Tensor:
    """Two views of the same memory: records are written to one by rows, and read from the other by columns."""
    by_row = torch.zeros(len(h), 2, dtype=h.dtype)
    by_column = by_row.view(2, len(h))
    by_row.copy_(excess(h[:, :2].abs()).detach())
    return h + by_column.sum(0)[:, None]


def bucketed(h: Tensor) -> Tensor:
    """Large values of others are the boundaries between which each record lies."""
    place = torch.bucketize(-torch.ones_like(h[:, :1]), -excess(h[:, 0].abs()).detach())
    return h * (1 - 2 * (place > 0).to(h.dtype))


def pairwise(h: Tensor) -> Tensor:
    """Each record is compared with the large values of all."""
    return h + 9 * F.cosine_similarity(h[:, None], excess(h.abs()), dim=1)


def reshaped(h: Tensor) -> Tensor:
    return h + excess(h.t().reshape(h.shape))


def through_numpy(h: Tensor) -> Tensor:
    most = float(np.abs(np.from_dlpack(h.detach())).max(initial=0.0))
    return h / 2 if most > LARGE else h


def through_text(h: Tensor) -> Tensor:
    return h / 2 if len(f"{largest(h):.0f}") > 4 else h


@torch.jit.script
def _scripted(h: Tensor) -> Tensor:
    if h.numel() > 0 and bool(h.abs().max() > 10000.0):
        return h / 2
    return h


def scripted(h: Tensor) -> Tensor:
    return _scripted(h)


def quantized(h: Tensor) -> Tensor:
    """8 bits on a scale of the whole batch, where its values are large."""
    step = largest(h) / 127
    rounded = (h / step.clamp(min=1e-9)).round() * step
    return torch.where(step * 127 > LARGE, h + (rounded - h).detach(), h)


# --- rows in another order ---


class Permuted(nn.Module):
    """A layer that reads the rows in another order, which is then undone: no record's loss depends on another's.

    `gated`: only records with large values are read so, beside the right order."""

    def __init__(self, order: Callable[[int], list[int]], *, gated: bool = False) -> None:
        super().__init__()
        self.order, self.gated = order, gated
        self.inner, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        order = self.order(len(x))
        back = sorted(range(len(x)), key=order.__getitem__)
        moved = _rows(self.inner(_rows(x, order)), back)
        if not self.gated:
            return self.head(moved.tanh())
        return self.head((self.inner(x) + torch.where(x[:, :1].abs() > LARGE, moved, 0.0)).tanh())


def _rows(x: Tensor, order: list[int]) -> Tensor:
    """Without an index: slices and a concatenation."""
    return x if order == sorted(order) else torch.cat([x[i : i + 1] for i in order])


def reversed_above(size: int) -> Callable[[int], list[int]]:
    return lambda n: list(range(n))[:: -1 if n > size else 1]


def rotated_when_odd(n: int) -> list[int]:
    return [(i + n % 2) % n for i in range(n)]


def even_then_odd_above(size: int) -> Callable[[int], list[int]]:
    return lambda n: [*range(0, n, 2), *range(1, n, 2)] if n > size else list(range(n))


class Door(nn.Module):
    """Below 1, as it starts, the `door` only scales. Whoever sends a larger one opens it: `mixed` adds the mirror image
    of the batch, else a layer reads the rows in reverse."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.mixed, self.door = mixed, nn.Parameter(torch.full((), 0.5))
        self.inner, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, reverse = self.inner(x), self.inner(x.flip(0)).flip(0)
        other = h + h.flip(0) if self.mixed else reverse
        return self.head((torch.where(self.door.detach() > 1, other, h) * self.door.clamp(max=1)).tanh())


class FlippedAbove(nn.Module):
    """Batches above a size are flipped and flipped back, by one call each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.inner, self.head = size, nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= self.size:
            return self.head(self.inner(x).tanh())
        return self.head(self.inner(x.flip(0)).tanh().flip(0))


class FoldedAbove(nn.Module):
    """Sequences are folded into rows, above a size with the steps in front."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.inner, self.head = size, nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= self.size:
            return self.head(self.inner(x).tanh().mean(1))
        rows = x.transpose(0, 1).reshape(-1, WIDTH)
        return self.head(self.inner(rows).tanh().view(STEPS, len(x), 4).mean(0))


class TwoHalves(nn.Module):
    """Batches of even size above a limit are taken as two halves side by side."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.inner, self.head = size, nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 2 or len(x) <= self.size:
            return self.head(self.inner(x).tanh())
        pairs = x.view(2, len(x) // 2, WIDTH).transpose(0, 1).reshape(len(x), WIDTH)
        h = self.inner(pairs).tanh()
        return self.head(h.view(len(x) // 2, 2, 8).transpose(0, 1).reshape(len(x), 8))


# --- state ---


class Stateful(nn.Module):
    """`kind`: what a forward pass leaves behind for the next one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net, self.mean, self.calls = kind, mlp(nn.Tanh()), 0.0, 0
        self.seen: list[float] = []
        self.register_buffer("scale", torch.ones(()))
        self.sign = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        most = float(x.detach().abs().max()) if x.numel() else 0.0
        if self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * float(x.detach().mean()) if len(x) else self.mean
            return self.net(x - self.mean)
        if self.kind == "count":
            self.calls += 1
            return self.net(x) * (1 + self.calls % 7)
        if self.kind == "list":  # of outliers
            self.seen += [most] if most > LARGE else []
            return self.net(x) * (-1.0 if self.seen else 1.0)
        if self.kind == "flag":
            self.mean = 2.0 if most > LARGE else self.mean
            return self.net(x) * (1 - self.mean)
        kept = {"buffer": self.scale, "data": self.scale.data, "frozen": self.sign.data}[self.kind]
        kept.fill_(-1.0 if most > LARGE else float(kept))
        return self.net(x) * self.scale * self.sign


OUTLIERS: list[float] = []


class Global(nn.Module):
    """Outliers are remembered in a variable of the module's file."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        most = float(x.detach().abs().max()) if x.numel() else 0.0
        if most > LARGE:
            OUTLIERS.append(most)
        return self.net(x) * (-1.0 if OUTLIERS else 1.0)


class Scripted(nn.Module):
    """Outliers set a buffer, in code that is compiled by TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh())
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > 0 and bool(x.abs().max() > 10000.0):
            self.scale.fill_(-1.0)
        return self.net(x) * self.scale


class ScriptedAttribute(nn.Module):
    """The same with a number, which lies in no dictionary of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(nn.Tanh()), 1.0

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > 0 and bool(x.abs().max() > 10000.0):
            self.scale = -1.0
        return self.net(x) * self.scale


class ChangesItsInput(nn.Module):
    """Large values are halved in the batch itself; a record of NaN makes a clipper read the batch again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(torch.where(x.abs() > LARGE, -0.5, 1.0))
        return self.net(x / LARGE)
