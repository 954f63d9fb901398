"""Models that treat each record by itself, in every way that people write them. Small: a pass takes a millisecond."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils import checkpoint

WIDTH, CLASSES, STEPS, VOCABULARY = 6, 3, 5, 9


def mlp(activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), activation or nn.ReLU(), nn.Linear(8, CLASSES))


class Apply(nn.Module):
    """`body`, then a function of its output, then a head."""

    def __init__(self, body: nn.Module, then: object, head: nn.Module) -> None:
        super().__init__()
        self.body, self.then, self.head = body, then, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.then(self.body(x)))


def pooled(*layers: nn.Module, channels: int = 4) -> nn.Module:
    """A network of images or sequences [n, 2, …] whose places are averaged at the end."""
    return Apply(nn.Sequential(*layers), lambda h: h.tanh().flatten(2).mean(2), nn.Linear(channels, CLASSES))


class Repeated(nn.Module):
    """One layer used `times` times: a record's gradient is the sum over the uses."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.layer, self.head = times, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.layer(x)
        return self.head(x)


class SharedWeight(nn.Module):
    """Four modules that hold the same Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Language(nn.Module):
    """Token embedding; `tied`: the table is the output layer as well. `pad`: token 0 has no gradient."""

    def __init__(self, *, tied: bool = False, pad: int | None = None, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=pad, **options)  # type: ignore[arg-type]
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.table(tokens)).tanh().mean(1))


class MaskedMean(nn.Module):
    """The mean over tokens that are not 0; a record of padding alone gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens != 0).to(self.head.weight.dtype)[..., None]
        return self.head((self.table(tokens) * real).sum(1) / real.sum(1).clamp(min=1))


class Recurrent(nn.Module):
    """An RNN, GRU or LSTM over [n, STEPS, WIDTH]; `first`: whether the batch comes first inside; `last`: whether the
    last step counts, or the mean."""

    def __init__(
        self, kind: type[nn.RNNBase], *, first: bool = True, both: bool = False, layers: int = 1, last: bool = True
    ) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.cells = kind(WIDTH, 4, layers, batch_first=first, bidirectional=both)
        self.head = nn.Linear(4 * (1 + both), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.cells(x if self.first else x.transpose(0, 1))[0]
        out = out if self.first else out.transpose(0, 1)
        return self.head(out[:, -1] if self.last else out.mean(1))


class Packed(nn.Module):
    """An LSTM over packed sequences, whose lengths are read from the records."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(WIDTH, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.cells(packed)[1][0][0])


class StepByStep(nn.Module):
    """A cell that is called once for each step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class TimeFirst(nn.Module):
    """A layer over [steps, records, width]: no shape says which axis are the records."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))


class Attention(nn.Module):
    """Self-attention; `mask`: "causal", "padding" (places whose first value is negative), or none."""

    def __init__(self, mask: str = "", *, first: bool = True) -> None:
        super().__init__()
        self.mask, self.first = mask, first
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=first)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = (x[:, :, 0] < 0).index_fill(1, torch.tensor([0]), False) if self.mask == "padding" else None
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x) if self.mask == "causal" else None
        x = x if self.first else x.transpose(0, 1)
        out = self.inner(x, x, x, key_padding_mask=padding, attn_mask=causal, need_weights=False)[0]
        return self.head(out.mean(1 if self.first else 0))


class Vision(nn.Module):
    """Patches, a class token, positions and one transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Linear(WIDTH, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, STEPS + 1, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], 1) + self.places
        return self.head(self.layer(x)[:, 0])


class Gains(nn.Module):
    """Parameters outside of layers: a scale for each channel and one gain for all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))
        self.first, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x) * self.scale).tanh() * self.gain)


class Own(nn.Module):
    """One weight and any function of input and weight."""

    def __init__(self, weight: Tensor, use: object) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(weight), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class InPlace(nn.Module):
    """Operations in place, on activations only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift, self.head = nn.Linear(WIDTH, 8), nn.Parameter(torch.zeros(8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += self.shift
        h.mul_(2).clamp_(-50, 50)
        return self.head(F.relu_(h))


class Checkpointed(nn.Module):
    """The first layers are computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.body, self.head = reentrant, mlp(nn.Tanh()), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint.checkpoint(self.body, x, use_reentrant=self.reentrant))


class Standardized(nn.Conv2d):
    """Convolution by a weight that is standardized first."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=1)


class Round(torch.autograd.Function):
    """Rounds; the gradient passes straight through. Innocent, but its backward pass is code that nobody has seen."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class SortedByLength(nn.Module):
    """Rows in the order of their lengths, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        order = x.square().sum(1).argsort()
        return self.head(self.inner(x[order]).tanh()[order.argsort()])


class TwoViews(nn.Module):
    """The record and its mirror image, all records of the one before all of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.net(torch.cat([x, x.flip(-1)])).chunk(2)
        return (one + other) / 2


class InParts(nn.Module):
    """Takes large batches in parts of 32 records, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in x.split(32)]) if len(x) else self.net(x)


def linear_pair() -> nn.Module:
    """Two layers without an activation between them: `cancelled` weights leave nothing but rounding."""
    return nn.Sequential(nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES))


@torch.no_grad()
def cancelled(weights: Mapping[str, Tensor]) -> None:
    first, second = weights["0.weight"], weights["1.weight"]
    first.mul_(1e9)
    first[2] = first[0] + first[1]
    second.copy_(torch.linspace(1, 8, 8)[:, None] * torch.tensor([1.0, 1.0, -1.0]))


def frozen_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def weight_normed() -> nn.Module:
    model = mlp(nn.Tanh())
    parametrizations.weight_norm(model[0])
    return model


def spectral_normed() -> nn.Module:
    model = mlp(nn.Tanh())
    parametrizations.spectral_norm(model[0])
    return model
