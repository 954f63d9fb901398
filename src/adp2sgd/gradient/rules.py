"""What each use of a parameter knows: its per-record gradients, their squared norms, and their weighted sum.

A rule holds a layer's input and the gradient at its output. The norm of a record's gradient comes from the gradient
itself ("per-record") or from Gram matrices that never form it ("ghost"), whichever costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from adp2sgd.gradient.rounding import (
    BLOCK,
    Measured,
    as_multiplied,
    gram,
    lengths,
    reach,
    roundoff,
    squares,
    underflow,
)

GRAM = 2.5
"""What a multiplication for a Gram matrix, in float64, costs beside one in float32."""
MATMUL = "matmul"
SMALL = 1 << 14
"""Per-record gradients of at most so many numbers are joined with others."""
KEEP_BYTES = 1 << 28
"""Per-record gradients of one layer are held until the clip factors are known only if they are smaller than this."""
KEEP_SHARE = 64
"""A GPU holds those that are smaller than this part of its memory: what is held need not be taken a second time."""


class UnsupportedError(Exception):
    """A parameter is used in a way that no rule covers."""


class Use(Protocol):
    """One use of a parameter in a forward pass. `n` records; gradients are float32 (float64 for such models)."""

    rule: str
    held: int  # bytes
    formed: int  # bytes of all per-record gradients; 0 where these are always held once formed

    @property
    def why(self) -> str: ...

    def measure(self) -> Measured:
        """The norms, if `weighted` then takes the sum."""
        ...

    def per_record(self) -> Tensor:
        """[n, *parameter.shape]: each record's gradient."""
        ...

    def weighted(self, factors: Tensor) -> Tensor:
        """parameter.shape: the sum of the records' gradients, each times its factor."""
        ...


class Kept:
    """The per-record gradients themselves: small ones, and those of parameters used in ways without a rule."""

    formed = 0

    def __init__(self, gradients: Tensor, rule: str = "per-record") -> None:
        self.gradients, self.rule = gradients, rule
        self.held = gradients.numel() * gradients.element_size()
        # Norm and sum read the numbers as they lie in memory, whatever the order of the axes.
        axes, steps = range(1, gradients.dim()), gradients.stride()
        self.order = None if gradients.is_contiguous() else sorted(axes, key=lambda a: -steps[a])

    @property
    def why(self) -> str:
        return f"{self.held / max(1, len(self.gradients)) / 1024:.0f} KiB for each record"

    @property
    def rows(self) -> Tensor:
        """[n, size of the parameter]: the gradients, each in the order of the memory."""
        if self.order is None:
            return self.gradients if self.gradients.dim() == 2 else self.gradients.view(len(self.gradients), -1)
        return self.gradients.permute(0, *self.order).reshape(len(self.gradients), -1)

    def shaped(self, row: Tensor) -> Tensor:
        """A sum of `rows` in the parameter's shape."""
        shape = self.gradients.shape[1:]
        if self.order is None:
            return row if len(shape) == 1 else row.view(shape)
        back = [self.order.index(a) for a in range(1, len(shape) + 1)]
        return row.view([shape[a - 1] for a in self.order]).permute(back)

    def measure(self) -> Measured:
        return Measured(squares(self.rows))

    def per_record(self) -> Tensor:
        return self.gradients

    def weighted(self, factors: Tensor) -> Tensor:
        rows = self.rows
        return self.shaped(torch.mv(rows.t(), factors.to(rows.dtype)))


class Linear:
    """weight [p, d] applied to d-vectors: `inputs` [n, t, d], `outputs` (gradients) [n, t, p]."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        self.inputs, self.outputs = inputs, outputs
        t, d, p = inputs.shape[1], inputs.shape[2], outputs.shape[2]
        self.cost = {"ghost": GRAM * t * t * (d + p), "per-record": t * d * p}
        # At a single position the norm is a product of two.
        self.rule = "ghost" if t == 1 or self.cost["ghost"] < self.cost["per-record"] else "per-record"
        self.held = inputs.numel() * inputs.element_size() + outputs.numel() * outputs.element_size()
        self.formed = len(inputs) * d * p * 4

    @property
    def why(self) -> str:
        return compare(self.cost) if self.inputs.shape[1] > 1 else "at one position the norm is a product of two"

    def measure(self) -> Measured:
        self.inputs, self.outputs = as_multiplied(self.inputs, MATMUL), as_multiplied(self.outputs, MATMUL)
        x, g, t, unit = self.inputs, self.outputs, self.inputs.shape[1], roundoff(self.inputs, MATMUL)
        if t > 1 and self.rule == "ghost":
            gram_in, gram_out = gram(x), gram(g)
            lost = underflow(t * g.shape[2], gram_in.diagonal(dim1=1, dim2=2).sum(1))
            return Measured((gram_in * gram_out).sum((1, 2)), unit * reach(gram_in, gram_out), t, lost)
        inputs = lengths(x)
        most, lost = inputs * lengths(g), underflow(t * g.shape[2], inputs)
        return Measured(most if t == 1 else squares(self.per_record()), unit * most.sqrt(), t, lost)

    def per_record(self) -> Tensor:
        return product(self.outputs.transpose(1, 2), self.inputs)

    def weighted(self, factors: Tensor) -> Tensor:
        return weighted_product(self.outputs, self.inputs, factors)

    def joined(self, other: Linear) -> Linear:
        """Both uses of one weight as one: records' gradients add up along t."""
        return Linear(torch.cat([self.inputs, other.inputs], 1), torch.cat([self.outputs, other.outputs], 1))


