"""ResNet-18 (He et al., 2016) for 32×32 images: a 3×3 stem, no pooling before the stages."""

from __future__ import annotations

from torch import nn

from adp2sgd.models.blocks import ImageClassifier, Residual, conv_norm, strides

STAGES = ((64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2))  # width, blocks, stride


def resnet18(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Eight blocks of two 3×3 convolutions; 11,173,962 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 64, norm=norm)]
    inputs = 64
    for width, blocks, first in STAGES:
        for stride in strides(first, blocks):
            layers.append(_block(inputs, width, stride, norm))
            inputs = width
    return ImageClassifier(layers, inputs, classes)


def _block(inputs: int, width: int, stride: int, norm: str) -> nn.Module:
    body = nn.Sequential(
        conv_norm(inputs, width, norm=norm, stride=stride),
        conv_norm(width, width, norm=norm, relu=False),
    )
    same = stride == 1 and inputs == width
    shortcut = None if same else conv_norm(inputs, width, 1, norm=norm, stride=stride, relu=False)
    return nn.Sequential(Residual(body, shortcut), nn.ReLU())
