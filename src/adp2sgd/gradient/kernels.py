"""GroupNorm of images whose channels lie last, one Triton kernel each way: torch has none on a GPU for that layout.
Import it where Triton is at hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192
"""Numbers that one program holds at a time."""
MOST_CHANNELS = 2048


def can_take(images: Tensor, groups: int) -> bool:
    """Whether the kernels serve these images."""
    channels = images.shape[1]
    return channels & (channels - 1) == 0 and channels <= MOST_CHANNELS and groups & (groups - 1) == 0


def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized images; the mean and 1 / standard deviation of each channel's group [rows, channels]."""
    y, channels = torch.empty_like(x), x.shape[1]
    mean, rstd = x.new_empty(2, len(x), channels, dtype=torch.float32)
    if x.numel():
        with _on(x):
            _forward[(len(x),)](
                x, weight.contiguous(), bias.contiguous(), y, mean, rstd, eps, x[0, 0].numel(), channels, groups,
                max(1, TILE // channels), num_warps=8,
            )  # fmt: skip
    return y, mean, rstd


def backward(
    gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, groups: int, *, of_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the images (if wanted), and of scale and shift for each row [rows, channels]."""
    dx, channels = torch.empty_like(x) if of_input else x, x.shape[1]
    scales, shifts = torch.zeros_like(mean), torch.zeros_like(mean)
    if x.numel():
        with _on(x):
            _backward[(len(x),)](
                gradient, x, mean, rstd, weight.contiguous(), dx, scales, shifts, x[0, 0].numel(), channels, groups,
                max(1, TILE // channels), of_input, num_warps=8,
            )  # fmt: skip
    return dx, scales, shifts


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current device, whatever their tensors say."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def _mean(each, groups: tl.constexpr, channels: tl.constexpr):
    """The mean over the channels of a group, for each of them."""
    size: tl.constexpr = channels // groups
    means = tl.sum(tl.reshape(each, [groups, size]), 1) / size
    return tl.reshape(tl.broadcast_to(means[:, None], [groups, size]), [channels])


@triton.jit
def _forward(
    x, weight, bias, y, mean, rstd, eps, pixels: tl.constexpr, channels: tl.constexpr, groups: tl.constexpr,
    some: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, channels)
    at = tl.arange(0, some)[:, None] * channels + channel[None, :]
    first = row * pixels * channels
    # Of what a channel's pixels have beyond its first one: squares of large numbers would hide a small variance.
    origin = tl.load(x + first + channel).to(tl.float32)
    total, squares = tl.zeros([channels], tl.float32), tl.zeros([channels], tl.float32)
    for start in range(0, pixels, some):
        inside = (start + tl.arange(0, some) < pixels)[:, None]
        block = tl.load(x + first + start * channels + at, mask=inside, other=0.0).to(tl.float32)
        block = tl.where(inside, block - origin[None, :], 0.0)
        total += tl.sum(block, 0)
        squares += tl.sum(block * block, 0)
    own = total / pixels
    middle = _mean(origin + own, groups, channels)
    apart = origin + own - middle
    variance = _mean(squares / pixels - own * own, groups, channels) + _mean(apart * apart, groups, channels)
    scale = 1 / tl.sqrt(tl.where(variance < 0, 0.0, variance) + eps)  # what is no number stays none
    tl.store(mean + row * channels + channel, middle)
    tl.store(rstd + row * channels + channel, scale)
    scale = scale * tl.load(weight + channel)
    shift = tl.load(bias + channel) - middle * scale
    for start in range(0, pixels, some):
        inside = (start + tl.arange(0, some) < pixels)[:, None]
        block = tl.load(x + first + start * channels + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + first + start * channels + at, block * scale[None, :] + shift[None, :], mask=inside)


@triton.jit
def _backward(
    gradient, x, mean, rstd, weight, dx, scales, shifts, pixels: tl.constexpr, channels: tl.constexpr,
    groups: tl.constexpr, some: tl.constexpr, of_input: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, channels)
    at = tl.arange(0, some)[:, None] * channels + channel[None, :]
    first = row * pixels * channels
    total, dots = tl.zeros([channels], tl.float32), tl.zeros([channels], tl.float32)
    for start in range(0, pixels, some):
        inside = (start + tl.arange(0, some) < pixels)[:, None]
        given = tl.load(gradient + first + start * channels + at, mask=inside, other=0.0).to(tl.float32)
        block = tl.load(x + first + start * channels + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(given, 0)
        dots += tl.sum(given * block, 0)
    middle = tl.load(mean + row * channels + channel)
    narrow = tl.load(rstd + row * channels + channel)
    dots = narrow * (dots - middle * total)
    tl.store(scales + row * channels + channel, dots)
    tl.store(shifts + row * channels + channel, total)
    if of_input:
        factor = tl.load(weight + channel)
        slope = -narrow * narrow * _mean(factor * dots, groups, channels) / pixels
        shift = -narrow * _mean(factor * total, groups, channels) / pixels - middle * slope
        factor = factor * narrow
        for start in range(0, pixels, some):
            inside = (start + tl.arange(0, some) < pixels)[:, None]
            given = tl.load(gradient + first + start * channels + at, mask=inside, other=0.0).to(tl.float32)
            block = tl.load(x + first + start * channels + at, mask=inside, other=0.0).to(tl.float32)
            found = given * factor[None, :] + block * slope[None, :] + shift[None, :]
            tl.store(dx + first + start * channels + at, found, mask=inside)
