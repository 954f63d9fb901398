"""WRN-16-4 (Zagoruyko and Komodakis, 2016) in the form that learns well under privacy (De et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adp2sgd.models.blocks import ImageClassifier, Residual, strides
from adp2sgd.models.norm import norm_layer

GROUPS = 16
STAGES = ((64, 2, 1), (128, 2, 2), (256, 2, 2))  # width, blocks, stride


def wrn16_4(*, classes: int = 10, channels: int = 3, norm: str = "group", standardize: bool = False) -> nn.Module:
    """Six blocks of two 3×3 convolutions, each behind ReLU and GroupNorm(16), in that order; 2.75 million parameters.

    `standardize` uses standardized weights as De et al. do; slower.
    """
    layers: list[nn.Module] = [_conv(channels, 16, 3, 1, standardize)]
    inputs = 16
    for width, blocks, first in STAGES:
        for stride in strides(first, blocks):
            body = nn.Sequential(
                *_active_conv(inputs, width, 3, stride, norm, standardize),
                *_active_conv(width, width, 3, 1, norm, standardize),
            )
            same = inputs == width
            shortcut = None if same else nn.Sequential(*_active_conv(inputs, width, 1, stride, norm, standardize))
            layers.append(Residual(body, shortcut))
            inputs = width
    return ImageClassifier([*layers, nn.ReLU(), _norm(norm, inputs)], inputs, classes)


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels) if kind == "group" else norm_layer(kind, channels)


def _active_conv(
    inputs: int, outputs: int, kernel: int, stride: int, norm: str, standardize: bool
) -> tuple[nn.Module, ...]:
    return nn.ReLU(), _norm(norm, inputs), _conv(inputs, outputs, kernel, stride, standardize)


def _conv(inputs: int, outputs: int, kernel: int, stride: int, standardize: bool) -> nn.Module:
    """Weights of variance 1/fan-in, since what enters is normalized; bias zero."""
    if standardize:
        return StandardizedConv(inputs, outputs, kernel, stride)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)
    nn.init.kaiming_uniform_(conv.weight, nonlinearity="linear")
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
    return conv


class StandardizedConv(nn.Module):
    """A convolution whose weights, per output channel, have mean 0 and L2 norm `gain` (1 at the start).

    No subclass of Conv2d: a clipper that knows Conv2d's gradient must not take it for this layer's.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.gain = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.stride, self.padding = stride, kernel // 2
        nn.init.kaiming_uniform_(self.weight, nonlinearity="linear")

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        scale = self.gain * (centred.square().sum((1, 2, 3)) + 1e-8).rsqrt()
        return nn.functional.conv2d(x, centred * scale.view(-1, 1, 1, 1), self.bias, self.stride, self.padding)
