"""Layers whose backward pass hands (input, output gradient) to the record instead of forming a weight gradient."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from adp2sgd.device import can_compile
from adp2sgd.gradient import rules
from adp2sgd.gradient.convolution import Convolution, Geometry, channels_last

Emit = Callable[[rules.Use], None]
"""Takes the use of one parameter; None where the parameter is absent or not trained."""


class Layer(Protocol):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output, and further tensors that `backward` needs."""
        ...

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        """Emit the uses of the parameters; return the gradient of the input where it is wanted."""
        ...


class Tap(torch.autograd.Function):
    """Runs a layer. `token` requires a gradient, so that the backward pass reaches layers whose input needs none."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, token: Tensor, x: Tensor) -> Tensor:
        y, *extra = layer.forward(x)
        ctx.layer = layer
        ctx.save_for_backward(x, *extra)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None]:
        return None, None, ctx.layer.backward(gradient, ctx.saved_tensors, ctx.needs_input_grad[2])


class LinearLayer:
    """y = x wᵀ + b over the last axis of x [rows, …, d]; rows belong to `n` records, one after the other. `turned`: the
    weight is [d, p], and y = x w + b."""

    def __init__(
        self, n: int, weight: Tensor, bias: Tensor | None, emit: Emit | None, emit_bias: Emit | None, *,
        turned: bool = False,
    ) -> None:  # fmt: skip
        self.n, self.bias, self.emit, self.emit_bias, self.turned = n, bias, emit, emit_bias, turned
        self.weight = weight.t() if turned else weight

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(x, self.weight, self.bias),)

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        (x,) = saved
        outputs = gradient.reshape(self.n, -1, gradient.shape[-1])
        if self.emit:
            inputs = x.reshape(self.n, -1, x.shape[-1])
            self.emit(rules.Linear(outputs, inputs) if self.turned else rules.Linear(inputs, outputs))
        if self.emit_bias:
            self.emit_bias(rules.Kept(outputs.sum(1, dtype=wide(outputs))))
        return gradient @ self.weight if of_input else None


class ConvolutionLayer:
    """Convolution over any number of spatial axes."""

    def __init__(
        self, n: int, weight: Tensor, bias: Tensor | None, geometry: Geometry, emit: Emit | None, emit_bias: Emit | None
    ) -> None:
        self.n, self.weight, self.bias, self.geometry = n, weight, bias, geometry
        self.emit, self.emit_bias = emit, emit_bias

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        g = self.geometry
        axes = len(g.kernel)
        return (
            torch.convolution(x, self.weight, self.bias, g.stride, g.padding, g.dilation, False, [0] * axes, g.groups),
        )

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        (x,) = saved
        if self.emit:
            self.emit(Convolution(x, gradient, self.weight, self.geometry, self.n))
        if self.emit_bias:
            sums = gradient.sum(tuple(range(2, gradient.dim())), dtype=wide(gradient))
            self.emit_bias(rules.Kept(_by_record(sums, self.n)))
        return self.geometry.backward(gradient, x, self.weight, of_weight=False) if of_input else None


class GroupNormLayer:
    """All records' channels side by side as the channels of one image: the fused backward pass then gives each
    record's gradient of the scale and shift, at the price of the plain one."""

    def __init__(
        self, n: int, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, emits: list[Emit | None]
    ) -> None:
        self.n, self.groups, self.weight, self.bias, self.eps, self.emits = n, groups, weight, bias, eps, emits

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, channels, area = len(x), x.shape[1], prod(x.shape[2:])
        out = torch.native_group_norm(
            x.contiguous(), self.weight, self.bias, rows, channels, area, self.groups, self.eps
        )
        return tuple(out)

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        x, mean, rstd = saved
        rows = BLOCKS // self.groups
        if len(x) <= rows:
            found = self._some(gradient, x, mean, rstd, of_input)
        else:
            some = zip(*(t.split(rows) for t in (gradient, x, mean, rstd)), strict=True)
            parts = zip(*[self._some(g, x, mean, rstd, of_input) for g, x, mean, rstd in some], strict=True)
            found = tuple(torch.cat(part) if of_input or at else part[0] for at, part in enumerate(parts))
        self._emit([gradients.view(len(x), -1) for gradients in found[1:]])
        return found[0] if of_input else None

    def _emit(self, found: list[Tensor]) -> None:
        """Hand in the gradients of scale and shift [rows, channels]."""
        for emit, gradients in zip(self.emits, found, strict=True):
            if emit:
                emit(rules.Kept(_by_record(gradients, self.n)))

    def _some(self, gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, of_input: bool) -> tuple[Tensor, ...]:
        """Gradients of these rows of the input, and of scale and shift for each row [rows · channels]."""
        channels, area = len(x) * x.shape[1], prod(x.shape[2:])
        scale = None if self.weight is None else self.weight.repeat(len(x))  # its kernel takes no view
        found: tuple[Tensor, ...] = torch.ops.aten.native_group_norm_backward(
            gradient.contiguous(), x.contiguous(), mean.view(1, -1), rstd.view(1, -1), scale,
            1, channels, area, len(x) * self.groups, [of_input, True, True],
        )  # fmt: skip
        return found


