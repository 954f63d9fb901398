"""ResNeXt-29 (Xie et al., 2017) for 32×32 images, two groups of 64 channels in the first stage (2×64d)."""

from __future__ import annotations

from torch import nn

from adp2sgd.models.blocks import ImageClassifier, Residual, conv_norm, strides

GROUPS = 2
STAGES = ((128, 3, 1), (256, 3, 2), (512, 3, 2))  # inner width, blocks, stride
EXPANSION = 2  # outer width over inner width


def resnext29(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Nine blocks of 1×1, grouped 3×3 and 1×1 convolutions behind a 1×1 stem; 9,128,778 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 64, 1, norm=norm)]
    inputs = 64
    for width, blocks, first in STAGES:
        for stride in strides(first, blocks):
            layers.append(_block(inputs, width, stride, norm))
            inputs = EXPANSION * width
    return ImageClassifier(layers, inputs, classes)


def _block(inputs: int, width: int, stride: int, norm: str) -> nn.Module:
    outputs = EXPANSION * width
    body = nn.Sequential(
        conv_norm(inputs, width, 1, norm=norm),
        conv_norm(width, width, norm=norm, stride=stride, groups=GROUPS),
        conv_norm(width, outputs, 1, norm=norm, relu=False),
    )
    same = stride == 1 and inputs == outputs
    shortcut = None if same else conv_norm(inputs, outputs, 1, norm=norm, stride=stride, relu=False)
    return nn.Sequential(Residual(body, shortcut), nn.ReLU())