class Embedding:
    """weight [vocabulary, d]: `tokens` [n, t] (those without a gradient are −1), `outputs` (gradients) [n, t, d]."""

    rule = "ghost"
    formed = 0

    def __init__(self, tokens: Tensor, outputs: Tensor, vocabulary: int) -> None:
        self.tokens, self.outputs, self.vocabulary = tokens, outputs, vocabulary
        self.held = outputs.numel() * outputs.element_size() + tokens.numel() * tokens.element_size()

    @property
    def why(self) -> str:
        return f"only {self.tokens.shape[1]} of {self.vocabulary} rows are read"

    def measure(self) -> Measured:
        same = (self.tokens[:, :, None] == self.tokens[:, None, :]) & (self.tokens >= 0)[:, :, None]
        grams = gram(self.outputs) * same
        terms = grams.diagonal(dim1=1, dim2=2).sqrt().sum(1)
        return Measured(grams.sum((1, 2)), roundoff(self.outputs) * terms, self.tokens.shape[1])

    def per_record(self) -> Tensor:
        n, _, d = self.outputs.shape
        rows = (self.tokens + torch.arange(n, device=self.tokens.device)[:, None] * self.vocabulary).flatten()
        out = self.outputs.new_zeros(n * self.vocabulary, d, dtype=_wide(self.outputs).dtype)
        return self._scatter(out, rows, torch.ones_like(out[:, 0][:n])).view(n, self.vocabulary, d)

    def weighted(self, factors: Tensor) -> Tensor:
        out = self.outputs.new_zeros(self.vocabulary, self.outputs.shape[2], dtype=factors.dtype)
        return self._scatter(out, self.tokens.flatten(), factors)

    def _scatter(self, out: Tensor, rows: Tensor, factors: Tensor) -> Tensor:
        scaled = _wide(self.outputs) * (factors[:, None] * (self.tokens >= 0))[:, :, None]
        return out.index_add_(0, rows.clamp(min=0), scaled.flatten(0, 1).to(out.dtype))

    def cross(self, head: Linear) -> Tensor:
        """[n]: inner product of a record's gradients of this table and of a Linear layer with the same weight."""
        picked = head.outputs.transpose(1, 2)  # [n, vocabulary, s]
        rows = self.tokens.clamp(min=0)[:, :, None].expand(-1, -1, picked.shape[2])
        picked = picked.gather(1, rows).double() * (self.tokens >= 0)[:, :, None]
        return (torch.bmm(self.outputs.double(), head.inputs.double().transpose(1, 2)) * picked).sum((1, 2))


class Tied:
    """An embedding table that is also the weight of a Linear layer: neither gradient is formed per record."""

    rule = "ghost, with cross terms"
    formed = 0

    def __init__(self, table: Embedding, head: Linear) -> None:
        self.table, self.head, self.held = table, head, table.held + head.held
        head.rule = "ghost"

    @property
    def why(self) -> str:
        return f"one table as embedding and as output layer; {self.table.why}"

    def measure(self) -> Measured:
        table, head = self.table.measure(), self.head.measure()
        found = table.squares + head.squares + 2 * self.table.cross(self.head)
        assert table.doubt is not None
        assert head.doubt is not None
        return Measured(found, table.doubt + head.doubt, table.terms + head.terms, head.lost)

    def per_record(self) -> Tensor:
        return self.table.per_record() + self.head.per_record()

    def weighted(self, factors: Tensor) -> Tensor:
        return self.table.weighted(factors) + self.head.weighted(factors)


class Derived:
    """A use of a tensor that is computed from a parameter; `pull` leads gradients [n, …] back to the parameter."""

    rule = "per-record"
    formed = 0
    why = "the layer's weight is computed from the parameter"

    def __init__(self, use: Use, pull: Callable[[Tensor], Tensor]) -> None:
        self.use, self.pull, self.held = use, pull, use.held

    def measure(self) -> Measured:
        return Kept(self.per_record()).measure()

    def per_record(self) -> Tensor:
        return self.pull(self.use.per_record())

    def weighted(self, factors: Tensor) -> Tensor:
        return Kept(self.per_record()).weighted(factors)


