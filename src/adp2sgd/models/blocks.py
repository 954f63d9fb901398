"""What several families are made of. No layer works in place: a clipper may still need what its tape holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adp2sgd.models.norm import norm_layer


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    norm: str,
    stride: int = 1,
    groups: int = 1,
    bias: bool = False,
    relu: bool = True,
) -> nn.Sequential:
    """Convolution that keeps height and width (but for `stride`), norm, and ReLU unless told otherwise."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=bias)
    layers = [conv, norm_layer(norm, outputs)]
    return nn.Sequential(*layers, nn.ReLU()) if relu else nn.Sequential(*layers)


class Residual(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class Parallel(nn.ModuleList):
    """The outputs of all branches for the same input, one after the other along the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


class SqueezeExcitation(nn.Module):
    """Scales every channel by a factor in (0, 1) that two 1×1 convolutions compute from the channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = channels // 16
        self.gate = nn.Sequential(nn.Conv2d(channels, squeezed, 1), nn.ReLU(), nn.Conv2d(squeezed, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        factors: Tensor = self.gate(x.mean((2, 3), keepdim=True))
        return x * factors.sigmoid()


class ImageClassifier(nn.Module):
    """[n, channels, height, width] → [n, classes]: features, their mean over all pixels, one linear layer."""

    def __init__(self, features: Sequence[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


def strides(first: int, blocks: int) -> list[int]:
    """A stage of `blocks` blocks shrinks the image in its first block only."""
    return [first] + [1] * (blocks - 1)
