"""SENet-18 (Hu et al., 2018) for 32×32 images: ResNet-18 with norms before the convolutions and channel gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adp2sgd.models.blocks import ImageClassifier, SqueezeExcitation, conv_norm, strides
from adp2sgd.models.norm import norm_layer

STAGES = ((64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2))  # width, blocks, stride


def senet18(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Eight pre-activation blocks with squeeze-excitation (ratio 16); 11,260,354 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 64, norm=norm)]
    inputs = 64
    for width, blocks, first in STAGES:
        for stride in strides(first, blocks):
            layers.append(PreActivationBlock(inputs, width, stride, norm))
            inputs = width
    return ImageClassifier(layers, inputs, classes)


class PreActivationBlock(nn.Module):
    """Norm, ReLU, 3×3 convolution, twice; then the channel gate. A shortcut that must change shape is a bare
    1×1 convolution of the normalized input."""

    def __init__(self, inputs: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        self.before = norm_layer(norm, inputs)
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
            norm_layer(norm, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            SqueezeExcitation(width),
        )
        same = stride == 1 and inputs == width
        self.shortcut = None if same else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.before(x))
        out: Tensor = self.body(active) + (x if self.shortcut is None else self.shortcut(active))
        return out