def most_kept(device: torch.device) -> int:
    """Bytes of one layer's per-record gradients that are held."""
    if device.type != "cuda":
        return KEEP_BYTES
    return max(KEEP_BYTES, torch.cuda.get_device_properties(device).total_memory // KEEP_SHARE)


def settle(use: Use, keep_bytes: int) -> Use:
    """What to hold for norm and sum: the per-record gradients if these are formed and not large, else the use."""
    formed = use.rule == "per-record" and use.formed <= max(keep_bytes, use.held)
    return Kept(use.per_record()) if formed and not isinstance(use, Kept) else use


def silence(use: Any, counted: Tensor | None) -> None:
    """Zeros in place of what the tape holds of records that are not `counted` [n], by the same work whoever they are: a
    factor of 0 would leave a NaN a NaN."""
    if counted is None:
        return
    for name in ("gradients", "inputs", "outputs"):
        held = getattr(use, name, None)
        if held is not None:
            rows = counted.repeat_interleave(len(held) // len(counted)).view(-1, *[1] * (held.dim() - 1))
            setattr(use, name, torch.where(rows, held, torch.zeros_like(held)))
    for name in ("use", "table", "head"):
        if hasattr(use, name):
            silence(getattr(use, name), counted)


class Joined:
    """Small per-record gradients of many parameters side by side, so that one pass takes all their norms and sums."""

    def __init__(self, kept: dict[str, Kept]) -> None:
        self.parts = kept
        rows = [use.rows for use in kept.values()]
        self.widths = [row.shape[1] for row in rows]
        fill = -sum(self.widths) % BLOCK  # zeros, so that the norms are taken in whole blocks
        self.kept = Kept(torch.cat([*rows, rows[0].new_zeros(len(rows[0]), fill)], 1))

    def weighted(self, factors: Tensor) -> dict[str, Tensor]:
        pieces = self.kept.weighted(factors).split([*self.widths, self.kept.gradients.shape[1] - sum(self.widths)])
        return {name: use.shaped(piece) for (name, use), piece in zip(self.parts.items(), pieces, strict=False)}


def merge(uses: list[Use]) -> Use:
    """All uses of one parameter as one use, so that their gradients are added before the norm is taken."""
    linear = [use for use in uses if isinstance(use, Linear)]
    tables = [use for use in uses if isinstance(use, Embedding)]
    if len(linear) + len(tables) < len(uses) or len(tables) > 1:
        total = uses[0].per_record().clone()
        for use in uses[1:]:
            total += use.per_record()
        return Kept(total, "per-record, added")
    head = linear[0]
    for other in linear[1:]:
        head = head.joined(other)
    return Tied(tables[0], head) if tables else head


def compare(cost: Mapping[str, float]) -> str:
    """The costs of the rules in words."""
    return ", ".join(f"{name} {value / 1e6:.3g} M" for name, value in cost.items()) + " multiplications for each record"


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product in float32 of the given values; half precision stays exact (its products fit float32)."""
    if in_halves(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(_wide(a), _wide(b))


def in_halves(a: Tensor, b: Tensor) -> bool:
    """Whether both are bfloat16 on a GPU, whose matrix units multiply such numbers exactly."""
    return a.dtype == b.dtype == torch.bfloat16 and a.is_cuda


def weighted_product(outputs: Tensor, inputs: Tensor, factors: Tensor) -> Tensor:
    """[p, d]: Σ over records of factor · outputsᵀ inputs, of outputs [n, t, p] and inputs [n, t, d].

    In bfloat16 on a GPU a factor keeps its first 16 bits, so it only shrinks; outputs times that are three bfloat16
    numbers, to the bit but for what is below `rounding.SMALLEST`, and so the sum is of the given values here too.
    """
    if in_halves(outputs, inputs):
        parts = torch.cat(in_three(outputs.float() * first_bits(factors).view(-1, 1, 1)), 2)
        return product(parts.flatten(0, 1).t()[None], inputs.flatten(0, 1)[None]).view(3, outputs.shape[2], -1).sum(0)
    scaled = as_multiplied(_wide(outputs) * factors.view(-1, 1, 1), MATMUL)
    return scaled.flatten(0, 1).t() @ _wide(inputs).flatten(0, 1)


def first_bits(factors: Tensor) -> Tensor:
    """Numbers in float32 with the last eight bits of their mantissas dropped."""
    return factors.float().view(torch.int32).bitwise_and(-256).view(torch.float32)


def in_three(numbers: Tensor) -> list[Tensor]:
    """Float32 numbers as sums of three bfloat16 numbers."""
    parts = []
    for _ in range(3):
        parts.append(numbers.bfloat16())
        numbers = numbers - parts[-1]
    return parts


def _wide(tensor: Tensor) -> Tensor:
    """Half precision is widened exactly: norm and sum are of the same values."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
