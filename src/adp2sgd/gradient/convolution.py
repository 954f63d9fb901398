"""Per-record gradients of convolutions in any dimension, with groups, stride, dilation and padding.

A stride s splits the padded input into s phases per axis; on a phase, laid out as one padded row after the other, the
input that meets kernel position k is a slice that starts at a fixed offset. So the Gram matrix of all patches is a sum
of shifted blocks of the pixels' Gram matrix, and no patch is copied for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as grid_points
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from adp2sgd.gradient.rounding import Measured, as_multiplied, gram, lengths, reach, roundoff, squares, underflow
from adp2sgd.gradient.rules import GRAM, compare, in_halves, product, weighted_product


@dataclass(frozen=True)
class Geometry:
    """Arguments of a convolution, one number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, *, of_weight: bool) -> Tensor:
        """The gradient of the weight, or else of the inputs; each is taken where it is needed."""
        out = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, self.stride, self.padding, self.dilation,
            False, [0] * len(self.kernel), self.groups, [not of_weight, of_weight, False],
        )  # fmt: skip
        result: Tensor = out[1] if of_weight else out[0]
        return result

    def offsets(self, grid: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        """For each kernel position its phase, and where its slice begins in a phase of this size."""
        strides = [prod(grid[i + 1 :]) for i in range(len(grid))]
        steps = [[k * d for k in range(size)] for size, d in zip(self.kernel, self.dilation, strict=True)]
        return [
            (
                tuple(a % s for a, s in zip(position, self.stride, strict=True)),
                sum(a // s * step for a, s, step in zip(position, self.stride, strides, strict=True)),
            )
            for position in grid_points(*steps)
        ]

    @lru_cache(maxsize=1024)  # noqa: B019 (the same few layers at every step)
    def laid_out(self, outputs: tuple[int, ...], fold: int) -> tuple[tuple[int, ...], int]:
        """The grid of a phase for outputs of this size, and how far the outputs of `fold` images reach on it."""
        reach = [(k - 1) * d // s for k, d, s in zip(self.kernel, self.dilation, self.stride, strict=True)]
        grid = tuple(size + r for size, r in zip(outputs, reach, strict=True))
        steps = [prod(grid[i + 1 :]) for i in range(len(grid))]
        last = sum((size - 1) * step for size, step in zip(outputs, steps, strict=True))
        return grid, (fold - 1) * prod(grid) + last + 1

    @lru_cache(maxsize=1024)  # noqa: B019
    def costs(self, outputs: tuple[int, ...], fold: int, c: int, p: int) -> tuple[float, float, float, float]:
        """Multiplications for one record: for Gram matrices and for the plain sum of its gradient; for the gradient
        itself and for moving it. c channels become p in each group; a moved number counts as `TRAFFIC`."""
        (grid, length), taps = self.laid_out(outputs, fold), prod(self.kernel)
        area, phases = fold * prod(grid), len({phase for phase, _ in self.offsets(grid)})
        grams = GRAM * (phases * area**2 * c + length**2 * (p + TRAFFIC * taps) * self.groups)
        return grams, fold * prod(outputs) * taps * c * p, length * taps * c * p, TRAFFIC * taps * c * p


class Convolution:
    """`inputs` [n·fold, c, …], `outputs` (gradients) [n·fold, p, …]: fold images belong to each of n records."""

    def __init__(self, inputs: Tensor, outputs: Tensor, weight: Tensor, geometry: Geometry, records: int) -> None:
        self.inputs, self.outputs, self.weight, self.geometry, self.n = inputs, outputs, weight, geometry, records
        self.fold = len(inputs) // records
        self.last = geometry.groups == 1 and inputs.dtype == torch.bfloat16 and channels_last(inputs)
        self.halves = self.last and in_halves(inputs, outputs)
        self.grid, self.length = geometry.laid_out(tuple(outputs.shape[2:]), self.fold)
        self.held = inputs.numel() * inputs.element_size() + outputs.numel() * outputs.element_size()
        self.formed = records * weight.numel() * 4
        self.cost = self._cost()
        self.rule = "ghost" if self.cost["ghost"] < self.cost["per-record"] else "per-record"

    @property
    def why(self) -> str:
        return compare(self.cost)

    def _cost(self) -> dict[str, float]:
        """Multiplications for norm and sum of one record."""
        channels = (self.inputs.shape[1], self.outputs.shape[1] // self.geometry.groups)
        grams, total, formed, moved = self.geometry.costs(tuple(self.outputs.shape[2:]), self.fold, *channels)
        if self.halves:
            return {"ghost": grams + 3 * HALVES * total, "per-record": HALVES * formed + moved}
        return {"ghost": grams + total, "per-record": (formed + moved) * REPEAT[self.inputs.device.type]}

    def measure(self) -> Measured:
        self.inputs, self.outputs = as_multiplied(self.inputs, KIND), as_multiplied(self.outputs, KIND)
        unit, terms = roundoff(self.inputs, KIND), self.fold * prod(self.outputs.shape[2:])
        numbers = self.outputs.shape[1] * terms
        if self.rule == "per-record":
            # A pixel is in at most as many patches as the kernel has positions.
            patches = prod(self.geometry.kernel) * lengths(self._by_record(self.inputs))
            doubt = unit * (patches * lengths(self._by_record(self.outputs))).sqrt()
            return Measured(squares(self.per_record()), doubt, terms, underflow(numbers, patches))
        gram_in, gram_out = self._grams()
        dots = (gram_in * gram_out).sum((1, 2)).view(self.n, -1).sum(1)
        far = torch.linalg.vector_norm(reach(gram_in, gram_out).view(self.n, -1), dim=1)
        patches = gram_in.diagonal(dim1=1, dim2=2).reshape(self.n, -1).sum(1)
        return Measured(dots, unit * far, terms, underflow(numbers, patches))

    def _grams(self) -> tuple[Tensor, Tensor]:
        """[n·groups, length, length] of the patches and of the gradients at the outputs, in float64."""
        if self.inputs.is_cuda and self.fold * prod(self.outputs.shape[2:]) <= FEW_PIXELS:  # fewer kernels
            patches, gradient = next(self._portions(self.n))
            return gram(patches), gram(gradient)
        length = self.length
        gram_out = gram(self._flat_outputs())
        gram_in = torch.zeros_like(gram_out)
        grams: dict[tuple[int, ...], Tensor] = {}
        for phase, start in self.geometry.offsets(self.grid):
            if phase not in grams:
                grams[phase] = gram(self._flat_inputs(phase))
            gram_in += grams[phase][:, start : start + length, start : start + length]
        return gram_in, gram_out

    def _by_record(self, images: Tensor) -> Tensor:
        return images.reshape(self.n, -1)

    def per_record(self) -> Tensor:
        groups, channels = self.geometry.groups, self.inputs.shape[1]
        if 1 < groups == channels:
            return self._side_by_side()
        pixels = prod(self.outputs.shape[2:])
        few = channels // groups < FEW_CHANNELS or pixels <= FEW_PIXELS
        if self.inputs.is_cuda:
            few = few or prod(self.geometry.stride) > 1 or prod(self.geometry.kernel) == 1 or self.inputs.itemsize == 2
        elif groups == 1 and (self.outputs.shape[1] > FEW_OUTPUTS or pixels <= FEW_PIXELS):
            return self._in_portions()
        return self._patches() if few else self._side_by_side()

    def weighted(self, factors: Tensor) -> Tensor:
        if self.halves:
            total = factors.new_zeros(len(self.weight), self.weight[0].numel())
            for (patches, gradient), some in zip(
                self._portions(self.portion), factors.split(self.portion), strict=True
            ):
                total += weighted_product(gradient, patches, some)
            return self._shaped(total)
        scale = factors.repeat_interleave(self.fold).view(-1, *[1] * (self.outputs.dim() - 1))
        x, w = self.inputs.to(factors.dtype), self.weight.to(factors.dtype)
        return self.geometry.backward(as_multiplied(self.outputs * scale, KIND), x, w, of_weight=True)

    def _side_by_side(self) -> Tensor:
        """All records' channels as the groups of one image: the library's weight gradient of that is each record's."""
        geometry = replace(self.geometry, groups=self.n * self.geometry.groups)
        # Only its shape is read.
        weight = self.weight.new_empty(self.n * len(self.weight), *self.weight.shape[1:], dtype=self.dtype)
        out = geometry.backward(self._beside(self.outputs), self._beside(self.inputs), weight, of_weight=True)
        return out.view(self.n, *self.weight.shape)

    def _beside(self, images: Tensor) -> Tensor:
        """[fold, n·channels, …]."""
        split = images.to(self.dtype).reshape(self.n, self.fold, *images.shape[1:]).transpose(0, 1)
        return split.reshape(self.fold, -1, *images.shape[2:])

    def _patches(self) -> Tensor:
        """Batched matrix products with the patches, copied: for few channels or pixels, and in half precision."""
        parts = [self._times(gradient, patches) for patches, gradient in self._portions(self.portion)]
        return self._shaped(parts[0] if len(parts) == 1 else torch.cat(parts), self.n)

    def _portions(self, some: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of `some` records at a time: patches [n·groups, fold·outputs, c·kernel] (kernel·c where channels lie last)
        and gradients at the outputs [n·groups, fold·outputs, p]."""
        for both in zip(*(images.split(some * self.fold) for images in (self._seen(), self.outputs)), strict=True):
            patches, gradient = (self._joined(images) for images in both)
            yield patches, gradient

    def _joined(self, images: Tensor) -> Tensor:
        """[n·groups, fold·outputs, channels of a group (and kernel)] of images [n·fold, channels, …, *outputs]."""
        axes, pixels = len(self.geometry.kernel), prod(self.outputs.shape[2:])
        if self.last:
            outputs_first = images.movedim(tuple(range(-axes, 0)), tuple(range(1, 1 + axes)))
            return _in_order(outputs_first.movedim(1 + axes, -1)).view(
                -1, self.fold * pixels, prod(images.shape[1:-axes])
            )
        split = images.unflatten(0, (-1, self.fold)).movedim(1, -axes - 1)
        out: Tensor = split.reshape(len(split) * self.geometry.groups, -1, self.fold * pixels)
        return out.transpose(1, 2)

    def _shaped(self, gradients: Tensor, *records: int) -> Tensor:
        """[*records, *weight.shape] of gradients [·, p, c·kernel], or kernel·c where channels lie last."""
        if not self.last:
            return gradients.reshape(*records, *self.weight.shape)
        p, c, *kernel = self.weight.shape
        return gradients.view(*records, p, *kernel, c).movedim(-1, -1 - len(kernel))

    @staticmethod
    def _times(gradient: Tensor, patches: Tensor) -> Tensor:
        """gradientᵀ · patches."""
        if patches.shape[2] > 64:  # the longer side last is faster
            return product(gradient.transpose(1, 2), patches)
        turned = gradient if gradient.is_cuda else gradient.contiguous()
        return product(patches.transpose(1, 2), turned).transpose(1, 2)

    @property
    def portion(self) -> int:
        """Records whose patches are copied at once."""
        each = 4 * self.fold * prod(self.outputs.shape[2:]) * prod(self.geometry.kernel) * self.inputs.shape[1]
        return min(self.n, max(torch.get_num_threads(), PORTION_BYTES[self.inputs.device.type] // each))

    def _in_portions(self) -> Tensor:
        """The same with each pixel's channels together, which CPUs multiply fastest; without groups."""
        g, n, some, p, c = self.geometry, self.n, self.portion, self.outputs.shape[1], self.inputs.shape[1]
        sides = list(zip(self.inputs.shape[2:], g.padding, strict=True))
        padded = self.weight.new_zeros(some * self.fold, *[s + 2 * pad for s, pad in sides], c, dtype=self.dtype)
        inside = padded[(slice(None), *[slice(pad, pad + s) for s, pad in sides])]
        steps = padded.stride()
        over_outputs = [step * s for step, s in zip(steps[1:], g.stride, strict=False)]
        over_kernel = [step * d for step, d in zip(steps[1:], g.dilation, strict=False)]
        size = (some * self.fold, *self.outputs.shape[2:], *g.kernel, c)
        seen = padded.as_strided(size, (steps[0], *over_outputs, *over_kernel, 1))
        patches = padded.new_empty(size)
        rows = patches.view(some, -1, prod(g.kernel) * c)
        gradient = self.outputs.to(self.dtype).reshape(n, self.fold, p, -1).transpose(1, 2).reshape(n, p, -1)
        out = padded.new_empty(n, p, rows.shape[2])
        for x, of, to in zip(self.inputs.split(len(padded)), gradient.split(some), out.split(some), strict=True):
            inside[: len(x)] = x.movedim(1, -1)
            patches[: len(x)] = seen[: len(x)]
            torch.bmm(of, rows[: len(of)], out=to)
        return out.view(n, p, *g.kernel, c).movedim(-1, 2)

    def _seen(self) -> Tensor:
        """[n·fold, c, *kernel, *outputs]: what each output sees, as a view of the padded input."""
        g = self.geometry
        x = F.pad(self.inputs, [a for pad in reversed(g.padding) for a in (pad, pad)])
        strides = x.stride()[2:]
        over_kernel = [step * d for step, d in zip(strides, g.dilation, strict=True)]
        over_outputs = [step * s for step, s in zip(strides, g.stride, strict=True)]
        size = (*x.shape[:2], *g.kernel, *self.outputs.shape[2:])
        return x.as_strided(size, (*x.stride()[:2], *over_kernel, *over_outputs))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.inputs.dtype == torch.float64 else torch.float32

    def _flat_outputs(self) -> Tensor:
        """[n·groups, length, p/groups]: gradients on the grid of a phase, zero where no output lies."""
        inside = tuple(slice(size) for size in self.outputs.shape[2:])
        return self._on_grid(self.outputs, inside)[:, : self.length]

    def _flat_inputs(self, phase: tuple[int, ...]) -> Tensor:
        """[n·groups, fold·area of the grid, c/groups]: the padded input's pixels of one phase."""
        put, take = [], []
        for first, s, pad, size, grid in zip(
            phase, self.geometry.stride, self.geometry.padding, self.inputs.shape[2:], self.grid, strict=True
        ):
            skipped = max(0, -((first - pad) // s))
            start = first + s * skipped - pad
            count = max(0, min(grid - skipped, -((start - size) // s)))
            put.append(slice(skipped, skipped + count))
            take.append(slice(start, start + s * count, s) if count else slice(0))
        return self._on_grid(self.inputs[(slice(None), slice(None), *take)], tuple(put))

    def _on_grid(self, images: Tensor, inside: tuple[slice, ...]) -> Tensor:
        """Pixels one after the other, each with its channels together, so that every slice of pixels is aligned."""
        groups, channels = self.geometry.groups, images.shape[1] // self.geometry.groups
        split = images.reshape(self.n, self.fold, groups, channels, *images.shape[2:])
        out = images.new_zeros(self.n, groups, self.fold, *self.grid, channels)
        out[(slice(None), slice(None), slice(None), *inside)] = split.movedim(3, -1).transpose(1, 2)
        return out.view(self.n * groups, -1, channels)


def _in_order(numbers: Tensor) -> Tensor:
    """The bfloat16 numbers one after the other; copied eight at a time where so many lie together."""
    starts = (numbers.shape[-1], numbers.storage_offset(), *numbers.stride()[:-1])
    if numbers.is_contiguous() or numbers.stride(-1) != 1 or any(start % EIGHT for start in starts):
        return numbers.contiguous()
    return numbers.view(torch.complex128).contiguous().view(numbers.dtype)


def channels_last(images: Tensor) -> bool:
    """Whether each pixel's channels lie together in memory."""
    return images.dim() == 4 and images.stride(1) == 1 and images.is_contiguous(memory_format=torch.channels_last)


KIND = "convolution"
TRAFFIC = 30
FEW_CHANNELS, FEW_PIXELS, FEW_OUTPUTS = 8, 64, 32
PORTION_BYTES = {"cpu": 1 << 20, "cuda": 1 << 30}
"""Patches are copied in portions of about this size, which a core's cache holds, and a GPU's memory beside the rest."""
REPEAT = {"cpu": 1.2, "cuda": 2.0}
"""How much longer the per-record gradients take than the plain weight gradient of the same layer, measured."""
HALVES = 1 / 8
"""What a multiplication of bfloat16 numbers costs on a GPU beside one of float32 numbers."""
EIGHT = torch.complex128.itemsize // torch.bfloat16.itemsize
