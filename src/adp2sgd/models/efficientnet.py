"""EfficientNet-B0 (Tan and Le, 2019) for 32×32 images, in the early form whose size the paper reports.

Unlike the published network: 3×3 kernels and ReLU throughout, channel gates after the projection, and a 1×1
convolution as shortcut where only the width changes.
"""

from __future__ import annotations

from torch import Tensor, nn

from adp2sgd.models.blocks import ImageClassifier, SqueezeExcitation, conv_norm, strides

STAGES = (  # expansion, width, blocks, stride
    *((1, 16, 1, 2), (6, 24, 2, 1), (6, 40, 2, 2), (6, 80, 3, 2)),
    *((6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 2)),
)


def efficientnet_b0(*, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Module:
    """Sixteen gated inverted residual blocks; 2,912,089 parameters."""
    layers: list[nn.Module] = [conv_norm(channels, 32, norm=norm)]
    inputs = 32
    for expansion, width, blocks, first in STAGES:
        for stride in strides(first, blocks):
            layers.append(GatedBlock(inputs, width, expansion, stride, norm))
            inputs = width
    return ImageClassifier(layers, inputs, classes)


class GatedBlock(nn.Module):
    """Expand, filter each channel, project, gate. Where the image shrinks, the ungated output is its own shortcut."""

    def __init__(self, inputs: int, width: int, expansion: int, stride: int, norm: str) -> None:
        super().__init__()
        inner = expansion * inputs
        self.body = nn.Sequential(
            conv_norm(inputs, inner, 1, norm=norm),
            conv_norm(inner, inner, norm=norm, stride=stride, groups=inner),
            conv_norm(inner, width, 1, norm=norm, relu=False),
        )
        self.gate = SqueezeExcitation(width)
        self.shrinks = stride > 1
        same = self.shrinks or inputs == width
        self.shortcut = nn.Identity() if same else conv_norm(inputs, width, 1, norm=norm, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        body = self.body(x)
        out: Tensor = self.gate(body) + (body if self.shrinks else self.shortcut(x))
        return out