class FusedGroupNorm(GroupNormLayer):
    """The same by kernels of our own, for bfloat16 images whose channels lie last, as a GPU's convolutions want them:
    torch's kernels would first bring them into another order and into float32. The output is bfloat16 as well."""

    @staticmethod
    def takes(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> bool:
        if x.dtype != torch.bfloat16 or not channels_last(x) or weight is None or bias is None:
            return False
        return can_compile(x.device) and bool(_kernels().can_take(x, groups))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, mean, rstd = _kernels().forward(x, self.weight, self.bias, self.groups, self.eps)
        return y, mean, rstd

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        last = gradient.contiguous(memory_format=torch.channels_last)
        dx, *found = _kernels().backward(last, *saved, self.weight, self.groups, of_input=of_input)
        self._emit(found)
        return dx if of_input else None


class LayerNormLayer:
    """Normalization over the last axes."""

    def __init__(
        self, n: int, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, emits: list[Emit | None]
    ) -> None:
        self.n, self.shape, self.weight, self.bias, self.eps, self.emits = n, shape, weight, bias, eps, emits

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.native_layer_norm(x, self.shape, self.weight, self.bias, self.eps))

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        x, mean, rstd = saved
        by_record = (self.n, -1, *self.shape)
        if self.emits[0]:
            self.emits[0](rules.Kept((gradient * ((x - mean) * rstd)).reshape(by_record).sum(1)))
        if self.emits[1]:
            self.emits[1](rules.Kept(gradient.reshape(by_record).sum(1)))
        if not of_input:
            return None
        found = torch.ops.aten.native_layer_norm_backward(
            gradient, x, self.shape, mean, rstd, self.weight, self.bias, [True, False, False]
        )
        result: Tensor = found[0]
        return result


class ScaleLayer:
    """y = x · scale, over the last axes."""

    def __init__(self, n: int, scale: Tensor, emit: Emit) -> None:
        self.n, self.scale, self.emit = n, scale, emit

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x * self.scale,)

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> Tensor | None:
        self.emit(rules.Kept((gradient * saved[0]).reshape(self.n, -1, *self.scale.shape).sum(1)))
        return gradient * self.scale if of_input else None


class EmbeddingLayer:
    """Rows of a table, looked up by token."""

    def __init__(self, n: int, weight: Tensor, padding: int | None, emit: Emit) -> None:
        self.n, self.weight, self.padding, self.emit = n, weight, padding, emit

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (F.embedding(x, self.weight),)

    def backward(self, gradient: Tensor, saved: tuple[Tensor, ...], of_input: bool) -> None:
        tokens = saved[0].reshape(self.n, -1)
        if self.padding is not None:
            tokens = tokens.masked_fill(tokens == self.padding, -1)
        outputs = gradient.reshape(self.n, -1, gradient.shape[-1])
        self.emit(rules.Embedding(tokens, outputs, len(self.weight)))


BLOCKS = 65_535
"""A CUDA grid has at most so many blocks along the axis on which the groups lie."""


def _kernels() -> Any:
    """Our kernels; their module needs Triton."""
    return import_module("adp2sgd.gradient.kernels")


def _by_record(rows: Tensor, n: int) -> Tensor:
    """[n, …]: sums of the rows [rows, …] that belong to each of n records."""
    return rows if len(rows) == n else rows.view(n, -1, *rows.shape[1:]).sum(1)


def wide(tensor: Tensor) -> torch.dtype:
    """The type in which sums are taken."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
