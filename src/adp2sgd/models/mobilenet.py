"""MobileNet (Howard et al., 2017) and MobileNetV2 (Sandler et al., 2018) for 32×32 images."""

from __future__ import annotations

from torch import nn

from adp2sgd.models.blocks import ImageClassifier, Residual, conv_norm, strides

SEPARABLE = (  # width, stride
    *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
    *((512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1)),
)
INVERTED = (  # expansion, width, blocks, stride
    *((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


def mobilenet(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Thirteen pairs of a depthwise 3×3 and a 1×1 convolution; 3,217,226 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 32, norm=norm)]
    inputs = 32
    for width, stride in SEPARABLE:
        layers.append(conv_norm(inputs, inputs, norm=norm, stride=stride, groups=inputs))
        layers.append(conv_norm(inputs, width, 1, norm=norm))
        inputs = width
    return ImageClassifier(layers, inputs, classes)


def mobilenet_v2(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Seventeen inverted residual blocks and a 1×1 convolution to 1,280 channels; 2,296,922 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 32, norm=norm)]
    inputs = 32
    for expansion, width, blocks, first in INVERTED:
        for stride in strides(first, blocks):
            layers.append(_inverted(inputs, width, expansion, stride, norm))
            inputs = width
    layers.append(conv_norm(inputs, 1280, 1, norm=norm))
    return ImageClassifier(layers, 1280, classes)


def _inverted(inputs: int, width: int, expansion: int, stride: int, norm: str) -> nn.Module:
    """Expand, filter each channel, project; a shortcut wherever the image keeps its size."""
    inner = expansion * inputs
    body = nn.Sequential(
        conv_norm(inputs, inner, 1, norm=norm),
        conv_norm(inner, inner, norm=norm, stride=stride, groups=inner),
        conv_norm(inner, width, 1, norm=norm, relu=False),
    )
    if stride > 1:
        return body
    return Residual(body, None if inputs == width else conv_norm(inputs, width, 1, norm=norm, relu=False))
